"""Loops that run a model over a memory, and what picks tokens in them."""

from jaxkv.loops import sampling
from jaxkv.loops.generation import DecodeState, decode, prefill, step_of, warm_up

__all__ = ["DecodeState", "decode", "prefill", "sampling", "step_of", "warm_up"]
