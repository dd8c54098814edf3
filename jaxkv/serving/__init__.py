"""Many requests through one cache: an engine, and prompts whose prefixes are computed once."""

from jaxkv.serving import prefix_cache
from jaxkv.serving.engine import Engine, serve
from jaxkv.serving.request import FinishReason, Request, RequestOutput

__all__ = ["Engine", "FinishReason", "Request", "RequestOutput", "prefix_cache", "serve"]
