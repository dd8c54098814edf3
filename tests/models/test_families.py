"""Every family of models on tiny weights, against logits that transformers computed."""

import functools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxkv
import models
from jaxkv import generation, make_batch
from tests.helpers.parametrize import mark_cases
from tests.models.tiny_files import DATA, config_at

SEQUENCES = (2, 0, 3)  # of the texts; one of the four stays empty
LLAMAS = ["llama_linear", "llama_llama3", "llama_tied", "llama_yarn", "mistral", "mistral_window"]
LLAMAS += ["olmo2", "qwen2", "qwen2_window", "qwen3", "qwen3_moe", "qwen3_window"]
DEEPSEEKS = ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_halves"]
OTHERS = ["llama4", "nemotron_h", "deepseek_v32"]
GEMMAS = ["gemma3n", "gemma4", "gemma4_experts"]
MASSES = ["gemma3", "deepseek_v3", "falcon_h1"]
LATENT = dict(rtol=0, atol=2e-5)


class Record(NamedTuple):
    """A model and its results in transformers; logits that are not recorded are NaN.

    steps: how many tokens at the end of each text are fed one at a time.
    within: tolerance of logits.
    """

    model: Any
    tokens: list
    logits: list
    sources: list
    steps: int
    within: float


@functools.cache
def load_record(name):
    model = models.load(DATA / name)
    file = dict(np.load(next((DATA / name).glob("*.npz"))))
    if "sources" in file:
        sources = np.split(file["sources"], file["lengths"][:1])
        return Record(model, list(file["greedy"]), list(file["logits"]), sources, 8, 2e-5)
    tokens, outputs, steps = file["tokens"], file.get("outputs"), 32
    latent = name in DEEPSEEKS
    if outputs is None:
        outputs, steps = np.arange(len(tokens)) % (1 if latent else 9) == 0, 0
    if "greedy" in file:  # the greedy tokens were fed too, except the last
        outputs[-1], steps = True, 23
        tokens = np.append(tokens, file["greedy"][:-1])
        outputs = np.append(outputs, np.ones(steps, bool))
    logits = np.full((len(tokens), file["logits"].shape[1]), np.nan, np.float32)
    logits[outputs] = file["logits"]
    cut = np.cumsum(file.get("lengths", [len(tokens)]))[:-1]
    within = 2e-5 if latent else 2e-4
    return Record(model, np.split(tokens, cut), np.split(logits, cut), [], steps, within)


class Way(NamedTuple):
    """How texts are fed.

    steps: whether the last tokens are fed one at a time, or are a part of the prompts.
    max_rollback: how many tokens of the prompts are rolled back, and fed one at a time.
    texts: how many of the texts are fed.
    """

    ubatch_size: int
    steps: bool = True
    together: bool = True
    max_rollback: int = 0
    streams: int = 1
    full_windows: bool = False
    texts: int = 3


@functools.cache
def compiled_step(model):
    @jax.jit
    def step(params, cache, token, there):
        plan = jaxkv.plan_step(cache, token, sequences=jnp.asarray(SEQUENCES), active=there)
        step, logits = model.forward(params, jaxkv.apply(cache, plan))
        return step.cache, logits, plan.ok

    return step


def agree(found, wanted, within):
    known = ~np.isnan(wanted[:, 0])
    np.testing.assert_allclose(np.asarray(found)[known], wanted[known], rtol=0, atol=within)


def prefill(model, cache, lists, sequences, **options):
    batch = make_batch(lists, sequences=sequences, outputs=np.ones(sum(map(len, lists)), bool))
    return jaxkv.prefill(model.forward, model.params, cache, batch, **options)[:2]


def follow(record, cache, which, way):
    """Feed some texts to their sequences, and compare the logits."""
    model, steps = record.model, record.steps * way.steps
    back = steps + way.max_rollback
    sequences = [SEQUENCES[i] for i in which]
    if record.sources:
        batch = make_batch([record.sources[i] for i in which], sequences=sequences)
        cache = jaxkv.encode(model.encoder, model.params, cache, batch).cache
    prompts = [record.tokens[i][: len(record.tokens[i]) - steps] for i in which]
    cache, found, *_ = prefill(model, cache, prompts, sequences, ubatch_size=way.ubatch_size)
    known = [record.logits[i][: len(prompt)] for i, prompt in zip(which, prompts, strict=True)]
    agree(found, np.concatenate(known), record.within)
    for sequence, prompt in zip(sequences, prompts, strict=True) if way.max_rollback else ():
        cache, ok = jaxkv.seq_rm(cache, sequence, len(prompt) - way.max_rollback)
        assert ok
    there = np.isin(SEQUENCES, sequences)
    rest = np.zeros((back, there.size), int)
    for i in which:
        rest[:, i] = record.tokens[i][len(record.tokens[i]) - back :]
    found = []
    for token in rest:
        cache, out, ok = compiled_step(model)(model.params, cache, token, there)
        assert ok
        found.append(out)
    for i in which if back else ():
        agree(np.stack(found)[:, i], record.logits[i][-back:], record.within)


