"""Programs of an engine. The CPU passes the states of all requests to each call of a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxkv.api.edits import seq_rm
from jaxkv.cache import Cache
from jaxkv.core.donation import is_donated
from jaxkv.core.validate import check_int32
from jaxkv.generation.constraints import make_constrained_sampler
from jaxkv.generation.decode import decode
from jaxkv.generation.filters import Sampler
from jaxkv.generation.model_step import Edit, Forward
from jaxkv.generation.padding import stop_tokens_as_list
from jaxkv.generation.sample_step import SampledTokens, sample_first_tokens
from jaxkv.generation.state import DecodeState, make_decode_state
from jaxkv.serving.prefill_chunks import (
    Chunk,
    PromptPart,
    chunk_shapes,
    cut_chunk,
    empty_chunk,
    run_chunk,
)
from jaxkv.serving.request import (
    EngineConfig,
    Request,
    RequestState,
    make_batch_sampler,
    sampler_variants,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree, Shaped

    from jaxkv.generation.types import StopTokens


class RunnerOutput(NamedTuple):
    """Results of one program call for all sequences, as NumPy arrays.

    samples: Generated tokens, `[Q, 0]` if no token could be generated.
    reasons: A `Reason` for each sequence: OK, NONFINITE_LOGITS, or the reason of a refused plan.
    rule_states: States of the constraint; empty without a constraint, or if no token was generated.
    """

    samples: SampledTokens
    reasons: Int32[Array | np.ndarray, " Q"]
    rule_states: PyTree


class ModelRunner:
    """Runs the programs of an engine, which compute chunks of prompts and generate tokens."""

    def __init__(
        self,
        forward: Forward,
        params: PyTree,
        cache: Cache,
        *,
        edit: Edit | None,
        stop_tokens: StopTokens,
        limits: EngineConfig,
    ):
        self._forward, self._params, self.cache, self._edit = forward, params, cache, edit
        self._spec, self._limits = cache.table.spec, limits
        self._shapes = chunk_shapes(self._spec, limits.prefill_chunk)
        stop = check_int32(stop_tokens_as_list(stop_tokens), "stop_tokens", low=0)
        if np.ndim(stop) != 1:
            raise ValueError(
                f"expected a list of stop tokens [n], got {stop_tokens!r}; pass a flat list of ints"
            )
        self._stop = np.asarray(stop)

    @property
    def has_cache(self) -> bool:
        """Whether the buffers are valid; an interrupted program may have donated them."""
        return not is_donated(self.cache.buffers)

    def warm_up(self) -> None:
        """Run every program once, without tokens."""
        extra = self.empty_extra(0)
        logits = [self._compute_chunk(empty_chunk(shape, extra))[0] for shape in self._shapes]
        for sampling in sampler_variants(self._limits.sampling_options):
            like = Request(
                prompt=np.zeros(1, np.int32),
                max_new_tokens=2,
                sampling=sampling,
                extra=self.empty_extra(1),
            )
            nothing = [RequestState(id=-1, request=like, tokens=[0], sequence=0)]
            self._sample_first_tokens(nothing, logits[0], max_tokens=0)
            self.generate(nothing, max_tokens=0)
        self.remove_sequences([])
        jax.block_until_ready(self.cache.buffers)

    def run_chunk(self, states: Sequence[RequestState]) -> tuple[list[int], RunnerOutput]:
        """Run a chunk; return the number of tokens from each prompt, and sampled first tokens."""
        parts = [
            PromptPart(
                state.sequence, state.all_inputs()[state.num_computed_tokens : state.prefill_target]
            )
            for state in states
        ]
        chunk, counts = cut_chunk(self._spec, self._shapes, parts)
        logits, plan = self._compute_chunk(chunk)
        ready = [
            state
            for state, n in zip(states, counts, strict=True)
            if state.num_computed_tokens + n == state.num_required_tokens
        ]
        none = np.zeros((self._spec.sequences, 0), np.int32)
        nothing = RunnerOutput(SampledTokens._make([none] * 2), np.zeros(len(none), np.int32), ())
        first = self._sample_first_tokens(ready, logits, max_tokens=1) if ready else nothing
        (ok, reasons), first = jax.device_get((plan, first))
        if ok and ready:  # otherwise the samples are discarded
            return counts, first
        return counts if ok else [0] * len(counts), first._replace(reasons=reasons)

    def generate(self, states: Sequence[RequestState], max_tokens: int) -> RunnerOutput:
        """Generate up to `max_tokens` tokens for each request."""
        sampler, stop, decode_state = self._resume(states, max_tokens)
        out = decode(
            self._forward,
            self._params,
            self.cache,
            decode_state,
            num_tokens=self._limits.tokens_per_step,
            sampler=sampler,
            stop_tokens=stop,
            edit=self._edit,
            donate=True,
        )
        self.cache = out.cache
        return jax.device_get(self._make_output(out.state, out[2:4]))

    def remove_sequences(self, sequences: Sequence[int]) -> None:
        """Remove all tokens of some sequences; each choice of sequences runs the same program."""
        rows = np.arange(self._spec.sequences, dtype=np.int32)
        ends = np.where(np.isin(rows, sequences), np.int32(-1), np.int32(0))
        self.cache, _ = seq_rm(self.cache, rows, np.zeros_like(rows), ends)

    def stop_tokens_of(self, state: RequestState) -> list[int]:
        """Return the stop tokens of the engine and of a request."""
        return [*self._stop.tolist(), *np.asarray(state.request.stop_tokens).tolist()]

    def empty_extra(self, count: int) -> dict[str, Shaped[np.ndarray, "{count} ..."]]:
        """Return additional inputs of 0 for `count` tokens, by name."""
        defaults = self._limits.extra.items()
        return {name: np.zeros((count, *x.shape), x.dtype) for name, x in defaults}

    def _compute_chunk(
        self, chunk: Chunk
    ) -> tuple[Float[Array, "Q V"], tuple[Bool[Array, ""], Int32[Array, " Q"]]]:
        self.cache, logits, plan = run_chunk(
            self._forward, self._params, self.cache, chunk, edit=self._edit, donate=True
        )
        return logits, plan

    def _sample_first_tokens(
        self, states: Sequence[RequestState], logits: Float[Array, "Q V"], max_tokens: int
    ) -> RunnerOutput:
        sampler, stop, decode_state = self._resume(states, max_tokens)
        table = self.cache.table
        state, *samples = sample_first_tokens(table, sampler, logits, stop, decode_state)
        return self._make_output(state, samples)

    def _make_output(self, state: DecodeState, samples: Sequence[Any]) -> RunnerOutput:
        rule_states = state.sampler_state[0] if self._limits.constraint else ()
        return RunnerOutput(SampledTokens._make(samples), state.reason, rule_states)

    def _resume(
        self, states: Sequence[RequestState], max_tokens: int
    ) -> tuple[Sampler, Int32[np.ndarray, "Q n"], DecodeState]:
        """Return the sampler, the stop tokens, and a state after the last token of each request."""
        rows, last_n = self._spec.sequences, self._limits.penalty_last_n
        tokens = np.zeros(rows, np.int32)
        requests: list[Request | None] = [None] * rows
        constraint_states: list[PyTree] = [None] * rows
        stop = np.full((rows, len(self._stop) + self._limits.max_stop_tokens), -1, np.int32)
        limit, seed = np.zeros(rows, np.int32), np.zeros(rows, np.uint32)
        recent = np.full((rows, last_n), -1, np.int32)
        extra = self.empty_extra(rows)
        for state in states:
            row, stops, last = state.sequence, self.stop_tokens_of(state), state.last_tokens(last_n)
            requests[row], constraint_states[row] = state.request, state.constraint_state
            tokens[row] = last[-1]
            stop[row, : len(stops)] = stops
            limit[row], seed[row] = min(state.num_remaining_tokens, max_tokens), state.request.seed
            recent[row, last_n - len(last) :] = last
            for name, x in (state.request.extra or {}).items():
                extra[name][row] = x[-1]
        sampler = make_batch_sampler(
            requests, sampling_options=self._limits.sampling_options, penalty_last_n=last_n
        )
        if self._limits.constraint:
            sampler = make_constrained_sampler(self._limits.constraint, sampler, constraint_states)
        return (
            sampler,
            stop,
            make_decode_state(
                self.cache,
                tokens,
                None,
                max_new_tokens=limit,
                sampler=sampler,
                seed=seed,
                prompts=recent,
                extra=extra,
            ),
        )
