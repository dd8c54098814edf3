"""What computes answers: what the cache lacks of a conversation, then one token after another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import generation
from jaxkv.generation.filters import Sampler, make_sampler
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
from models.compiling import compile_all
from models.model import Model
from models.room import make_with_room
from models.text.turns import frame_of, tokens_of_turn
from models.texts import Writer, finish_of

SHORT = 32
"""Tokens of a message that are computed at once where it has few; all else is padding."""

HOLDERS = 8
"""Texts that are kept beside the conversations, where nothing else is asked for."""

OnFull = Literal["stop", "slide"]
"""Whether an answer ends where the cache is full, or the oldest turns are forgotten."""


@dataclass(frozen=True, kw_only=True)
class Speaker:
    """A model that takes part in conversations.

    model: see `models.load`; it has a chat template.
    sampler: what adjusts logits before a token is drawn.
    seed: of all draws; the n-th attempt at an answer has `seed + n`.
    max_tokens: the most tokens of an answer.
    ubatch_size: the most tokens that are computed at once.
    tokens_per_step: tokens of an answer that are made before the host looks at them.
    on_full: what is done where the cache is full.
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
        """Whether the best token is taken, so that a message always has the same answer."""
        return not self.sampler.is_random

    def begin(
        self, *, conversations: int, cells: int, holders: int = HOLDERS, system: str | None = None
    ) -> Chat:
        """Return a chat in which nothing has been said.

        Args:
          conversations: how many there may be, forks included.
          cells: tokens that all of them hold together.
          holders: texts that are kept beside them, see `jaxkv.serving.PrefixStore`.
          system: the instructions that a conversation begins with.

        Raises:
          ModelError: when the model has no chat template, or it does not take the instructions;
            or when the cache does not fit the device.
          ChatError: when the cache cannot slide and is asked to.
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
                "a recurrent state cannot forget what it has seen: leave --on-full slide out."
            )
        first = Conversation(sequence=0, frame=frame, system=system)
        store = PrefixStore(cache, sequences=range(conversations, conversations + holders))
        return Chat(cache=cache, store=store, conversations={MAIN: first})

    def compile(self, chat: Chat, tell: Callable[[int, int], None] | None = None) -> Chat:
        """Compile what answers need; returns the chat, whose buffers are donated on the way."""
        table, buffers = chat.cache.table, chat.cache.buffers
        params, forward = self.model.params, self.model.forward
        jobs: list[Callable[[], Any]] = []
        for width in sorted({min(SHORT, self.ubatch_size), self.ubatch_size}):
            blank = np.zeros(width, np.int32), np.int32(0), np.int32(0)
            lowered = _read.lower(forward, params, table, buffers, *blank)
            logits = lowered.out_info[2]
            jobs.append(lowered.compile)
        idle = generation.init_decode(
            chat.cache, tokens=[0], sequences=[0], max_new_tokens=0, sampler=self.sampler
        ).state
        jobs.append(lambda: self._decode(chat.cache, idle).cache)
        cache = compile_all(jobs, tell)[-1]
        chat = replace(chat, cache=chat.store.warm_up(cache))
        blank = jnp.zeros(logits.shape, logits.dtype, device=self.model.logits_sharding)
        # The small programs, and what edits ask.
        outputs = self._begin(cache, blank, chat.now, 0, limit=0), chat.held
        return replace(chat, cache=jax.block_until_ready((chat.cache, outputs))[0])

    def ask(self, chat: Chat, message: str) -> Chat:
        """Return the chat with a new turn in its current conversation, which has no answer yet.

        Raises:
          ModelError: when the template does not take the message.
        """
        tokens = tokens_of_turn(self.model.tokenizer, chat.now.messages(message))
        chat = remember(use_instructions(chat), chat.held)
        return chat.going_on(chat.now.ask(message, tokens), chat.cache)

    def answer(
        self,
        chat: Chat,
        *,
        attempt: int = 0,
        on_read: Callable[[int, int], None] = lambda done, total: None,
        on_text: Callable[[str], None] = lambda text: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Chat:
        """Answer the last turn of the current conversation.

        Args:
          chat: its cache is donated.
          attempt: which of several answers to the same message.
          on_read: called with the tokens of a long message that are computed, and their number.
          on_text: called with each piece of the answer as soon as it is there.
          stopped: asked between pieces whether the answer ends there.

        Returns:
          The chat with what there is of the answer. Where it was stopped, or the cache is full,
          before the answer began, the message waits there: its tokens are computed with the next
          turn, or the next attempt.
        """
        chat, began = replace(chat, spent=Spent()), perf_counter()
        chat, logits = self._read_message(chat, stopped, on_read)
        chat = spend(chat, read_seconds=perf_counter() - began)
        if logits is None:
            finish = "interrupted" if stopped() else "full"
            return chat.going_on(chat.now.answered((), "", finish), chat.cache)
        began = perf_counter()
        chat = self._speak(chat, logits, attempt, on_text, stopped)
        return spend(chat, made_seconds=perf_counter() - began)

    def settle(self, chat: Chat) -> Chat:
        """Compute what the cache does not hold of the conversation, so that forks share it."""
        return self._read_message(chat)[0]

    def _read_message(
        self,
        chat: Chat,
        stopped: Callable[[], bool] = lambda: False,
        on_read: Callable[[int, int], None] = lambda done, total: None,
    ) -> tuple[Chat, jax.Array | None]:
        """Compute the tokens of a conversation that the cache does not hold, nor keeps.

        Returns:
          The chat, and the logits after them, `[1, V]`; None if it was stopped or is full.
        """
        logits, model, read = None, self.model, 0
        if chat.held < len(chat.now.tokens):
            chat, _ = recall(chat, len(chat.now.tokens) - 1)
        total = len(chat.now.tokens) - chat.held
        marks = marks_of(chat)
        while (num_held := chat.held) < len(chat.now.tokens):
            if stopped():
                return chat, None
            rest = chat.now.tokens[num_held:]
            if has_states(chat.cache) or chat.now.gap:
                ahead = [mark - num_held for mark in marks if mark > num_held]
                rest = rest[: min(ahead, default=len(rest))]
            width = self.ubatch_size if len(rest) > 2 * SHORT else min(SHORT, self.ubatch_size)
            tokens = np.zeros(width, np.int32)
            count = min(len(rest), width)
            tokens[:count] = rest[:count]
            where = np.int32(chat.now.sequence), np.int32(count)
            args = model.params, chat.cache.table, chat.cache.buffers, tokens, *where
            table, buffers, logits, ok = _read(model.forward, *args)
            chat = replace(chat, cache=jaxkv.Cache(table=table, buffers=buffers))
            if ok:
                chat = spend(replace(chat, computed=chat.computed + count), read=count)
                read += count
                for mark in marks:
                    chat = remember(chat, mark) if num_held < mark else chat
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
        """Make an answer from the logits after a message."""
        model, cache, num_held = self.model, chat.cache, chat.held
        rules = model.tokenizer, model.stop_tokens, self.max_tokens
        writer = Writer(0, *rules, lambda which, text, ended: on_text(text))
        out = self._begin(cache, logits, chat.now, attempt, limit=self.max_tokens)
        while True:
            cache, state = out.cache, out.state
            row = np.asarray(out.tokens)[0]
            chat = spend(chat, made=writer.write(row[row >= 0]))
            chat = chat.going_on(chat.now.answered(writer.tokens, "", "interrupted"), cache)
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
        chat = chat.going_on(answered, cache)
        # The last token was picked and not computed, unless it is a stop token.
        return replace(chat, computed=chat.computed + chat.held - num_held)

    def _more_room(self, chat: Chat, tokens: int) -> Chat | None:
        """Return the chat with room for more tokens; None if there is none to be made.

        What is kept gives way, and then the oldest turns, if that was asked for.
        """
        if (found := give_way(chat, tokens)) is not None:
            return found
        if self.on_full != "slide":
            return None
        try:
            found = slide(chat)
        except ChatError:
            return None
        return spend(found, slid=found.now.gap - chat.now.gap)

    def _begin(
        self, cache: Any, logits: jax.Array, conversation: Conversation, attempt: int, *, limit: int
    ) -> generation.DecodeResult:
        """Pick the first token of an answer."""
        seeds = np.array([(self.seed + attempt) % 2**32], np.uint32)
        options = {"max_new_tokens": limit, "seed": seeds}
        return generation.init_decode(
            cache,
            logits=logits,
            sampler=self.sampler,
            stop_tokens=self._stop(),
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
            stop_tokens=self._stop(),
        )

    def _stop(self) -> Sequence[int]:
        return np.asarray(sorted(self.model.stop_tokens), np.int32)


def marks_of(chat: Chat) -> list[int]:
    """Return after which tokens what is read is kept: the instructions, and all but the last.

    From there another conversation, or another answer, goes on. A state can only be kept where a
    pass ends, so there it has to save another pass, later; elsewhere it costs nothing.
    """
    conversation, marks, before = chat.now, [], chat.held
    for mark in (
        [conversation.frame.keep]
        if conversation.gap
        else [conversation.frame.keep, len(conversation.tokens) - 1]
    ):
        if mark - before > SHORT * has_states(chat.cache):
            marks.append(mark)
            before = mark
    return marks


@partial(jax.jit, static_argnames="forward", donate_argnames="buffers")
def _read(
    forward: Any,
    params: Any,
    table: Any,
    buffers: Any,
    tokens: jax.Array,
    sequence: jax.Array,
    count: jax.Array,
) -> tuple[Any, Any, jax.Array, jax.Array]:
    """Compute the next tokens of a sequence, in one shape whatever their number.

    Args:
      forward: see `jaxkv.prefill`.
      params: those of the model.
      table: of the cache.
      buffers: of the cache, donated.
      tokens: `[T]` int32, padding behind.
      sequence: `[]` int32.
      count: `[]` int32, how many are there.

    Returns:
      The table and the buffers; the logits after the last token, `[1, V]`; and `ok`, `[]` bool.
      When that is False nothing was changed, and the logits mean nothing.
    """
    cache = jaxkv.Cache(table=table, buffers=buffers)
    index = jnp.arange(tokens.shape[0])
    batch = jaxkv.make_batch(
        tokens[None],
        sequences=sequence,
        valid=(index < count)[None],
        outputs=(index == count - 1)[None],
    )
    plan = jaxkv.init_batch(cache, batch)
    (ubatch,) = plan.ubatches
    # One output is asked for, and the others only pad: the head runs on that one alone.
    asked = jnp.argmin(ubatch.output_index)[None]
    ubatch = replace(ubatch, outputs=ubatch.outputs[asked], output_index=ubatch.output_index[asked])
    cache, logits = forward(params, jaxkv.apply(cache, ubatch), ubatch)
    return cache.table, cache.buffers, logits, plan.ok
