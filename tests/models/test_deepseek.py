"""DeepSeek V2 and V3 against logits that Hugging Face transformers computed."""

import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxkv
import models
from models.costs import abstract_mesh, costs_of
from models.meshes import RULES, make_mesh
from tests.models.test_hybrid_files import config_at

DATA = Path(__file__).parent.parent / "data"
VARIANTS = ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_halves"]
PROMPT, GAP = 30, (4, 12)  # as in the script that recorded them
CLOSE = dict(rtol=0, atol=2e-5)


@cache
def recorded(name):
    return models.load(DATA / name), np.load(DATA / name / "run.npz")


def tell(model, memory, tokens, sequence=0, size=8):
    """The logits after each token, computed in ubatches."""
    outputs = np.ones(len(tokens), bool)
    batch = jaxkv.make_batch(tokens, sequences=sequence, outputs=outputs)
    return jaxkv.prefill(model.forward, model.weights, memory, batch, ubatch_size=size)


@pytest.mark.nightly
@pytest.mark.parametrize("name", VARIANTS)
def test_a_text_by_prompts_tokens_forks_and_shifts(name):
    model, record = recorded(name)
    tokens, wanted = record["tokens"], record["logits"]
    memory = model.make_memory(cells=64, sequences=2)
    memory, logits = tell(model, memory, tokens[:PROMPT])
    np.testing.assert_allclose(logits, wanted[:PROMPT], **CLOSE)

    memory = jaxkv.seq_cp(memory, 0, 1)
    memory, logits = tell(model, memory, tokens[PROMPT:], sequence=1, size=1)
    np.testing.assert_allclose(logits, wanted[PROMPT:], **CLOSE)
    memory, ok = jaxkv.seq_rm(memory, 1)
    assert ok

    first, last = GAP
    memory, ok = jaxkv.seq_rm(memory, 0, first, last)
    assert ok
    memory = jaxkv.seq_add(memory, 0, last, -1, first - last)
    memory = jaxkv.apply(memory, jaxkv.init_update(memory))
    memory, logits = tell(model, memory, tokens[PROMPT:])
    np.testing.assert_allclose(logits, record["shifted"], **CLOSE)


def test_a_token_takes_the_bytes_of_one_latent():
    """Those of DeepSeek V3: 61 layers of 512 numbers and 64 that turn, in bfloat16."""
    config = json.loads((DATA / "deepseek_v3" / "config.json").read_text())
    model = models.load_shapes(DATA / "deepseek_v3", dtype=jnp.bfloat16)
    costs = costs_of(
        models.on_mesh(model, abstract_mesh({"tensor": 2}), RULES),
        cells=64, sequences=1, streams=1,
    )  # fmt: skip
    (part,) = costs.parts
    numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert part.each == 2 * config["num_hidden_layers"] * numbers
    assert part.on_device == 64 * part.each  # one head is whole on each


REFUSED = [
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True where False is wanted"),
    ("deepseek_v2", {"attention_bias": True}, "attention_bias = True where False is wanted"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc' where one of greedy"),
    ("deepseek_v2", {"kv_lora_rank": None}, "config has no kv_lora_rank"),
    ("deepseek_v2", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 where 1 to 8 experts"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax' where 'sigmoid'"),
    ("deepseek_v3", {"n_group": 3}, "n_group = 3 where a divisor of n_routed_experts .8. with 2"),
    ("deepseek_v3", {"n_group": 8}, "n_group = 8 where a divisor of n_routed_experts .8. with 2"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group = 5 where 1 to 4 groups"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5 where 1 to 4 experts"),
    ("deepseek_v3", {"qk_rope_head_dim": 3}, "turns 3 numbers of each head"),
]


def test_what_is_not_computed_is_refused_by_name(tmp_path):
    for name, changes, message in REFUSED:
        with pytest.raises(models.ModelError, match=message):
            models.load_shapes(config_at(tmp_path, name, **changes))


@pytest.mark.nightly
def test_layers_that_guess_further_tokens_are_left_out(tmp_path):
    """Published files of V3 have them behind the others."""
    tensors = load_file(DATA / "deepseek_v3" / "model.safetensors")
    more = {name.replace(".2.", ".3.", 1): x for name, x in tensors.items() if "layers.2." in name}
    save_file(tensors | more, tmp_path / "model.safetensors")
    config_at(tmp_path, "deepseek_v3", num_nextn_predict_layers=1)
    jax.tree.map(
        np.testing.assert_array_equal,
        models.load(tmp_path).weights,
        recorded("deepseek_v3")[0].weights,
    )
    config_at(tmp_path, "deepseek_v3", num_nextn_predict_layers=0)
    with pytest.raises(models.ModelError, match="4 layers where its config says 3"):
        models.load(tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("axes", [{"tensor": 4}, {"tensor": 2, "cells": 2}], ids=str)
def test_query_heads_are_split_over_one_latent(axes):
    """Each device attends with its heads, to all of the latents or those that it holds."""
    mesh = make_mesh(axes)
    model = models.load(DATA / "deepseek_v3", mesh=mesh, rules=RULES)
    _, record = recorded("deepseek_v3")
    attention = model.weights["blocks"][1]["attention"]
    for part in (attention["query"]["weight"], attention["to_keys"], attention["to_values"]):
        assert part.addressable_shards[0].data.size * axes["tensor"] == part.size
    memory = model.make_memory(cells=64, sequences=2)
    with jax.set_mesh(mesh):
        memory, logits = tell(model, memory, record["tokens"][:PROMPT])
        np.testing.assert_allclose(logits, record["logits"][:PROMPT], **CLOSE)
