"""Conversations of models with windows and states, which cannot roll back single tokens."""

from dataclasses import replace

import numpy as np
import pytest

from models.chat import chat as edits
from models.chat.conversation import ChatError
from models.chat.room import cells_of, slide
from models.chat.saved import load, save
from models.chat.speaker import Speaker
from tests.models.speaking import CELLS, copy_chat, say, tiny


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name",
    ["gemma3", "gemma3n", "gemma4", "granite_hybrid", "mamba2", "qwen3_5", "recurrent_gemma"],
)
def test_undo_goes_back_to_kept_texts_without_computing(name, tmp_path):
    speaker = Speaker(model=tiny(name), max_tokens=4, ubatch_size=16)
    chat = speaker.begin(conversations=2, cells=900, holders=6, system="s" * 40)
    for i in range(20):
        chat = say(speaker, chat, f"Turn {i}")
    assert chat.computed == chat.num_cached == len(chat.now.tokens) - 1 and chat.reused == 0
    chat = say(speaker, edits.drop(chat, "main"), "You")
    assert chat.spent.prompt_tokens <= chat.now.turns[0].asked - chat.now.frame.keep
    chat = edits.drop(chat, "main")
    for letter in "1234":
        chat = say(speaker, chat, letter * 150)
    before, answers = chat.computed, [turn.answer for turn in chat.now.turns]
    chat, why = edits.retract_answer(chat)
    assert why == "" and chat.num_cached == len(chat.now.tokens) - 1
    chat = speaker.answer(chat)
    assert (chat.spent.prompt_tokens, [turn.answer for turn in chat.now.turns]) == (1, answers)
    for turns in (1, 2):
        for _ in range(turns):
            chat, why = edits.undo(chat)
            assert why == "" and chat.num_cached >= len(chat.now.tokens) - 1
        chat = say(speaker, chat, str(5 - turns) * 150)
        assert chat.spent.prompt_tokens == 1  # that message was kept too
        assert [turn.answer for turn in chat.now.turns] == answers[: 5 - turns]
    assert chat.computed == before + 3 * 4  # three answers, and the token before each
    save(tmp_path / "chat", chat, speaker.model)
    elsewhere = speaker.begin(conversations=4, cells=900, holders=4)
    back, why = edits.undo(load(tmp_path / "chat", elsewhere, speaker.model))
    assert why == "" and back.num_cached >= len(back.now.tokens) - 1
    chat, why = edits.undo(edits.undo(chat)[0])  # further than the holders
    assert "a window of 12 are evicted" in why or "removed from a recurrent state" in why
    assert say(speaker, chat, "2" * 150).now.turns[-1].answer == answers[1]


@pytest.mark.nightly
def test_undo_window_recomputes_without_what_was_forgotten():
    speaker = Speaker(model=tiny("gemma3"), max_tokens=4, ubatch_size=16)
    begun = speaker.begin(conversations=2, cells=900, holders=6, system="sys")
    chat = slide(say(speaker, copy_chat(begun), "1" * 30, "2" * 30))
    for letter in "34567":
        chat = say(speaker, chat, letter * 150)
    for _ in range(4):
        chat, _ = edits.undo(chat)
    now = chat.now
    assert chat.num_cached == 0 < now.gap
    rest = now.tokens[: now.frame.keep] + now.tokens[now.frame.keep + now.gap :]
    never = begun.with_current(replace(begun.now.ask("", rest), frame=now.frame), begun.cache)
    (chat, found), (_, wanted) = (speaker._read_message(one) for one in (chat, never))
    assert chat.num_cached == len(now.tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.nightly
def test_undo_full_cache_of_states_goes_back_to_kept():
    stateful = Speaker(model=tiny("granite_hybrid"), max_tokens=4, ubatch_size=16)
    chat = say(stateful, stateful.begin(conversations=2, cells=CELLS), "One")
    again, why = edits.retract_answer(say(stateful, copy_chat(chat), "Two"))
    assert why == "" and again.num_cached == chat.num_cached  # a short message is one pass too
    chat = say(stateful, chat, "2" * 30)
    full = say(stateful, copy_chat(chat), "3" * 30)
    assert full.now.turns[-1].finish == "full"
    back, why = edits.undo(full)
    assert why == "" and back.now == chat.now
    chat, _ = edits.undo(chat)
    assert cells_of(chat.cache)[0] > cells_of(chat.without_prefixes)[0] + 20
    chat = say(stateful, chat, "4" * 30)
    assert chat.now.turns[-1].finish == "length" and cells_of(chat.cache)[0] <= CELLS


def test_context_shift_of_states_raises():
    speaker = Speaker(model=tiny("mamba2"), on_full="slide")
    with pytest.raises(ChatError, match="leave out --on-full slide"):
        speaker.begin(conversations=1, cells=64)