ONE_BY_ONE = Way(1, max_rollback=2, streams=4)
IN_UBATCHES = Way(64, max_rollback=2, streams=4)
SHORT_UBATCHES = Way(3, max_rollback=2, streams=4)
ALONE = Way(512, together=False, max_rollback=2, streams=4)
POOLED = Way(5)
WHOLE = Way(16, steps=False)  # one program
FIRST = Way(128, steps=False, texts=1)
# A window cache is smaller than the text, so that its cells are reused several times.
SMALL = dict.fromkeys(LLAMAS, dict(cells=128, ubatch_size=20, max_rollback=4))
SMALL["gemma3"] = dict(cells=96, ubatch_size=16, max_rollback=4)
SMALL |= dict.fromkeys(GEMMAS, dict(cells=512, ubatch_size=16, max_rollback=4))
SMALL |= dict.fromkeys(["t5_gated", "t5_tied"], dict(cells=96, source_cells=56))
FAST = ("llama_tied", Way(20))
CORE = [(name, WHOLE) for name in ("deepseek_v2_groups", "gemma3", "t5_tied")]
CORE += [(name, FIRST) for name in ("qwen3_next", "qwen3_5", "deepseek_v32")]
CORE += [("gemma4", Way(16, steps=False, texts=1))]
NIGHTLY = [
    *[(name, Way(20)) for name in LLAMAS if name != "llama_tied"],
    *[
        (name, WHOLE)
        for name in ("granite_hybrid_experts_rope", "recurrent_gemma", "lfm2", "gpt_oss")
    ],
    ("gemma3", Way(4)),
    ("gemma3", Way(1, streams=4, full_windows=True)),
    ("t5_gated", Way(16)),
    ("t5_tied", Way(16, streams=4)),
    *[(name, POOLED) for name in ("mamba2", "granite_hybrid_experts", "qwen3_next")],
    *[(name, ALONE) for name in ("mamba2", "recurrent_gemma", "granite_hybrid_rope")],
    *[(name, ALONE) for name in ("lfm2", "falcon_h1", "qwen3_next")],
    *[(name, ONE_BY_ONE) for name in ("mamba2_biased", "granite_hybrid")],
    *[(name, IN_UBATCHES) for name in ("recurrent_gemma", "falcon_h1_norm", "qwen3_next")],
    *[(name, SHORT_UBATCHES) for name in ("lfm2", "falcon_h1", "qwen3_next")],
    *[("qwen3_5", way) for way in (POOLED, ALONE, IN_UBATCHES, ONE_BY_ONE)],
    *[("qwen3_5_moe", way) for way in (POOLED, SHORT_UBATCHES)],
    *[("gpt_oss", way) for way in (POOLED, ONE_BY_ONE, SHORT_UBATCHES)],
    *[("gpt_oss_mxfp4", way) for way in (ALONE, IN_UBATCHES)],
    *[(name, FIRST) for name in ("qwen3_5_moe", "llama4", "nemotron_h")],
    *[(name, way) for name in OTHERS for way in (POOLED, ONE_BY_ONE, IN_UBATCHES)],
    *[(name, way) for name in GEMMAS for way in (POOLED, ONE_BY_ONE, Way(16, max_rollback=2))],
    *[(name, Way(1, streams=4, full_windows=True)) for name in GEMMAS],
    *[(name, WHOLE) for name in ("nemotron_h_latent", "nemotron_h_dense")],
]


def name_of(value):
    return value if isinstance(value, str) else f"{value.ubatch_size}x{value.streams}"


@pytest.mark.parametrize(
    "name, way", mark_cases([FAST, *CORE, *NIGHTLY], [FAST], CORE), ids=name_of
)
def test_logits_match_transformers(name, way):
    record = load_record(name)
    which = range(len(record.tokens))[: way.texts]
    options = dict(cells=512, max_rollback=way.max_rollback, full_windows=way.full_windows)
    options |= dict(sequences=4, streams=way.streams) | SMALL.get(name, {})
    for group in [which] if way.together else [[i] for i in which]:
        cache = record.model.make_cache(**options)
        follow(record, cache, group, way)


