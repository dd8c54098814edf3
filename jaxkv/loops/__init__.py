"""Loops that run a model over a cache, and what picks tokens in them."""

from jaxkv.loops import batching, sampling
from jaxkv.loops.beams import Beams, beam
from jaxkv.loops.draft_trees import draft_tree
from jaxkv.loops.drafts import Draft, Guess, draft_model, lookup
from jaxkv.loops.forward import step_of
from jaxkv.loops.generation import decode
from jaxkv.loops.picking import Picked, begin
from jaxkv.loops.prompts import PrefillResult, prefill, warm_up
from jaxkv.loops.sliding import extend, slide
from jaxkv.loops.sources import encode
from jaxkv.loops.speculation import Speculated, speculate
from jaxkv.loops.state import DecodeState, start

__all__ = ["DecodeState", "Picked", "PrefillResult", "begin", "decode", "encode", "prefill"]
__all__ += ["sampling", "start"]
__all__ += ["Beams", "batching", "beam", "extend", "slide"]
__all__ += ["Draft", "Guess", "Speculated", "draft_model", "draft_tree", "lookup", "speculate"]
__all__ += ["step_of", "warm_up"]
