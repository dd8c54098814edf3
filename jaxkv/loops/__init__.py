"""Loops that run a model over a memory, and what picks tokens in them."""

from jaxkv.loops import sampling
from jaxkv.loops.beams import Beams, beam
from jaxkv.loops.forward import step_of
from jaxkv.loops.generation import decode
from jaxkv.loops.prompts import prefill, warm_up
from jaxkv.loops.sliding import extend, slide
from jaxkv.loops.state import DecodeState, Picked, begin, start

__all__ = ["Beams", "DecodeState", "Picked", "beam", "begin", "decode", "extend", "prefill"]
__all__ += ["sampling", "slide", "start", "step_of", "warm_up"]
