"""Loops that run a model over a cache, and the samplers that choose tokens in them."""

from jaxkv.generation.beam import beam
from jaxkv.generation.constraints import Constraint
from jaxkv.generation.context_shift import SelfExtendResult, context_shift, self_extend
from jaxkv.generation.decode import decode
from jaxkv.generation.encode import encode
from jaxkv.generation.filters import OPTIONS, constrain, make_sampler
from jaxkv.generation.generate import generate
from jaxkv.generation.model_step import compiled_step, model_step
from jaxkv.generation.prefill import prefill, warm_up
from jaxkv.generation.results import BeamResult, DecodeResult, PrefillResult
from jaxkv.generation.sample_step import init_decode
from jaxkv.generation.sampler import Sampler, draw
from jaxkv.generation.speculative.drafters import Drafter, DraftTokens, draft_model, prompt_lookup
from jaxkv.generation.speculative.speculate import speculate
from jaxkv.generation.speculative.tree_drafter import tree_draft_model
from jaxkv.generation.state import DecodeState

# Loops, and their states and results.
__all__ = ["DecodeResult", "DecodeState", "PrefillResult", "compiled_step", "decode", "encode"]
__all__ += ["generate", "model_step"]
__all__ += ["init_decode", "prefill", "warm_up"]
__all__ += ["BeamResult", "SelfExtendResult", "beam", "context_shift", "self_extend"]
# Drafts.
__all__ += ["Drafter", "DraftTokens", "draft_model", "prompt_lookup"]
__all__ += ["speculate", "tree_draft_model"]
# Samplers.
__all__ += ["OPTIONS", "Constraint", "Sampler", "constrain", "draw", "make_sampler"]
