"""Loops that run a model over a memory, and what picks tokens in them."""

from jaxkv.loops import sampling
from jaxkv.loops.forward import step_of
from jaxkv.loops.generation import DecodeState, decode
from jaxkv.loops.prompts import prefill, warm_up

__all__ = ["DecodeState", "decode", "prefill", "sampling", "step_of", "warm_up"]