@pytest.mark.parametrize(
    "name",
    mark_cases(["llama_tied", "granite_hybrid"], fast=["llama_tied"], core=["granite_hybrid"]),
)
def test_token_beyond_the_vocabulary_is_nan_for_its_text_alone(name):
    model, there = load_record(name).model, np.ones(3, bool)
    cache = model.make_cache(cells=32, sequences=4)
    for token in ([3, 10**6, 4], [5, 6, 7]):
        cache, logits, ok = compiled_step(model)(model.params, cache, jnp.array(token), there)
        assert ok and np.isnan(logits).any(axis=1).tolist() == [False, True, False]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_embeddings_have_the_layer_inputs_of_the_padding_token(name, tmp_path):
    weights = (DATA / name / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    model = models.load(config_at(tmp_path, name, pad_token_id=7))
    size = model.config.width
    row = np.asarray(model.params["vocabulary"]["head"])[7] * size**0.5
    found, wanted, other = (
        jaxkv.prefill(model.forward, model.params, model.make_cache(cells=8), batch).logits
        for batch in (make_batch(embeddings=np.tile(row, (5, 1))), [7] * 5, [7] * 4 + [8])
    )
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert np.abs(wanted - other).max() > 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["t5_gated", "t5_tied"])
def test_beam_matches_generate_of_transformers(name):
    record, run = load_record(name), np.load(DATA / name / "run.npz")
    model = record.model
    cache = model.make_cache(cells=96, source_cells=56, sequences=4)
    batch = make_batch(record.sources, sequences=[0, 1])
    cache = jaxkv.encode(model.encoder, model.params, cache, batch).cache
    cache, logits, *_ = prefill(model, cache, [[0]], [0])
    one = partial(generation.beam, model.forward, model.params)
    beams = one(cache, logits, num_beams=3, num_tokens=8, sequences=[0, 2, 3])
    np.testing.assert_array_equal(beams.tokens[0], run["beam"][1:])
    np.testing.assert_allclose(beams.scores[0], run["score"], atol=1e-4)


def feed_grid(model, run, cache, start, stop, ubatch_size, sequence=0):
    """Feed embeddings of a text around a grid of patches, with positions on three axes."""
    offsets = run["grid_positions"] - np.arange(32, dtype=np.int32)[:, None]
    batch = make_batch(
        embeddings=run["grid_embeddings"][start:stop],
        sequences=sequence,
        outputs=np.ones(stop - start, bool),
        extra={"rope_offsets": offsets[start:stop]},
    )
    options = dict(ubatch_size=ubatch_size)
    return jaxkv.prefill(model.forward, model.params, cache, batch, **options)[:2]


@pytest.mark.parametrize(
    ("name", "ubatch_size"),
    mark_cases([("qwen3_5", 32), ("qwen3_5", 5), ("qwen3_5_moe", 32)], [], [("qwen3_5", 32)]),
)
def test_logits_of_grid_of_patches_match_transformers(name, ubatch_size):
    """Text after the grid, fed after a fork and a rollback, has positions on three axes too."""
    model, run = models.load(DATA / name), dict(np.load(DATA / name / "run.npz"))
    wanted, cache = run["grid_logits"], model.make_cache(cells=64, sequences=2, max_rollback=4)
    cache, logits = feed_grid(model, run, cache, 0, 26, ubatch_size)
    agree(logits, wanted[:26], 2e-4)
    cache, ok = jaxkv.seq_rm(cache, 0, 24)
    cache = jaxkv.seq_cp(cache, 0, 1).cache
    for sequence in (0, 1):
        cache, logits = feed_grid(model, run, cache, 24, 32, ubatch_size, sequence)
        agree(logits, wanted[24:], 2e-4)
    plain = dict(run, grid_positions=np.repeat(np.arange(32)[:, None], 3, axis=1))
    _, logits = feed_grid(model, plain, model.make_cache(cells=64), 0, 32, ubatch_size)
    assert ok and np.abs(np.asarray(logits) - wanted).max() > 0.1


