"""Loops that run a model over a memory, and what picks tokens in them."""

from jaxkv.loops import batching, sampling
from jaxkv.loops.forward import step_of
from jaxkv.loops.generation import decode
from jaxkv.loops.prompts import prefill, warm_up
from jaxkv.loops.state import DecodeState, Picked, begin, start

__all__ = ["DecodeState", "Picked", "batching", "begin", "decode", "prefill", "sampling", "start"]
__all__ += ["step_of", "warm_up"]
