"""Drafts of MTP heads: the logits of transformers' layers, and those of a loop without caches."""

import functools
from functools import partial

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxkv
import models
from tests.generation import tiny
from tests.helpers.parametrize import mark_cases
from tests.models.tiny_files import DATA, config_at

NAMES = ["qwen3_5", "qwen3_5_moe"]
LENGTH, COUNT, DRAFT = 40, 20, 3
over_names = pytest.mark.parametrize("name", mark_cases(NAMES))


@functools.cache
def load_both(name):
    model = models.load(DATA / name, return_features=True)
    return model, models.mtp_head(model)


def run_once(model, *texts):
    return tiny.run_once(model.forward, model.params, model.make_cache, *texts, length=LENGTH)


@over_names
def test_logits_of_head_match_layer_of_transformers(name):
    model, head = load_both(name)
    run = np.load(DATA / name / "run.npz")
    tokens = run["tokens"][:LENGTH]
    features = list(run_once(model, tokens)[1][:-1])
    np.testing.assert_allclose(
        run_once(head, tokens[1:], features)[0], run["mtp_logits"], rtol=0, atol=2e-4
    )


@over_names
def test_speculate_with_head_says_what_a_loop_without_caches_says(name):
    """The head was trained on texts of the first prompts, and not on the others."""
    model, head = load_both(name)
    prompts = np.load(DATA / name / "run.npz")["mtp_prompts"][:3].tolist() + [[5, 6, 7, 8], [9]]
    sizes = dict(cells=LENGTH, sequences=5, streams=5, max_rollback=DRAFT)
    drafter = models.mtp_drafter(model, head, prompts, cells=LENGTH, num_draft_tokens=DRAFT)
    options = dict(cache=model.make_cache(**sizes), max_new_tokens=COUNT, drafter=drafter)
    out = jaxkv.generate(model.forward, model.params, prompts, **options)
    counts = np.stack([out.num_model_steps, out.num_drafted, out.num_accepted], axis=1)
    for tokens, found, prompt in zip(out.lists(), counts.tolist(), prompts, strict=True):
        both = partial(run_once, model), partial(run_once, head)
        wanted = tiny.speculate_plainly(*both, prompt, count=COUNT, draft=DRAFT)
        assert (tokens, found) == wanted
    assert (counts[:3, 2] > 5).all() and (counts[:3, 0] < COUNT - 5).all()


@pytest.mark.nightly
def test_head_gets_the_positions_of_prompts_and_drafts():
    """Equal offsets of all tokens change no logits, so drafts are as good as without offsets."""
    model, head = load_both("qwen3_5")
    prompts = np.load(DATA / "qwen3_5" / "run.npz")["mtp_prompts"][:2].tolist() + [[9]]
    extra = {"rope_offsets": np.full((sum(map(len, prompts)), 3), 1000, np.int32)}

    def count(**options):
        sizes = dict(cells=LENGTH, sequences=3, streams=3, max_rollback=DRAFT)
        drafter = models.mtp_drafter(
            model, head, prompts, cells=LENGTH, num_draft_tokens=DRAFT, **options
        )
        options |= dict(cache=model.make_cache(**sizes), max_new_tokens=COUNT, drafter=drafter)
        out = jaxkv.generate(model.forward, model.params, prompts, **options)
        return out.lists(), out.num_accepted.tolist()

    assert count(extra=extra) == count()


def test_features_are_the_input_of_the_output_matrix():
    model, plain = models.load(DATA / "llama_tied", return_features=True), load_plain("llama_tied")
    logits, features = run_once(model, [3, 4, 5])
    np.testing.assert_array_equal(logits, run_once(plain, [3, 4, 5])[0])
    head = model.params["vocabulary"]["head"]
    np.testing.assert_allclose(features @ head.T, logits, atol=1e-5)


def load_plain(name):
    return models.load(DATA / name)


