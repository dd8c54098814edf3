"""Conversations without a terminal: each token computed once, undone, forked, past a full cache."""

import json
from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxkv.generation.filters import make_sampler
from models.chat import chat as edits
from models.chat.conversation import ChatError
from models.chat.room import cells_of, slide
from models.cli.talk import Talk
from models.compiling import counting
from tests.models.speaking import CELLS, copy_chat, next_answer, say
from tests.models.tiny_files import DATA

pytestmark = pytest.mark.core


@pytest.mark.nightly
def test_chat_computes_each_token_of_turns_and_forks_once(speaker):
    seen, model = [], speaker.model

    def forward(params, step):
        jax.debug.callback(lambda count: seen.append(int(count)), jnp.sum(step.valid))
        return model.forward(params, step)

    counted = replace(model, forward=forward)
    vars(counted).update(tokenizer=model.tokenizer, stop_tokens=frozenset())
    speaker = replace(speaker, model=counted)
    chat = say(speaker, speaker.begin(conversations=3, cells=1024), "One", "Two", "Three")
    chat = edits.switch(edits.fork(speaker.settle(chat), "b"), "b")
    chat = say(speaker, chat, "Another way", "and on")
    jax.effects_barrier()
    assert sum(seen) == chat.computed == chat.cache.num_used_cells()


def test_speaker_compile_leaves_nothing_to_compile(speaker):
    chat = speaker.compile(speaker.begin(conversations=3, cells=CELLS))
    with counting() as compiled:
        chat = say(speaker, chat, "One", "Two" * 9)
        assert compiled() == 0
    assert len(chat.now.turns) == 2


def test_undo_leaves_what_was_there_before(speaker, two_turns):
    thrice = say(speaker, copy_chat(two_turns), "Three")
    back, why = edits.undo(thrice)
    assert (back.conversations, why) == (two_turns.conversations, "")
    assert back.num_cached == len(two_turns.now.tokens)  # the waiting token was computed, and stays
    assert next_answer(speaker, back) == next_answer(speaker, two_turns)
    none, _ = edits.undo(edits.undo(back)[0])
    assert none.now.turns == () == none.now.tokens and none.without_prefixes.num_used_cells() == 0
    with pytest.raises(ChatError, match="this conversation has no turn"):
        edits.undo(none)


def test_unanswered_computes_one_token_and_draws_anew(speaker, two_turns):
    speaker = replace(speaker, sampler=make_sampler(temperature=9.0))
    chat = speaker.answer(speaker.ask(copy_chat(two_turns), "Three"))
    again, why = edits.retract_answer(chat)
    assert why == "" and again.num_cached == again.now.turns[-1].asked - 1
    other = speaker.answer(again, attempt=1)
    assert other.spent.prompt_tokens == 1 and len(other.now.turns) == 3
    assert other.now.turns[-1].answer != chat.now.turns[-1].answer
    same = speaker.answer(edits.retract_answer(other)[0], attempt=0)
    assert same.now == chat.now


def test_talk_refused_command_leaves_chat_as_it_was(speaker):
    talk = Talk(speaker, speaker.begin(conversations=3, cells=CELLS))
    for line, message in json.loads((DATA / "chat_lines.json").read_text()):
        with pytest.raises(ChatError, match=message) if message else nullcontext():
            talk.take(line)
    assert len(talk.chat.now.turns) == 2 and [*talk.chat.conversations] == ["main", "b", "c"]


@pytest.mark.nightly
def test_answer_stopped_keeps_what_there_is(speaker, two_turns):
    longer, heard = replace(speaker, max_tokens=60), []
    chat = longer.ask(copy_chat(two_turns), "Three")
    chat = longer.answer(chat, on_text=heard.append, stopped=lambda: len(heard) > 1)
    turn = chat.now.turns[-1]
    assert turn.finish == "interrupted" and turn.answer == "".join(heard) != ""
    assert 2 <= len(chat.now.tokens) - turn.asked < 9
    after = say(longer, copy_chat(chat), "4", stopped=lambda: True)
    assert after.now.turns[-1].answer == ""  # it was interrupted before the answer
    assert after.num_cached == chat.num_cached
    # Generated tokens that were not computed are computed with the next turn.
    assert say(speaker, after, "5").spent.prompt_tokens > len(after.now.tokens) - after.num_cached


def test_answer_full_cache_ends_and_keeps_all(speaker):
    chat = say(speaker, speaker.begin(conversations=3, cells=CELLS), "1" * (CELLS - 7))
    turn = chat.now.turns[-1]
    assert (turn.finish, cells_of(chat.cache)) == ("full", (CELLS, CELLS))
    assert len(turn.answer) == 3 and len(chat.now.tokens) == CELLS + 1  # one more was sampled
    chat = say(speaker, chat, "Two")
    assert [turn.finish for turn in chat.now.turns] == ["full", "full"]
    assert chat.now.turns[-1].answer == "" and cells_of(chat.cache) == (CELLS, CELLS)
    back, _ = edits.undo(edits.undo(chat)[0])
    assert back.now.turns == () and cells_of(back.without_prefixes) == (0, CELLS)


def test_context_shift_shared_or_empty_conversation_raises(speaker, two_turns):
    with pytest.raises(ChatError, match="may be shared with b: /drop a conversation"):
        slide(edits.fork(copy_chat(two_turns), "b"))
    with pytest.raises(ChatError, match="no turn can be removed"):
        slide(speaker.begin(conversations=3, cells=CELLS))
    slid = slide(copy_chat(two_turns))
    assert slid.now.gap > 0 and slid.now.turns == two_turns.now.turns
    assert slid.cache.num_used_cells() == two_turns.cache.num_used_cells() - slid.now.gap
    assert two_turns.store.prompts and not slid.store.prompts


@pytest.mark.nightly
def test_stored_prefixes_are_evicted_before_turns_are_removed(speaker, two_turns):
    sliding = replace(speaker, on_full="slide")

    def sizes(chat):
        return [text.tokens.size for text in chat.store.prompts]

    chat = say(sliding, speaker.begin(conversations=3, cells=CELLS), "b" * 12, "b")
    chat = say(sliding, edits.drop(chat, "main"), "c" * 6, "c")
    chat = edits.drop(chat, "main")
    assert sizes(chat) == [29, 23]  # up to the start of the last answer
    for count, kept in ((20, [23, 24]), (9, [45])):
        chat = say(sliding, chat, "d" * count)
        assert sizes(chat) == kept and chat.now.gap == 0
    chat = say(sliding, chat, "d" * 9)
    assert chat.now.gap > 0 and chat.now.turns[-1].finish == "length"
    # It stays where removing it would not help.
    chat = say(speaker, copy_chat(two_turns), "3" * CELLS)
    assert chat.now.turns[-1].finish == "full" and sizes(chat) == [two_turns.num_cached]