@pytest.mark.core
def test_experts_in_two_tensors_load_as_those_in_many(tmp_path):
    """The first form is the published one, and the second that of `save_pretrained`."""
    tensors, found = load_file(DATA / "qwen3_5_moe" / "model.safetensors"), {}
    config_at(tmp_path, "qwen3_5_moe")
    for name, x in tensors.items():
        layer, _, rest = name.partition(".experts.0.")
        if ".experts." not in name or name.startswith("mtp."):
            found[name] = x
        elif rest == "up_proj.weight":
            parts = [
                np.stack([tensors[f"{layer}.experts.{i}.{part}_proj.weight"] for i in range(4)])
                for part in ("gate", "up", "down")
            ]
            found[f"{layer}.experts.gate_up_proj"] = np.concatenate(parts[:2], axis=1)
            found[f"{layer}.experts.down_proj"] = parts[2]
    save_file(found, tmp_path / "model.safetensors")
    wanted = models.load(DATA / "qwen3_5_moe").params
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path).params, wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEEPSEEKS)
def test_deepseek_logits_match_after_fork_and_shift(name):
    model, run = models.load(DATA / name), np.load(DATA / name / "run.npz")
    tokens, wanted, prompt, (first, last) = run["tokens"], run["logits"], 30, (4, 12)
    cache = model.make_cache(cells=64, sequences=2)
    cache, logits, *_ = prefill(model, cache, [tokens[:prompt]], [0], ubatch_size=8)
    np.testing.assert_allclose(logits, wanted[:prompt], **LATENT)

    cache = jaxkv.seq_cp(cache, 0, 1).cache
    cache, logits, *_ = prefill(model, cache, [tokens[prompt:]], [1], ubatch_size=1)
    np.testing.assert_allclose(logits, wanted[prompt:], **LATENT)
    cache, _ = jaxkv.seq_rm(cache, 1)

    cache, _ = jaxkv.seq_rm(cache, 0, first, last)
    cache = jaxkv.seq_add(cache, 0, last, -1, delta=first - last).cache
    cache = jaxkv.apply(cache, jaxkv.init_update(cache))
    cache, logits, *_ = prefill(model, cache, [tokens[prompt:]], [0], ubatch_size=8)
    np.testing.assert_allclose(logits, run["shifted"], **LATENT)


@pytest.mark.nightly
def test_deepseek_layers_for_further_tokens_are_left_out(tmp_path):
    tensors = load_file(DATA / "deepseek_v3" / "model.safetensors")
    more = {name.replace("layers.2.", "layers.3."): x for name, x in tensors.items()}
    save_file(tensors | more, tmp_path / "model.safetensors")
    config_at(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    wanted = models.load(DATA / "deepseek_v3").params
    jax.tree.map(np.testing.assert_array_equal, models.load(tmp_path).params, wanted)
    config_at(tmp_path, "deepseek_v3", num_nextn_predict_layers=0)
    with pytest.raises(models.ModelError, match=r"unused \(model\.layers\.3\."):
        models.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    mark_cases([*MASSES, "gemma3n", "gemma4"], fast=MASSES[:1], core=MASSES[1:]),
)
def test_mass_of_a_model_is_that_of_its_layers_in_order(name, monkeypatch):
    plain, model = models.load(DATA / name), models.load(DATA / name, return_mass=True)
    cache = model.make_cache(cells=32, sequences=2, streams=2)
    ubatch = jaxkv.init_batch(cache, make_batch([[1, 2], [4, 5]])).ubatches[0]
    calls = []

    def attend(step, layer, *args, **options):
        result = attend_of_jaxkv(step, layer, *args, **options)
        calls.append((layer, step.sum_by_stream(result[2])))
        return result

    attend_of_jaxkv = jaxkv.attend
    wanted = plain.forward(plain.params, jaxkv.apply(cache, ubatch))
    monkeypatch.setattr(jaxkv, "attend", attend)
    _, logits, masses = model.forward(model.params, jaxkv.apply(cache, ubatch))
    np.testing.assert_array_equal(logits, wanted[1])
    layers = [layer for layer, _ in calls]
    assert layers == [*getattr(model.config, "cache_layers", sorted(layers))]
    assert len(masses) == len(calls) > 1
    for mass, (_, of_call) in zip(masses, calls, strict=True):
        np.testing.assert_array_equal(mass, of_call)
        np.testing.assert_allclose(mass.sum(axis=2), np.full(mass.shape[:2], 2), rtol=1e-5)


def test_mass_of_a_model_without_attention_raises():
    with pytest.raises(
        models.ModelError, match="expected a model with return_mass, got one without"
    ):
        models.load(DATA / "mamba2", return_mass=True)
