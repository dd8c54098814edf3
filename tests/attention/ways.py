"""The implementations of attention, as functions of the same arrays."""

from dataclasses import replace
from functools import partial

import jax
import pytest

from jaxkv.core.platforms import by_platform
from jaxkv.kv.layer_kv import HeadSizes, make_layer_kv
from jaxkv.ops.attention import attention, dispatch, pallas_gpu
from jaxkv.ops.attention.softmax import reset_where_bias_hides_all, sum_weights
from jaxkv.ops.attention.visibility import compute_mask
from jaxkv.ops.storage.latent import ValueSlice
from tests.attention.formula import PLAIN

# jax 0.11 and later warn about Pallas Triton, which the GPU kernel uses.
DEPRECATED = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
TRITON = pytest.mark.filterwarnings(DEPRECATED)


def attend_masks(q, k, v, visibility, options):
    k, v = (visibility.gather_list_streams(x) for x in (k, v))
    given = dict(scale=options.scale, softcap=options.softcap, sinks=options.sinks)
    return attention(q, k, v, compute_mask(visibility), **given)


@partial(jax.jit, static_argnames="implementation")
def attend(q, k, v, visibility, options, implementation=None):
    """Attend from each list of queries to the stream of the list."""
    values = v if isinstance(v, ValueSlice) else v.shape[3]
    layer_kv = make_layer_kv(k, v, HeadSizes(k.shape[1], k.shape[3], values))
    return dispatch.finalize(layer_kv.attend(q, visibility, options, implementation), q, options)


def finalize_sums(weigh):
    """Wrap an implementation as `attend` does."""

    def attend(q, k, v, visibility, options):
        sums = weigh(q, k, v, visibility, options)
        sums = sums if visibility.bias is None else reset_where_bias_hides_all(sums)
        return dispatch.finalize(sums, q, options)

    return attend


@partial(jax.jit, static_argnames="way")
def attend_with_mass(way, q, k, v, visibility, options=PLAIN):
    """The output and the mass of an implementation, or of the one for other platforms."""
    options = replace(options, keep_weights=True)
    if way == "elsewhere":
        part = dispatch.attend_by_shapes(q, k, v, visibility, options)
    else:
        values = v if isinstance(v, ValueSlice) else v.shape[3]
        layer_kv = make_layer_kv(k, v, HeadSizes(k.shape[1], k.shape[3], values))
        part = layer_kv.attend(q, visibility, options, None if way == "default" else way)
    out = dispatch.finalize(part, q, options)
    return out, sum_weights(part, part, options, q.shape[1])


GPU = pallas_gpu.attend
WEIGH = {
    "gpu": by_platform(dispatch.empty_result, cuda=GPU, default=partial(GPU, interpret=True)),
    "elsewhere": dispatch.attend_by_shapes,  # neither a CPU nor a kernel
}
WAYS = {
    "default": attend,
    **{name: partial(attend, implementation=name) for name in ("tiles", "whole", "xla")},
    "tpu": partial(attend, implementation="pallas"),  # interpreted, as the next one
    **{name: finalize_sums(weigh) for name, weigh in WEIGH.items()},
    "on masks": attend_masks,
}


@partial(jax.jit, static_argnames="way")
def attend_jitted(way, q, k, v, visibility, options=PLAIN):
    return WAYS[way](q, k, v, visibility, options)
