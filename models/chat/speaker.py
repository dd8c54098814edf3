"""Computation of answers: first the uncached tokens of a conversation, then new tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import generation
from jaxkv.generation.filters import Sampler, make_sampler
from jaxkv.generation.model_program import ModelProgram
from jaxkv.serving import PrefixStore
from models.chat.chat import (
    MAIN,
    Chat,
    Spent,
    has_states,
    recall,
    remember,
    spend,
    use_instructions,
)
from models.chat.conversation import ChatError, Conversation, instructions
from models.chat.room import give_way, slide
from models.compiling import Progress, compile_all
from models.model import Model
from models.room import make_with_room
from models.text.turns import frame_of, tokens_of_turn
from models.texts import Writer, finish_of

SHORT = 32
"""Width of the ubatch for short messages."""

HOLDERS = 8
"""Default number of stored prefixes."""

OnFull = Literal["stop", "slide"]
"""Whether a full cache ends an answer or removes the oldest turns."""


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A model that answers in conversations.

    model: model with a chat template, see `models.load`.
    seed: an answer is sampled with the seed `seed + attempt` (see `answer`).
    max_tokens: largest number of tokens of an answer.
    ubatch_size: largest number of tokens in one forward pass.
    steps: number of answer tokens that the device computes in each dispatch.
    """

    model: Model
    sampler: Sampler = field(default_factory=make_sampler)
    seed: int = 0
    max_tokens: int = 512
    ubatch_size: int = 128
    steps: int = 4
    on_full: OnFull = "stop"

    @property
    def greedy(self) -> bool:
        """Whether the sampler is not random, so that a message always gets the same answer."""
        return not self.sampler.is_random

    def begin(
        self, *, conversations: int, cells: int, holders: int = HOLDERS, system: str | None = None
    ) -> Chat:
        """Return a chat with one empty conversation.

        Args:
          conversations: largest number of conversations, including forks.
          cells: number of cells of the cache, shared by all conversations.
          holders: largest number of stored prefixes, see `jaxkv.serving.PrefixStore`.
          system: instructions at the beginning of each conversation.

        Raises:
          ModelError: If the model has no chat template, or the template rejects the instructions.
          ModelError: If the cache does not fit the device.
          ChatError: If `on_full` is "slide" and the cache has recurrent states.
        """
        frame = frame_of(self.model.tokenizer, instructions(system))
        cache = make_with_room(
            self.model.make_cache,
            cells=cells,
            sequences=conversations + holders,
            ubatch_size=self.ubatch_size,
        )
        if has_states(cache) and self.on_full == "slide":
            raise ChatError(
                "tokens cannot be removed from a recurrent state; leave out --on-full slide."
            )
        first = Conversation(sequence=0, frame=frame, system=system)
        store = PrefixStore(cache, sequences=range(conversations, conversations + holders))
        return Chat(cache=cache, store=store, conversations={MAIN: first})

    def compile(self, chat: Chat, on_progress: Progress | None = None) -> Chat:
        """Compile the programs that `answer` runs; return a new chat, since buffers are donated."""
        state = self.model.params, chat.cache.table, chat.cache.buffers
        program, jobs = _READ.compiled(self.model.forward), []
        for width in sorted({min(SHORT, self.ubatch_size), self.ubatch_size}):
            blank = np.zeros(width, np.int32), np.int32(0), np.int32(0)
            lowered = program.lower(*state, *blank)
            logits = lowered.out_info[2]
            jobs.append(lowered.compile)
        idle = generation.init_decode(
            chat.cache, tokens=[0], sequences=[0], max_new_tokens=0, sampler=self.sampler
        ).state
        jobs.append(lambda: self._decode(chat.cache, idle).cache)
        cache = compile_all(jobs, on_progress)[-1]
        chat = replace(chat, cache=chat.store.warm_up(cache))
        blank = jnp.zeros(logits.shape, logits.dtype, device=self.model.logits_sharding)
        # This compiles the small programs and the queries of edits.
        outputs = self._begin(cache, blank, chat.now, 0, limit=0), chat.num_cached
        return replace(chat, cache=jax.block_until_ready((chat.cache, outputs))[0])

    def ask(self, chat: Chat, message: str) -> Chat:
        """Add a turn without an answer; raise `ModelError` if the template rejects the message."""
        tokens = tokens_of_turn(self.model.tokenizer, chat.now.messages(message))
        chat = remember(use_instructions(chat), chat.num_cached)
        return chat.with_current(chat.now.ask(message, tokens), chat.cache)

    def answer(
        self,
        chat: Chat,
        *,
        attempt: int = 0,
        on_read: Progress = lambda done, total: None,
        on_text: Callable[[str], None] = lambda text: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Chat:
        """Answer the last turn of the current conversation; the cache of the chat is donated.

        If `stopped` returns True or the cache becomes full before the answer begins, the answer is
        empty. The remaining tokens of the message are computed in the next turn or attempt.

        Args:
          chat: chat with at least one turn in the current conversation.
          attempt: number of earlier answers to the same message.
          on_read: called after each forward pass of the message, with the number of computed tokens
            and the total number of tokens to compute, if the total exceeds `ubatch_size`.
          on_text: called with each new piece of the answer.
          stopped: called before each forward pass of the message, and between pieces of the answer.
            If `stopped` returns True, the answer ends.
        """
        chat, began = replace(chat, spent=Spent()), perf_counter()
        chat, logits = self._read_message(chat, stopped, on_read)
        chat = spend(chat, prompt_seconds=perf_counter() - began)
        if logits is None:
            finish = "interrupted" if stopped() else "full"
            return chat.with_current(chat.now.answered((), "", finish), chat.cache)
        began = perf_counter()
        chat = self._speak(chat, logits, attempt, on_text, stopped)
        return spend(chat, answer_seconds=perf_counter() - began)

    def settle(self, chat: Chat) -> Chat:
        """Compute the uncached tokens of the current conversation.

        A later fork then shares the cells of these tokens.
        """
        return self._read_message(chat)[0]

    def _read_message(
        self,
        chat: Chat,
        stopped: Callable[[], bool] = lambda: False,
        on_read: Progress = lambda done, total: None,
    ) -> tuple[Chat, jax.Array | None]:
        """Compute the tokens of the current conversation that are not cached.

        If the prefix store has a longer prefix than the cached tokens, the prefix is used. Returns
        the chat, and the logits `[1, V]` after the last token. The logits are None if `stopped`
        returned True, the cache is full, or all tokens were already cached.
        """
        logits, model, read = None, self.model, 0
        if chat.num_cached < len(chat.now.tokens):
            chat, _ = recall(chat, len(chat.now.tokens) - 1)
        total = len(chat.now.tokens) - chat.num_cached
        marks = marks_of(chat)
        while (num_cached := chat.num_cached) < len(chat.now.tokens):
            if stopped():
                return chat, None
            rest = chat.now.tokens[num_cached:]
            if has_states(chat.cache) or chat.now.gap:
                ahead = [mark - num_cached for mark in marks if mark > num_cached]
                rest = rest[: min(ahead, default=len(rest))]
            width = self.ubatch_size if len(rest) > 2 * SHORT else min(SHORT, self.ubatch_size)
            tokens = np.zeros(width, np.int32)
            count = min(len(rest), width)
            tokens[:count] = rest[:count]
            args = tokens, np.int32(chat.now.sequence), np.int32(count)
            cache, logits, ok = _READ(model.forward, model.params, chat.cache, *args, donate=True)
            chat = replace(chat, cache=cache)
            if ok:
                chat = spend(replace(chat, computed=chat.computed + count), prompt_tokens=count)
                read += count
                for mark in marks:
                    chat = remember(chat, mark) if num_cached < mark else chat
                if total > self.ubatch_size:
                    on_read(min(read, total), total)
            elif (roomier := self._more_room(chat, count)) is not None:
                chat = roomier
            else:
                return chat, None
        return chat, logits

    def _speak(
        self,
        chat: Chat,
        logits: jax.Array,
        attempt: int,
        on_text: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> Chat:
        """Generate an answer from the logits after a message."""
        model, cache, num_cached = self.model, chat.cache, chat.num_cached
        rules = model.tokenizer, model.stop_tokens, self.max_tokens
        writer = Writer(0, *rules, lambda which, text, ended: on_text(text))
        out = self._begin(cache, logits, chat.now, attempt, limit=self.max_tokens)
        while True:
            cache, state = out.cache, out.state
            row = np.asarray(out.tokens)[0]
            chat = spend(chat, answer_tokens=writer.write(row[row >= 0]))
            chat = chat.with_current(chat.now.answered(writer.tokens, "", "interrupted"), cache)
            if writer.finish is None and stopped():
                writer.end("interrupted")
            elif writer.finish is None and not np.asarray(state.active)[0]:
                if (finish := finish_of(int(np.asarray(state.reason)[0]))) != "full":
                    writer.end(finish)
                elif (roomier := self._more_room(chat, 1)) is None:
                    writer.end("full")
                else:
                    chat, cache = roomier, roomier.cache
                    state = replace(
                        state,
                        active=jnp.ones_like(state.active),
                        reason=jnp.full_like(state.reason, jaxkv.Reason.OK),
                    )
            if writer.finish is not None:
                break
            out = self._decode(cache, state)
        answered = chat.now.answered(writer.tokens, "".join(writer.pieces), writer.finish)
        chat = chat.with_current(answered, cache)
        # A last token is computed only before a stop token, so cached tokens are counted.
        return replace(chat, computed=chat.computed + chat.num_cached - num_cached)

    def _more_room(self, chat: Chat, tokens: int) -> Chat | None:
        """Return a chat with more free cells; None if no cell is freed.

        If evictions of stored prefixes free enough cells, only prefixes are evicted (`give_way`).
        Otherwise, old turns are removed if `on_full` is "slide" (`slide`).
        """
        if (found := give_way(chat, tokens)) is not None:
            return found
        if self.on_full != "slide":
            return None
        try:
            found = slide(chat)
        except ChatError:
            return None
        return spend(found, removed_tokens=found.now.gap - chat.now.gap)

    def _begin(
        self, cache: Any, logits: jax.Array, conversation: Conversation, attempt: int, *, limit: int
    ) -> generation.DecodeResult:
        """Sample the first token of an answer."""
        seeds = np.array([(self.seed + attempt) % 2**32], np.uint32)
        options = {"max_new_tokens": limit, "seed": seeds}
        return generation.init_decode(
            cache,
            logits=logits,
            sampler=self.sampler,
            stop_tokens=sorted(self.model.stop_tokens),
            sequences=[conversation.sequence],
            **options,
        )

    def _decode(self, cache: Any, state: generation.DecodeState) -> generation.DecodeResult:
        model, more = self.model, {"num_tokens": self.steps, "donate": True}
        return jaxkv.decode(
            model.forward,
            model.params,
            cache,
            state,
            **more,
            sampler=self.sampler,
            stop_tokens=sorted(self.model.stop_tokens),
        )


def marks_of(chat: Chat) -> list[int]:
    """Return the lengths of the prefixes to store for the current conversation.

    The first prefix is the instructions, since other conversations begin with them. The second
    prefix is all tokens except the last, since another answer to the same message begins with the
    computation of the last token. If `slide` removed tokens, only the first prefix is stored.

    Prefixes that are already cached are left out. If the cache has states, a forward pass must end
    at the end of each stored prefix. To avoid short passes in such a cache, a prefix is also left
    out if it is at most `SHORT` tokens longer than the cached tokens, or than the first prefix if
    the first prefix is stored.
    """
    conversation, marks, before = chat.now, [], chat.num_cached
    for mark in (
        [conversation.frame.keep]
        if conversation.gap
        else [conversation.frame.keep, len(conversation.tokens) - 1]
    ):
        if mark - before > SHORT * has_states(chat.cache):
            marks.append(mark)
            before = mark
    return marks


def _read(
    forward: Any,
    params: Any,
    cache: jaxkv.Cache,
    tokens: jax.Array,
    sequence: jax.Array,
    count: jax.Array,
) -> tuple[jaxkv.Cache, jax.Array, jax.Array]:
    """Compute the next `count` tokens of a sequence, the first `count` items of `tokens`.

    The rest of `tokens` is padding, so that one compiled program serves all counts. Returns the
    cache, the logits `[1, V]` after the last token, and the flag `ok` `[]` bool. If `ok` is False,
    the cache is unchanged and the logits are meaningless.
    """
    index = jnp.arange(tokens.shape[0])
    batch = jaxkv.make_batch(
        tokens[None],
        sequences=sequence,
        valid=(index < count)[None],
        outputs=(index == count - 1)[None],
    )
    plan = jaxkv.init_batch(cache, batch)
    (ubatch,) = plan.ubatches
    # Only one output is valid, so the head skips the padding.
    asked = jnp.argmin(ubatch.output_index)[None]
    ubatch = replace(ubatch, outputs=ubatch.outputs[asked], output_index=ubatch.output_index[asked])
    step, logits = forward(params, jaxkv.apply(cache, ubatch))
    return step.cache, logits, plan.ok


_READ = ModelProgram(_read)
