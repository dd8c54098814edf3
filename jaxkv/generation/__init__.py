"""Generation loops over a cache, with their samplers and drafters."""

from jaxkv.generation.beam import beam
from jaxkv.generation.constraints import Constraint
from jaxkv.generation.context_shift import context_shift, self_extend
from jaxkv.generation.decode import decode
from jaxkv.generation.encode import encode
from jaxkv.generation.filters import make_sampler
from jaxkv.generation.generate import generate
from jaxkv.generation.model_step import model_step
from jaxkv.generation.prefill import prefill, warm_up
from jaxkv.generation.results import BeamResult, DecodeResult, PrefillResult
from jaxkv.generation.sample_step import init_decode
from jaxkv.generation.sampler import Sampler
from jaxkv.generation.score import score
from jaxkv.generation.speculative.draft_model import draft_model
from jaxkv.generation.speculative.drafters import Drafter, prompt_lookup
from jaxkv.generation.speculative.head_drafter import head_drafter
from jaxkv.generation.speculative.speculate import speculate
from jaxkv.generation.state import DecodeState

# Loops, and their states and results.
__all__ = ["BeamResult", "DecodeResult", "DecodeState", "PrefillResult", "beam", "context_shift"]
__all__ += ["decode", "encode", "generate", "init_decode", "model_step", "prefill"]
__all__ += ["score", "self_extend", "speculate", "warm_up"]
# Drafters.
__all__ += ["Drafter", "draft_model", "head_drafter", "prompt_lookup"]
# Samplers.
__all__ += ["Constraint", "Sampler", "make_sampler"]
