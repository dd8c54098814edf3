"""Preempted requests in host memory: a copy out and in, if it is cheaper than to compute again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxkv.api.insert import insert
from jaxkv.core.array_utils import nbytes
from jaxkv.serving.copies import check_host_bytes, commit, copy_to_host, warm_up_copies
from jaxkv.serving.model_runner import ModelRunner
from jaxkv.serving.request import RequestState

if TYPE_CHECKING:
    from jaxtyping import PyTree

FLOPS_PER_BYTE = {"cpu": 150, "gpu": 24_000, "tpu": 24_000}
"""Operations that a device computes while it copies a byte to host memory and back, by platform.

CPU: 100 GFLOP/s, and 1.3 GB/s in each direction, on two cores. GPU: 300 TFLOP/s, and 25 GB/s of
PCIe in each direction. TPU: an estimate, 120 TFLOP/s and 10 GB/s. Only the CPU was measured
(`python -m benchmarks.host_tier`).
"""


class Swapper:
    """Copies sequences of preempted requests to host memory, and back to the cache of a runner."""

    def __init__(self, runner: ModelRunner, params: PyTree, host_bytes: int | None):
        self._runner, self._max_bytes = runner, check_host_bytes(host_bytes)
        if self._max_bytes:
            runner.cache = commit(runner.cache)
        leaves = jax.tree.leaves(params)
        self._flops_per_token = 2 * sum(int(np.size(x)) for x in leaves)
        (*_, device) = jax.tree.leaves(runner.cache.buffers)[0].devices()
        self._flops_per_byte = FLOPS_PER_BYTE.get(device.platform, FLOPS_PER_BYTE["gpu"])

    def swap_out(
        self, state: RequestState, others: Sequence[RequestState], num_stored_tokens: int
    ) -> None:
        """Copy the sequence of a request to host memory, if this is cheaper and the copy fits.

        The copy is cheaper if `num_bytes * FLOPS_PER_BYTE[platform]` is below the operations that
        compute the tokens again: two for each model parameter and token.

        Args:
          state: A request with a sequence.
          others: All requests; their copies count as used memory.
          num_stored_tokens: Number of tokens that a prefix store has, and that need no computation.
        """
        if not self._max_bytes:
            return
        flops = self._flops_per_token * (state.num_cached_tokens - num_stored_tokens)
        used = sum(nbytes(other.swapped.buffers) for other in others if other.swapped)
        max_bytes = min(self._max_bytes - used, -(-flops // self._flops_per_byte) - 1)
        state.swapped = copy_to_host(self._runner.cache, state.sequence, max_bytes=max_bytes)

    def swap_in(self, state: RequestState) -> bool:
        """Copy a request from host memory to its sequence; return False if there is no copy.

        If the copy does not fit, it is removed, and the result is False.
        """
        copied, state.swapped = state.swapped, None
        if copied is None:
            return False
        self._runner.cache, ok = insert(self._runner.cache, copied, 0, state.sequence, donate=True)
        return bool(ok)

    def warm_up(self) -> None:
        """Compile the programs of all methods, if a sequence is empty."""
        cache = self._runner.cache
        empty = np.flatnonzero(
            np.asarray(cache.seq_pos_max(np.arange(cache.table.spec.sequences))) < 0
        )
        if self._max_bytes and empty.size:
            self._runner.cache = warm_up_copies(cache, int(empty[0]), donate=True)
