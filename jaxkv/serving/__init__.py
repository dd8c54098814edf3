"""Engine that runs many requests, and a store of prompt prefixes."""

from jaxkv.serving.engine import Engine
from jaxkv.serving.prefix_cache.prompts import MissReason
from jaxkv.serving.prefix_cache.store import PrefixStore
from jaxkv.serving.request import FinishReason, Request, RequestOutput

__all__ = ["Engine", "FinishReason", "MissReason", "PrefixStore", "Request", "RequestOutput"]