@pytest.mark.nightly
def test_head_of_qwen3_next_with_separate_experts_drafts(tmp_path):
    """Its head has the tensors of that of Qwen3.5 with experts, one tensor for each expert."""
    tensors = load_file(DATA / "qwen3_next" / "model.safetensors")
    for name, x in load_file(DATA / "qwen3_5_moe" / "model.safetensors").items():
        start, is_joined, part = name.partition(".experts.")
        if name.startswith("mtp.") and not is_joined:
            tensors[name] = x
        elif name.startswith("mtp."):
            parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(part, (part,))
            for i, expert in enumerate(x):
                for key, matrix in zip(parts, np.split(expert, len(parts)), strict=True):
                    tensors[f"{start}.experts.{i}.{key}.weight"] = matrix.copy()
    save_file(tensors, config_at(tmp_path, "qwen3_next") / "model.safetensors")
    model = models.load(tmp_path, return_features=True)
    head, joined = models.mtp_head(model), load_both("qwen3_5_moe")[1]
    for key in ("blocks", "join"):
        jax.tree.map(np.testing.assert_array_equal, head.params[key], joined.params[key])
    prompts = [[5, 6, 7, 8], [9, 3]]
    sizes = dict(cells=LENGTH, sequences=2, streams=2, max_rollback=DRAFT)
    options = dict(cache=model.make_cache(**sizes), max_new_tokens=COUNT)
    plain = jaxkv.generate(model.forward, model.params, prompts, **options)
    drafter = models.mtp_drafter(model, head, prompts, cells=LENGTH)
    out = jaxkv.generate(model.forward, model.params, prompts, drafter=drafter, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    assert (out.num_drafted > 0).all()


def write_changed(folder, change):
    """Write the dense model with changed tensors; return it loaded."""
    tensors = change(load_file(DATA / "qwen3_5" / "model.safetensors"))
    save_file(tensors, config_at(folder, "qwen3_5") / "model.safetensors")
    return models.load(folder)


def test_model_without_a_known_head_raises(tmp_path):
    with pytest.raises(models.ModelError, match=r"with the tensors mtp\.\* of a head, got one"):
        models.mtp_head(load_plain("llama_tied"))
    model = load_plain("qwen3_5")
    with pytest.raises(models.ModelError, match="load it with return_features=True"):
        models.mtp_drafter(model, models.mtp_head(model), [[1, 2]], cells=8)
    for key, message in [
        ("mtp.layers.1.mlp.up_proj.weight", r"a head of one layer, got unused \(mtp\.layers\.1"),
        ("mtp.embed_tokens.weight", r"got unused \(mtp\.embed_tokens"),
    ]:
        model = write_changed(tmp_path, lambda x, key=key: x | {key: np.ones((2, 2), np.float32)})
        with pytest.raises(models.ModelError, match=message):
            models.mtp_head(model)
    gap = "mtp.fc.weight"
    model = write_changed(tmp_path, lambda x: {key: x[key] for key in x if key != gap})
    with pytest.raises(models.ModelError, match=r"got 1 missing \(mtp\.fc\.weight"):
        models.mtp_head(model)


def test_two_third_results_raise():
    with pytest.raises(models.ModelError, match="expected return_mass or return_features, got"):
        models.load(DATA / "llama_tied", return_mass=True, return_features=True)
    with pytest.raises(models.ModelError, match="expected a model with return_features"):
        models.load(DATA / "mamba2", return_features=True)


@pytest.mark.nightly
def test_speculate_with_head_on_mesh_matches_one_device():
    from models.meshes import RULES, make_mesh

    model, head = load_both("qwen3_5")
    mesh = make_mesh({"tensor": 2})
    split = models.load(DATA / "qwen3_5", return_features=True, mesh=mesh, rules=RULES)
    own = models.mtp_head(split)
    assert own.params["join"]["weight"].shape == head.params["join"]["weight"].shape
    down = own.params["blocks"][0]["feed"]["down"]["weight"]
    assert down.addressable_shards[0].data.size * 2 == down.size
    prompts = [[5, 6, 7, 8], [9, 3]]
    sizes = dict(cells=LENGTH, sequences=2, streams=2, max_rollback=DRAFT)

    def speculate(model, head):
        drafter = models.mtp_drafter(model, head, prompts, cells=LENGTH)
        options = dict(cache=model.make_cache(**sizes), max_new_tokens=COUNT, drafter=drafter)
        return jaxkv.generate(model.forward, model.params, prompts, **options)

    wanted = speculate(model, head)
    with jax.set_mesh(mesh):
        found = speculate(split, own)
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_array_equal(found.num_accepted, wanted.num_accepted)
