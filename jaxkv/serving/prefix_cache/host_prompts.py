"""Prompts of a prefix store in host memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

from jaxkv.cache import Cache
from jaxkv.serving.copies import copy_to_host
from jaxkv.serving.prefix_cache.matching import (
    find_miss_reasons,
    resumes_wherever,
)
from jaxkv.serving.prefix_cache.prompts import CachedPrompt, HostPrompt, ModelInputs

P = TypeVar("P", CachedPrompt, HostPrompt)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class HostPrompts:
    """Immutable list of prompts in host memory, of at most `max_bytes` bytes in total.

    prompts: The prompts, least recently used first.
    """

    max_bytes: int
    prompts: tuple[HostPrompt, ...] = ()

    def __repr__(self) -> str:
        tokens = sum(prompt.tokens.size for prompt in self.prompts)
        return (
            f"{len(self.prompts)} prompts of {tokens} tokens in {self.num_bytes} of "
            f"{self.max_bytes} host bytes"
        )

    @property
    def num_bytes(self) -> int:
        """Number of bytes of all prompts."""
        return sum(prompt.num_bytes for prompt in self.prompts)

    def add(self, cache: Cache, prompt: CachedPrompt) -> tuple[HostPrompts, list[ModelInputs]]:
        """Copy a prompt from a sequence of a cache to host memory.

        The prompt is not copied if a longer prompt in host memory replaces it, or if it is larger
        than `max_bytes`.

        Returns:
          The next list, and the inputs of the prompts that left host memory: the least recently
          used ones, or a prompt that is too large.
        """
        if not self.max_bytes:
            return self, [prompt.inputs]
        reasons = find_miss_reasons(cache, prompt.sequence, prompt.inputs)
        for past in self.prompts:
            if _is_prefix(prompt, past) and resumes_wherever(past.miss_reasons, reasons):
                return self.touch(past), []
        copied = copy_to_host(cache, prompt.sequence, max_bytes=self.max_bytes)
        if copied is None:
            return self, [prompt.inputs]
        new = HostPrompt(inputs=prompt.inputs, miss_reasons=reasons, cache=copied)
        kept = [
            past
            for past in self.prompts
            if not (_is_prefix(past, new) and resumes_wherever(reasons, past.miss_reasons))
        ]
        dropped = []
        while sum(past.num_bytes for past in kept) + new.num_bytes > self.max_bytes:
            dropped.append(kept.pop(0).inputs)
        return replace(self, prompts=(*kept, new)), dropped

    def without(self, prompt: HostPrompt) -> HostPrompts:
        """Return the list without the given prompt."""
        return replace(self, prompts=tuple(past for past in self.prompts if past is not prompt))

    def touch(self, prompt: CachedPrompt | HostPrompt) -> HostPrompts:
        """Return the list with a prompt, if it is in the list, as the most recently used one."""
        return replace(self, prompts=move_to_end(self.prompts, prompt))


def move_to_end(prompts: tuple[P, ...], prompt: CachedPrompt | HostPrompt) -> tuple[P, ...]:
    """Move the prompt with the same object `inputs` to the end; it may be of either kind."""
    return tuple(sorted(prompts, key=lambda past: past.inputs is prompt.inputs))


def _is_prefix(prompt: CachedPrompt | HostPrompt, other: CachedPrompt | HostPrompt) -> bool:
    return prompt.inputs.common_prefix_length(other.inputs) == len(prompt.inputs)
