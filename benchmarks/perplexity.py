"""Perplexity of a recorded text with keys and values in few bits.

Run `python -m benchmarks.perplexity`, or with `--model gemma3`. The text has 1,536 tokens, of which
`--ubatch-size` are computed at once. A form is a dtype, or two dtypes for keys and values with a
slash between them; "+rotate" stores rotated heads. KL is the mean divergence of the distributions
of next tokens from those with float32, which has less noise than the perplexity.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
import models
from benchmarks import machine

GOLDEN = Path(__file__).parent.parent / "tests" / "data" / "golden" / "models.json"
FORMS = ("float32", "int8", "int8+rotate", "float8_e4m3fn", "int8/int4", "int8/int4+rotate")
FORMS += ("int4", "int4+rotate")


def options_of(form: str) -> dict:
    """Return the options of `make_cache` for a form.

    >>> options_of("int8/int4+rotate"), options_of("float32")
    ({'dtype': ('int8', 'int4'), 'rotate': True}, {'dtype': 'float32', 'rotate': False})
    """
    dtypes, _, rotate = form.partition("+")
    pair = tuple(dtypes.split("/"))
    return {"dtype": pair if len(pair) > 1 else dtypes, "rotate": bool(rotate)}


def read(
    model: models.Model, tokens: np.ndarray, form: str, ubatch_size: int
) -> tuple[np.ndarray, float]:
    """Return log-probabilities `[n - 1, V]` of next tokens, and the bytes of a token."""
    cache = model.make_cache(cells=len(tokens), ubatch_size=ubatch_size, **options_of(form))

    @partial(jax.jit, donate_argnames="cache")
    def score(params: object, cache: jaxkv.Cache, ubatch: jaxkv.Ubatch) -> tuple:
        step, logits = model.forward(params, jaxkv.apply(cache, ubatch))
        return step.cache, jax.nn.log_softmax(logits.astype(jnp.float32))

    batch = jaxkv.make_batch(tokens, outputs=np.ones(len(tokens), bool))
    per_token = sum(x.nbytes / x.shape[2] for x in jax.tree.leaves(cache.buffers))
    found = []
    for ubatch in jaxkv.init_batch(cache, batch, ubatch_size=ubatch_size).check().ubatches:
        cache, logprobs = score(model.params, cache, ubatch)
        found.append(np.asarray(logprobs))
    return np.concatenate(found)[: len(tokens) - 1], per_token


def main() -> None:
    """Print the bytes of a token, the perplexity and its change, and KL for each form."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", choices=["smollm2", "gemma3"], default="smollm2")
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--ubatch-size", type=int, default=256)
    args = parser.parse_args()
    machine.main()
    model = models.load(args.model)
    tokens = np.array(json.loads(GOLDEN.read_text())[f"{args.model}_nll"]["tokens"])
    plain, _ = read(model, tokens, "float32", args.ubatch_size)

    def perplexity(logprobs: np.ndarray) -> float:
        return np.exp(-logprobs[np.arange(len(logprobs)), tokens[1:]].mean())

    for form in args.forms:
        found, size = read(model, tokens, form, args.ubatch_size)
        kl = np.sum(np.exp(plain) * (plain - found), axis=1).mean()
        change = 100 * (perplexity(found) / perplexity(plain) - 1)
        print(
            f"{form:17s} {size:8,.0f} bytes a token, perplexity {perplexity(found):.3f} "
            f"({change:+.2f} %), KL {kl:.5f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
