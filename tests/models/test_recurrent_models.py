"""Recurrent and hybrid models against logits that Hugging Face transformers computed."""

import dataclasses
import itertools
from functools import cache
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv.ops import scans
from tests.cases import mostly_nightly

DATA = Path(__file__).parent.parent / "data"
SEQUENCES = (2, 0, 3)
GENERATED = 32
CLOSE = dict(rtol=0, atol=2e-4)


# ---- whole models


@cache
def recorded(name):
    """The model, and for each sequence its tokens and its logits, NaN where there are none."""
    record = np.load(DATA / name / "run.npz")
    ends = np.cumsum(record["lengths"])
    logits = np.full((ends[-1], record["logits"].shape[1]), np.nan, np.float32)
    logits[record["outputs"]] = record["logits"]
    cut = ends[:-1]
    return models.load(DATA / name), np.split(record["tokens"], cut), np.split(logits, cut)


@cache
def one_token(model):
    """The compiled step that feeds one token to each sequence that is there."""

    @jax.jit
    def step(weights, memory, token, there):
        ubatch, ok = jaxkv.plan_step(memory, token, jnp.asarray(SEQUENCES), there)
        memory, logits = model.forward(weights, jaxkv.apply(memory, ubatch), ubatch)
        return memory, logits, ok

    return step


def agree(found, wanted):
    known = ~np.isnan(wanted[:, 0])
    np.testing.assert_allclose(np.asarray(found)[known], wanted[known], **CLOSE)


def follow(model, memory, group, ubatch_size, kept):
    """Go through what was recorded: the prompts together, `kept` tokens back, then one by one."""
    sequences, tokens, logits = zip(*group, strict=True)
    prompts = [ids[:-GENERATED] for ids in tokens]
    everything = np.ones(sum(map(len, prompts)), bool)
    batch = jaxkv.make_batch(prompts, sequences=sequences, outputs=everything)
    memory, found = jaxkv.prefill(
        model.forward, model.weights, memory, batch, ubatch_size=ubatch_size
    )
    agree(found, np.concatenate([wanted[:-GENERATED] for wanted in logits]))
    for sequence, ids in zip(sequences, prompts, strict=True) if kept else ():
        memory, ok = jaxkv.seq_rm(memory, sequence, len(ids) - kept)
        assert ok
    there = np.isin(SEQUENCES, sequences)
    rest = np.zeros((GENERATED + kept, there.size), int)
    rest[:, there] = np.stack([ids[-GENERATED - kept :] for ids in tokens], axis=1)
    found = []
    for token in rest:
        memory, out, ok = one_token(model)(model.weights, memory, token, there)
        assert ok
        found.append(out[there])
    for one, wanted in zip(np.stack(found, axis=1), logits, strict=True):
        agree(one, wanted[-GENERATED - kept :])


def check(name, *, ubatch_size, together, kept=0, streams=1, lists=(0, 1, 2)):
    model, tokens, logits = recorded(name)
    sequences = [(SEQUENCES[i], tokens[i], logits[i]) for i in lists]
    for group in [sequences] if together else [[one] for one in sequences]:
        memory = model.make_memory(cells=512, sequences=4, rollback=kept, streams=streams)
        follow(model, memory, group, ubatch_size, kept)


@pytest.mark.nightly
def test_prompts_together():
    check("mamba2", ubatch_size=64, together=True, kept=2, streams=4, lists=(1, 2))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["recurrent_gemma", "granite_hybrid_experts_rope"])
def test_one_prompt(name):
    check(name, ubatch_size=512, together=False, kept=3, lists=(2,))


