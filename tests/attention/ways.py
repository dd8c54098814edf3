"""The ways in which attention can be computed, as functions of the same arrays."""

from functools import partial

import jax

from jaxkv.ops.attention import api, attention, pallas_gpu
from jaxkv.ops.attention.sight import mask_of
from jaxkv.ops.attention.softmax import unhidden_alone
from tests.attention.formula import PLAIN


def on_masks(q, k, v, sight, options):
    arrays = q, sight.of_lists(k), sight.of_lists(v), mask_of(sight)
    return attention(*arrays, scale=options.scale, softcap=options.softcap, sinks=options.sinks)


def closing(weigh):
    """Do what `api.attend` does around an implementation."""

    def attend(q, k, v, sight, options):
        sums = weigh(q, k, v, sight, options)
        sums = sums if sight.bias is None else unhidden_alone(sums)
        return api.finished(sums, q, options)

    return attend


WEIGH = {
    "gpu": api.by_platform(
        cuda=pallas_gpu.weigh, default=partial(pallas_gpu.weigh, interpret=True)
    ),
    "elsewhere": api.best,  # neither a processor nor a kernel
}
WAYS = {
    "default": api.attend,
    **{name: partial(api.attend, implementation=name) for name in ("tiles", "whole", "xla")},
    "tpu": partial(api.attend, implementation="pallas"),  # interpreted, as the next one
    **{name: closing(weigh) for name, weigh in WEIGH.items()},
    "on masks": on_masks,
}


@partial(jax.jit, static_argnames="way")
def attended(way, q, k, v, sight, options=PLAIN):
    return WAYS[way](q, k, v, sight, options)
