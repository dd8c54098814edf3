"""Loops that run a model over a cache, and what picks tokens in them."""

from jaxkv.loops import batching, sampling
from jaxkv.loops.beams import BeamResult, beam
from jaxkv.loops.draft_trees import tree_draft_model
from jaxkv.loops.drafts import Drafter, DraftTokens, draft_model, prompt_lookup
from jaxkv.loops.forward import compiled_step
from jaxkv.loops.generation import decode
from jaxkv.loops.picking import Sampled, sample_first
from jaxkv.loops.prompts import PrefillResult, prefill, warm_up
from jaxkv.loops.sliding import context_shift, self_extend
from jaxkv.loops.sources import encode
from jaxkv.loops.speculation import SpeculateResult, speculate
from jaxkv.loops.state import DecodeState, init_decode

__all__ = ["DecodeState", "Sampled", "PrefillResult", "sample_first", "decode", "encode", "prefill"]
__all__ += ["sampling", "init_decode"]
__all__ += ["BeamResult", "batching", "beam", "self_extend", "context_shift"]
__all__ += [
    "Drafter",
    "DraftTokens",
    "SpeculateResult",
    "draft_model",
    "tree_draft_model",
    "prompt_lookup",
    "speculate",
]
__all__ += ["compiled_step", "warm_up"]
