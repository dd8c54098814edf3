"""Steps without a model: tables with the tokens of a plan, and keys and states of zeros."""

import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv.cache import merge
from jaxkv.ops.storage.latent import ValueSlice


def apply_plan(cache, plan, **options):
    """Apply a plan; for a batch, store its tokens in the table alone, without keys or states."""
    after = jaxkv.apply(cache, plan, **options)
    return merge(after.table, after.buffers) if isinstance(after, jaxkv.Step) else after


def apply_batch(cache, *args, **options):
    """Store the tokens of a batch that fits, with the arguments of `make_batch`."""
    return apply_plan(cache, jaxkv.init_batch(cache, jaxkv.make_batch(*args, **options)).check())


def add_tokens(cache, tokens, seq=0, *, each=4):
    """Store tokens of a sequence in the table alone, `each` in a plan, which needs one program."""
    for start in range(0, len(tokens), each):
        part = list(tokens[start : start + each])
        valid = np.arange(each) < len(part)
        cache = apply_batch(cache, part + [0] * (each - len(part)), sequences=seq, valid=valid)
    return cache


def write_zeros(params, step):
    """A model function for every cache: keys and states of zeros, and logits `[O, 4]` of zeros."""
    del params
    rows = step.valid.shape
    for (*parts, inner), verb, layer in step.table.layers_to_write(step.buffers, step.ubatch):
        part = step.part(*parts)
        if verb == "states":
            count = part.table.num_earlier_states + 1
            states = {
                name: jnp.zeros((rows[0], count, *x.shape[2:]), x.dtype)
                for name, x in part.buffers[inner].items()
            }
            step = jaxkv.write_states(step, layer, states)
            continue
        heads, size, values = part.buffers.head_sizes[inner]
        v = None if isinstance(values, ValueSlice) else jnp.zeros((*rows, heads, values))
        step = jaxkv.write_kv(step, layer, jnp.zeros((*rows, heads, size)), v)
    return step, jnp.zeros((step.outputs.shape[0], 4))