# A batch is cut where one of its prompts ends, so whole ones are told alone. There are only two
# kinds of memory, since ways that have the same share compiled steps.
WAYS = [  # ubatch_size, together, kept, streams
    (1, True, 2, 4),
    (64, True, 2, 4),
    (512, False, 2, 4),
    (5, True, 0, 1),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "way"),
    mostly_nightly(
        itertools.product(["granite_hybrid", "mamba2", "recurrent_gemma"], WAYS),
        few=[("granite_hybrid", WAYS[0]), ("mamba2", WAYS[3]), ("recurrent_gemma", WAYS[1])],
    ),
)
def test_every_way(name, way):
    ubatch_size, together, kept, streams = way
    check(name, ubatch_size=ubatch_size, together=together, kept=kept, streams=streams)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "way"),
    mostly_nightly(
        [
            ("granite_hybrid_experts", WAYS[3]),
            ("granite_hybrid_experts_rope", WAYS[1]),
            ("granite_hybrid_rope", WAYS[2]),
            ("mamba2_biased", WAYS[0]),
            ("lfm2", WAYS[0]),
            ("lfm2", (3, True, 2, 4)),
            ("lfm2", WAYS[2]),
            ("falcon_h1", WAYS[0]),
            ("falcon_h1", (3, True, 2, 4)),
            ("falcon_h1", WAYS[2]),
            ("falcon_h1_norm", WAYS[1]),
        ],
        few=[
            ("granite_hybrid_experts_rope", WAYS[1]),
            ("mamba2_biased", WAYS[0]),
            ("lfm2", (3, True, 2, 4)),
            ("falcon_h1", (3, True, 2, 4)),
        ],
    ),
)
def test_every_variant(name, way):
    ubatch_size, together, kept, streams = way
    check(name, ubatch_size=ubatch_size, together=together, kept=kept, streams=streams)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_greedy_texts_are_those_that_were_recorded(name):
    """The prompts together, and then all texts side by side."""
    model, tokens, _ = recorded(name)
    memory = model.make_memory(cells=512, sequences=4)
    prompts = jaxkv.make_batch([ids[:-GENERATED] for ids in tokens])
    memory, logits = jaxkv.prefill(model.forward, model.weights, memory, prompts, ubatch_size=64)
    first, steps = jnp.argmax(logits, -1).astype(jnp.int32), GENERATED - 1
    state = jaxkv.loops.start(memory, first, limit=steps)
    greedy, stop = jaxkv.loops.sampling.make_sampler(), np.zeros(0, np.int32)
    _, _, picked = jaxkv.decode(
        model.forward, greedy, model.weights, memory, state, stop, steps=steps
    )
    found = np.column_stack([first, picked.tokens])
    np.testing.assert_array_equal(found, [ids[-GENERATED:] for ids in tokens])


def test_a_memory_of_states_alone_needs_no_cells():
    model, _, _ = recorded("mamba2")
    one, more = (model.make_memory(sequences=2, rollback=kept) for kept in (0, 3))
    assert sum(x.nbytes for x in jax.tree.leaves(more.buffers)) == 4 * sum(
        x.nbytes for x in jax.tree.leaves(one.buffers)
    )
    assert recorded("recurrent_gemma")[0].make_memory(sequences=2)
    with pytest.raises(ValueError, match="told its cells"):
        recorded("granite_hybrid")[0].make_memory(sequences=2)


# ---- the recurrences, against a loop over the tokens


def counted(lengths, kept):
    return np.maximum(lengths[:, None] - kept + np.arange(kept + 1)[None], 0)


def rows_of(length, seed=0):
    """Lengths of three rows: full, nearly, and empty; and which tokens are there."""
    lengths = np.array([length, max(length - 3, 0), 0])
    return lengths, np.arange(length)[None] < lengths[:, None], np.random.default_rng(seed)


