"""Models of tunix over jaxkv, by the adapter of docs/howto/tunix.md, generate tunix's own tokens.

They need google-tunix 0.1.7, whose models import without its trainers' dependencies if the parent
module is empty: `pip install --no-deps google-tunix==0.1.7 einops`.
"""

import importlib.util
import re
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of tunix and its packages
]

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "tunix.md"
SIZES = {"num_layers": 3, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8}
SIZES |= {"num_kv_heads": 2, "vocab_size": 64, "rope_theta": 1_000_000, "norm_eps": 1e-6}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [53, 5], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]]
NUM_TOKENS = 24


class Numbers:
    """A tokenizer of numbers in text, as tunix's sampler requires."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def pad_id(self):
        return 0

    def bos_id(self):
        return 1

    def eos_id(self):
        return 63


def definitions():
    """The definitions of the page, by name."""
    (folder,) = importlib.util.find_spec("tunix").submodule_search_locations
    parent = types.ModuleType("tunix")
    parent.__path__ = [folder]
    sys.modules["tunix"] = parent
    adapter, uses = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
    lines = [line for line in adapter.splitlines() if line and " import " not in line]
    assert len(lines) <= 30
    names: dict = {}
    exec(adapter + uses.split("\n\n\n")[0], names)
    return names


@pytest.fixture(scope="module")
def page():
    """The definitions of the page, where tunix may promote ranks."""
    with jax.numpy_rank_promotion("allow"):
        yield definitions()


def make(kind, sizes=SIZES):
    """A random model whose attention is not nearly uniform."""
    if kind == "llama3":
        from tunix.models.llama3.model import Llama3 as Model
        from tunix.models.llama3.model import ModelConfig
    else:
        from tunix.models.qwen3.model import ModelConfig
        from tunix.models.qwen3.model import Qwen3 as Model
    tied = {"weight_tying": True} if kind == "llama3" else {}
    graph, params = nnx.split(Model(ModelConfig(**sizes, **tied), rngs=nnx.Rngs(0)))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    random = [
        jax.random.normal(key, x.shape) * (0.5 if x.ndim > 1 else 0.1) + (x.ndim == 1)
        for key, x in zip(keys, leaves, strict=True)
    ]
    return nnx.merge(graph, jax.tree.unflatten(tree, random))


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_tunix_model_generates_tokens_of_its_own_sampler(page, kind):
    from tunix.generate.sampler import CacheConfig, Sampler

    model = make(kind)
    forward, params = page["adapt"](model)
    cache = CacheConfig(
        cache_size=64, num_layers=3, num_kv_heads=SIZES["num_kv_heads"], head_dim=SIZES["head_dim"]
    )
    sampler = Sampler(model, Numbers(), cache)
    texts = [" ".join(map(str, prompt)) for prompt in PROMPTS]
    theirs = sampler(texts, NUM_TOKENS, max_prompt_length=16, temperature=0.0)
    begun = [[1, *prompt] for prompt in PROMPTS]  # the sampler puts its first token in front
    spec = page["spec_of"](model.config)
    options = dict(spec=spec, max_new_tokens=NUM_TOKENS, stop_tokens=[63])
    ours = jaxkv.generate(forward, params, begun, **options).lists()
    for mine, other in zip(ours, theirs.tokens, strict=True):
        assert mine[: len(other)] == np.asarray(other).tolist()
        assert len({*mine}) > 3
    scores = jaxkv.score(forward, params, ours, prompts=begun, spec=spec)
    grads = jax.grad(
        lambda params: jnp.sum(jaxkv.score(forward, params, ours, prompts=begun, spec=spec))
    )(params)
    assert np.all(np.isfinite(scores)) and all(map(jnp.any, jax.tree.leaves(grads)))