@pytest.mark.parametrize(("length", "kept"), [(1, 2), (4, 2), (40, 0), (40, 3)])
def test_ssd(length, kept):
    lengths, valid, rng = rows_of(length)
    heads, size, groups, numbers = 4, 5, 2, 6
    x = rng.normal(size=(3, length, heads, size))
    steps = np.where(valid[..., None], np.abs(rng.normal(size=(3, length, heads))), 0)
    rate = -np.abs(rng.normal(size=heads))
    b, c = rng.normal(size=(2, 3, length, groups, numbers))
    state = rng.normal(size=(3, heads, size, numbers))
    counts = counted(lengths, kept)
    arrays = (jnp.asarray(a, jnp.float32) for a in (x, steps, rate, b, c, state))
    out, states = jax.jit(scans.scan_ssd, static_argnames="chunk")(*arrays, counts, chunk=16)
    for r in range(3):
        every, now = [state[r]], state[r]
        for t in range(lengths[r]):
            into, out_of = (np.repeat(y[r, t], heads // groups, axis=0) for y in (b, c))
            added = (steps[r, t][:, None] * x[r, t])[..., None] * into[:, None]
            now = np.exp(steps[r, t] * rate)[:, None, None] * now + added
            np.testing.assert_allclose(out[r, t], np.sum(now * out_of[:, None], -1), atol=3e-5)
            every.append(now)
        np.testing.assert_allclose(states[r], np.stack(every)[counts[r]], atol=3e-5)


def test_kept_states_do_not_cost_one_a_token():
    """The largest array of a scan with kept states is no larger than without."""
    length, heads, size, numbers = 256, 2, 16, 32
    shapes = [(1, length, heads, size), (1, length, heads), (heads,)]
    shapes += [(1, length, 1, numbers)] * 2 + [(1, heads, size, numbers)]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    bytes_ = []
    for kept in (0, 4):
        counts = jax.ShapeDtypeStruct((1, kept + 1), jnp.int32)
        compiled = jax.jit(scans.scan_ssd).lower(*arrays, counts).compile()
        bytes_.append(compiled.memory_analysis().temp_size_in_bytes)
    state = 4 * heads * size * numbers
    assert bytes_[1] - bytes_[0] < 16 * state < length * state / 8


@pytest.mark.parametrize(("length", "kept"), [(1, 2), (20, 3)])
def test_linear_and_conv(length, kept):
    lengths, valid, rng = rows_of(length)
    x = np.where(valid[..., None], rng.normal(size=(3, length, 4)), 0).astype(np.float32)
    decay = np.where(valid[..., None], rng.uniform(size=(3, length, 4)), 1).astype(np.float32)
    state = rng.normal(size=(3, 4)).astype(np.float32)
    weight, bias = rng.normal(size=(3, 4)).astype(np.float32), np.ones(4, np.float32)
    tail = rng.normal(size=(3, 2, 4)).astype(np.float32)
    counts = counted(lengths, kept)
    out, states = jax.jit(scans.scan_diagonal)(decay, x, state, counts)
    mixed, tails = jax.jit(scans.convolve)(x, tail, weight, bias, counts)
    for r in range(3):
        every, now = [state[r]], state[r]
        inputs = np.concatenate([tail[r], x[r]])
        for t in range(lengths[r]):
            now = decay[r, t] * now + x[r, t]
            every.append(now)
            np.testing.assert_allclose(out[r, t], now, atol=1e-5)
            wanted = (inputs[t : t + 3] * weight).sum(0) + bias
            np.testing.assert_allclose(mixed[r, t], wanted, atol=1e-5)
        np.testing.assert_allclose(states[r], np.stack(every)[counts[r]], atol=1e-5)
        for i, count in enumerate(counts[r]):
            np.testing.assert_array_equal(tails[r, i], inputs[count : count + 2])


# ---- the same models as llama.cpp's converter writes them


def stored(name, array, config):
    """What a file has for a tensor of Hugging Face: pairs of a name and an array."""
    part = name.split(".", 3)[-1] if ".layers." in name else name
    layer = f"blk.{name.split('.')[2]}" if ".layers." in name else ""
    part = part.removeprefix("mixer.").removeprefix("mamba.")
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    shared = "_shexp" if config.get("num_local_experts") else ""
    plain = {
        "backbone.embeddings.weight": "token_embd.weight",
        "model.embed_tokens.weight": "token_embd.weight",
        "backbone.norm_f.weight": "output_norm.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "in_proj.weight": "ssm_in.weight",
        "conv1d.bias": "ssm_conv1d.bias",
        "dt_bias": "ssm_dt.bias",
        "out_proj.weight": "ssm_out.weight",
        "input_layernorm.weight": "attn_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "self_attn.v_proj.weight": "attn_v.weight",
        "self_attn.o_proj.weight": "attn_output.weight",
        "block_sparse_moe.router.layer.weight": "ffn_gate_inp.weight",
        "block_sparse_moe.output_linear.weight": "ffn_down_exps.weight",
        "shared_mlp.output_linear.weight": f"ffn_down{shared}.weight",
    }
    if part == "norm.weight" and ".mixer." not in name and ".mamba." not in name:
        return [(f"{layer}.attn_norm.weight", array)]
    if part == "norm.weight":
        groups = config.get("n_groups") or config["mamba_n_groups"]
        return [(f"{layer}.ssm_norm.weight", array.reshape(groups, -1))]
    if part == "conv1d.weight":
        return [(f"{layer}.ssm_conv1d.weight", array[:, 0])]
    if part == "A_log":
        return [(f"{layer}.ssm_a", -np.exp(array)[:, None])]
    if part == "D":
        return [(f"{layer}.ssm_d", array[:, None])]
    for one, key in heads.items():
        if f".{one}." in name:
            halves = array.reshape(config[key], 2, -1, array.shape[1]).swapaxes(1, 2)
            return [(f"{layer}.attn_{one[0]}.weight", halves.reshape(array.shape))]
    if part.endswith("input_linear.weight"):
        kind = "_exps" if "sparse" in part else shared
        halves = zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True)
        return [(f"{layer}.ffn_{half}{kind}.weight", values) for half, values in halves]
    return [(f"{layer}.{plain[part]}".lstrip("."), array)]


def write_gguf(path, arch, tensors, config):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_context_length(2**20)
    if arch == "mamba2":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
        heads, inner = config["num_heads"], config["num_heads"] * config["head_dim"]
        sizes = (config["conv_kernel"], config["state_size"], config["n_groups"])
    else:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        groups = config["num_key_value_heads"]
        kinds = config["layer_types"]
        writer.add_head_count_kv([groups if kind == "full_attention" else 0 for kind in kinds])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
        writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
        if config["num_local_experts"]:
            writer.add_expert_count(config["num_local_experts"])
            writer.add_expert_used_count(config["num_experts_per_tok"])
        heads, inner = config["mamba_n_heads"], config["mamba_n_heads"] * config["mamba_d_head"]
        sizes = tuple(config[f"mamba_{name}"] for name in ("d_conv", "d_state", "n_groups"))
    writer.add_ssm_conv_kernel(sizes[0])
    writer.add_ssm_state_size(sizes[1])
    writer.add_ssm_group_count(sizes[2])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_time_step_rank(heads)
    for name, array in tensors.items():
        for where, values in stored(name, array, config):
            writer.add_tensor(where, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("mamba2", "mamba2"),
        ("granite_hybrid", "granitehybrid"),
        ("granite_hybrid_experts_rope", "granitehybrid"),
    ],
)
def test_a_gguf_file_holds_the_same_model(tmp_path, name, arch):
    folder = recorded(name)[0]
    tensors = {name: folder.checkpoint.tensor(name) for name in folder.checkpoint.names()}
    path = tmp_path / "tiny.gguf"
    write_gguf(path, arch, tensors, folder.checkpoint.config)
    file = models.load(path)
    assert file.family is folder.family
    wanted, found = (dataclasses.asdict(model.config) for model in (folder, file))
    for key in ("eps", "mixer"):  # numbers rounded to float32 in the file
        if isinstance(wanted.get(key), float):
            assert found.pop(key) == pytest.approx(wanted.pop(key))
        elif isinstance(wanted.get(key), dict):
            assert found[key].pop("eps") == pytest.approx(wanted[key].pop("eps"))
    assert found == wanted
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), file.weights, folder.weights
    )
