"""Conversations without a terminal: each token once, undone, forked, saved, and past a full memory.

Most tests run tiny models whose tokens are letters: what they say makes no sense, and need not.
"""

import io
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import snapshot
from jaxkv.loops.sampling import make_sampler
from models.chat import chat as edits
from models.chat.conversation import ChatError
from models.chat.room import cells_of, slide
from models.chat.saved import load, save
from models.chat.speaker import Speaker
from models.checkpoints.open import open_checkpoint
from models.cli.arguments import InputError
from models.cli.talk import Talk
from models.cli.terminal import Pipe
from models.compiling import counting
from models.errors import ModelError
from models.fingerprint import fingerprint
from models.text.tokenizer import Tokenizer
from models.text.turns import frame_of, tokens_of_turn
from tests.cases import mostly_nightly

pytestmark = pytest.mark.nightly

DATA = Path(__file__).parent.parent / "data"
CELLS = 64  # mostly: what is compiled for one size is shared


@cache
def tiny(name):
    """A model of the test data that speaks in letters, with a template of few."""
    model = models.load(DATA / name)
    size = model.checkpoint.config["vocab_size"]
    vars(model)["stop_tokens"] = frozenset()
    vars(model)["tokenizer"] = Tokenizer(
        to_ids=lambda text, special: [ord(letter) % size for letter in text],
        to_bytes=lambda id: bytes([97 + id % 26]),
        size=size,
        control={},
        template="{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:",
    )
    return model


@pytest.fixture(scope="module")
def model():
    return tiny("llama_tied")


@pytest.fixture(scope="module")
def speaker(model):
    return Speaker(model=model, max_tokens=6, ubatch_size=32)


@pytest.fixture(scope="module")
def twice(speaker):
    """A chat of two turns; `copied` before anything goes on from it, which donates its memory."""
    return said(speaker, speaker.begin(conversations=3, cells=CELLS), "One", "Two")


def said(speaker, chat, *messages, **options):
    for message in messages:
        chat = speaker.answer(speaker.ask(chat, message), **options)
    return chat


def copied(chat):
    return replace(chat, memory=jax.tree.map(jnp.copy, chat.memory))


def tell(speaker, chat):
    """The next answer, which depends on all that is in the memory."""
    return said(speaker, copied(chat), "And then").now.turns[-1].answer


# ----------------------------------------------------------------------------- each token once


def test_each_token_of_twenty_turns_and_two_forks_is_computed_once(small):
    """The model is asked for as many tokens as there are, of all conversations together.

    The forks ask as their sources do: what the template writes there is found in what was kept.
    """
    seen = []

    def forward(weights, memory, ubatch):
        jax.debug.callback(lambda count: seen.append(int(count)), jnp.sum(ubatch.valid))
        return small.forward(weights, memory, ubatch)

    speaker = Speaker(model=replace(small, forward=forward), max_tokens=6, ubatch_size=32)
    chat, shared = speaker.begin(conversations=3, cells=1024), 0
    for i in range(20):
        chat = said(speaker, chat, f"Turn {i}")
        if i in (4, 9):
            chat = edits.fork(speaker.settle(chat), f"fork{i}")
            shared += len(chat.now.tokens)
            chat = said(speaker, edits.switch(chat, f"fork{i}"), "Another way", "and on")
            chat = edits.switch(chat, "main")
    jax.effects_barrier()
    conversations = chat.conversations.values()
    own = sum(len(one.tokens) for one in conversations) - shared
    held = sum(edits.held_in(chat.memory, one.sequence) for one in conversations) - shared
    assert sum(seen) == chat.computed == held - chat.reused
    # The last token of each answer was picked, and waits for the next turn.
    assert held == own - 3 and len(chat.now.turns) == 20
    assert jaxkv.used(chat.memory) == chat.computed


def test_nothing_compiles_once_a_chat_is_warm(speaker):
    chat = speaker.compile(speaker.begin(conversations=3, cells=CELLS))
    with counting() as compiled:
        chat = said(speaker, chat, "One", "Two" * 9)
        assert compiled() == 0
    assert len(chat.now.turns) == 2


# ------------------------------------------------------------------------------------- templates


@pytest.fixture(scope="module")
def tokenizer():
    """That of SmolLM2; its weights are not read."""
    return open_checkpoint("smollm2").tokenizer()


def test_tokens_are_those_of_the_template_where_answers_are_cut_as_the_tokenizer_cuts(tokenizer):
    """The answers are given: what a model says may be cut otherwise."""
    messages = [{"role": "system", "content": "Be brief."}]
    tokens = []
    for question, answer in (("Who are you?", "A model."), ("Since when?", ""), ("Ah", "Yes, 7.")):
        messages.append({"role": "user", "content": question})
        tokens += tokens_of_turn(tokenizer, messages) + tokenizer.encode(answer)
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": "Go on"})
    tokens += tokens_of_turn(tokenizer, messages)
    assert tokens == tokenizer.prompt(tokenizer.chat(messages), special=True)


TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # As Gemma's: no system role of its own, and contents are stripped.
    "folded": "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first, rest = '', messages %}{% endif %}"
    "{% for m in rest %}<|im_start|>{{ m.role }}\n{{ first if loop.first else '' }}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}<|im_start|>model\n",
    # As of Llama 2: no control token stands before an answer.
    "brackets": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}",
}


BRIEF = ({"role": "system", "content": "Be brief."},)


@pytest.mark.parametrize(
    ("name", "system"),
    [(name, ()) for name in TEMPLATES] + [("chatml", BRIEF), ("folded", BRIEF)],
    ids=str,
)
def test_what_stays_when_turns_are_forgotten_is_a_conversation(tokenizer, name, system):
    """Without the first turn the rest is what the template writes for the second one alone."""
    tokenizer = replace(tokenizer, template=TEMPLATES[name])
    frame = frame_of(tokenizer, system)
    first = [*system, {"role": "user", "content": "One"}]
    both = [*first, {"role": "assistant", "content": "Uno"}, {"role": "user", "content": "Two"}]
    one, two = tokens_of_turn(tokenizer, first), tokens_of_turn(tokenizer, both)
    rest = one[: frame.keep] + two[frame.closing :]
    wanted = tokens_of_turn(tokenizer, [*system, {"role": "user", "content": "Two"}])
    assert rest == wanted


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template, so it is not one to chat with"),
        ("{{ messages[-1].content }}", "leaves out messages of a conversation"),
        ("{{ raise_exception('roles') }}", "does not take these messages: roles"),
    ],
)
def test_a_model_that_cannot_chat_says_so_before_anything_is_made(speaker, template, message):
    bare = replace(speaker.model)
    vars(bare)["tokenizer"] = replace(speaker.model.tokenizer, template=template)
    with pytest.raises(ModelError, match=message):
        replace(speaker, model=bare).begin(conversations=1, cells=10**12)


# ------------------------------------------------------------------------- undo, fork, and the rest


def test_undo_leaves_what_was_there_before(speaker, twice):
    thrice = said(speaker, copied(twice), "Three")
    back, why = edits.undo(thrice)
    assert (back.conversations, why) == (twice.conversations, "")
    assert back.held == len(twice.now.tokens)  # the token that waited was computed, and stays
    assert tell(speaker, back) == tell(speaker, twice)
    none, _ = edits.undo(edits.undo(back)[0])
    assert none.now.turns == () == none.now.tokens and jaxkv.used(none.without_kept) == 0
    with pytest.raises(ChatError, match="nothing has been said"):
        edits.undo(none)


def test_another_attempt_computes_one_token_and_draws_anew(speaker, twice):
    speaker = replace(speaker, sampler=make_sampler(temperature=9.0))
    chat = speaker.answer(speaker.ask(copied(twice), "Three"))
    again, why = edits.unanswered(chat)
    assert why == "" and again.held == again.now.turns[-1].asked - 1
    other = speaker.answer(again, attempt=1)
    assert other.spent.read == 1 and len(other.now.turns) == 3
    assert other.now.turns[-1].answer != chat.now.turns[-1].answer
    same = speaker.answer(edits.unanswered(other)[0], attempt=0)
    assert same.now == chat.now


def test_forks_go_their_ways(speaker, twice):
    chat = edits.fork(copied(twice), "b")
    assert jaxkv.used(chat.memory) == jaxkv.used(twice.memory)
    forked = said(speaker, edits.switch(chat, "b"), "Here")
    main = edits.switch(forked, "main")
    assert main.now == twice.now and len(forked.now.turns) == 3
    assert tell(speaker, main) == tell(speaker, twice)
    gone = edits.drop(main, "b")
    assert list(gone.conversations) == ["main"]
    assert jaxkv.used(gone.without_kept) == jaxkv.used(twice.memory)
    anew = edits.drop(gone, "main")
    assert anew.now.turns == () and jaxkv.used(anew.without_kept) == 0


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda chat: edits.fork(chat, "main"), "there is a conversation main already"),
        (lambda chat: edits.fork(chat, ""), "a fork needs a name of one word"),
        (lambda chat: edits.fork(chat, "b c"), "a fork needs a name of one word"),
        (lambda chat: edits.switch(chat, "x"), "no conversation x; there are main"),
        (lambda chat: edits.drop(chat, "x"), "no conversation x; there are main"),
        (
            lambda chat: edits.fork(edits.fork(edits.fork(chat, "b"), "c"), "d"),
            "there are 3 conversations, .* start with --conversations 6",
        ),
    ],
)
def test_what_cannot_be_is_a_sentence(twice, edit, message):
    with pytest.raises(ChatError, match=message):
        edit(twice)


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(speaker, twice):
    longer, heard = replace(speaker, max_tokens=60), []
    chat = longer.ask(copied(twice), "Three")
    chat = longer.answer(chat, on_text=heard.append, stopped=lambda: len(heard) > 1)
    turn = chat.now.turns[-1]
    assert turn.finish == "interrupted" and turn.answer == "".join(heard) != ""
    assert 2 <= len(chat.now.tokens) - turn.asked < 9
    after = said(longer, copied(chat), "4", stopped=lambda: True)
    assert after.now.turns[-1].answer == "" and after.held == chat.held  # before it began
    # What was said and not computed is computed with the next turn.
    assert said(speaker, after, "5").spent.read > len(after.now.tokens) - after.held


# ------------------------------------------------------------------------------------ a full memory


def test_a_full_memory_ends_the_answer_and_keeps_all(speaker):
    chat = said(speaker, speaker.begin(conversations=3, cells=CELLS), "1" * (CELLS - 7))
    turn = chat.now.turns[-1]
    assert (turn.finish, cells_of(chat.memory)) == ("full", (CELLS, CELLS))
    assert len(turn.answer) == 3 and len(chat.now.tokens) == CELLS + 1  # one more was picked
    chat = said(speaker, chat, "Two")
    assert [turn.finish for turn in chat.now.turns] == ["full", "full"]
    assert chat.now.turns[-1].answer == "" and cells_of(chat.memory) == (CELLS, CELLS)
    back, _ = edits.undo(edits.undo(chat)[0])
    assert back.now.turns == () and cells_of(back.without_kept) == (0, CELLS)


def test_sliding_goes_on_and_on(speaker):
    """Messages stay whole: the oldest turns go, and the instructions of the template stay."""
    sliding = replace(speaker, on_full="slide")
    chat = sliding.begin(conversations=3, cells=CELLS)
    for i in range(12):
        chat = said(sliding, chat, f"Turn {i}")
        assert chat.now.turns[-1].finish in ("length", "stop")
    assert chat.now.gap > 0 and cells_of(chat.memory)[0] <= CELLS < len(chat.now.tokens)
    opens = [turn.start + chat.now.frame.closing for turn in chat.now.turns]
    assert chat.now.frame.keep + chat.now.gap in opens
    # As far back as it goes, and further: what was forgotten is computed again.
    for _ in range(12):
        chat, _ = edits.undo(chat)
    assert chat.now.gap == 0 and said(sliding, chat, "Anew").now.turns[-1].answer


def test_what_cannot_slide_says_why(speaker, twice):
    with pytest.raises(ChatError, match="may be shared with b: /drop what is not needed"):
        slide(edits.fork(copied(twice), "b"))
    with pytest.raises(ChatError, match="there is nothing to forget yet"):
        slide(speaker.begin(conversations=3, cells=CELLS))
    slid = slide(copied(twice))
    assert slid.now.gap > 0 and slid.now.turns == twice.now.turns
    assert jaxkv.used(slid.memory) == jaxkv.used(twice.memory) - slid.now.gap
    assert twice.store.texts and not slid.store.texts


def test_what_is_kept_gives_way_before_turns_are_forgotten(speaker):
    """The least recently used first, and no more of it than has to."""
    sliding = replace(speaker, on_full="slide")

    def sizes(chat):
        return [text.tokens.size for text in chat.store.texts]

    chat = said(sliding, speaker.begin(conversations=3, cells=CELLS), "b" * 12, "b")
    chat = said(sliding, edits.drop(chat, "main"), "c" * 6, "c")
    chat = edits.drop(chat, "main")
    assert sizes(chat) == [29, 23]  # both up to where the last answer began
    chat = said(sliding, chat, "d" * 20)
    assert sizes(chat) == [23, 24]
    chat = said(sliding, chat, "d" * 9)
    assert sizes(chat) == [45] and chat.now.gap == 0
    chat = said(sliding, chat, "d" * 9)
    assert chat.now.gap > 0 and chat.now.turns[-1].finish == "length"


def test_what_cannot_find_room_leaves_what_is_kept(speaker, twice):
    """Letting go of it would not help, and so it is not done."""
    chat = said(speaker, copied(twice), "3" * CELLS)
    assert chat.now.turns[-1].finish == "full"
    assert [text.tokens.size for text in chat.store.texts] == [twice.held]


def test_a_conversation_that_begins_alike_computes_the_rest(speaker):
    chat = speaker.begin(conversations=3, cells=CELLS, system="Be brief")
    chat = said(speaker, edits.drop(said(speaker, chat, "One"), "main"), "Two")
    alike = len("s:Be brief;u:")
    assert chat.reused == alike and chat.spent.read == chat.now.turns[0].asked - alike


# ---------------------------------------------------------------------------- windows and states

STATEFUL = mostly_nightly(["granite_hybrid", "mamba2", "recurrent_gemma"], few=["granite_hybrid"])


@pytest.mark.parametrize("name", ["gemma3", *STATEFUL])
def test_what_is_kept_is_gone_back_to(name, tmp_path):
    """Turns longer than a window holds, whose states are gone: what is kept is never computed."""
    speaker = Speaker(model=tiny(name), max_tokens=4, ubatch_size=16)
    chat = speaker.begin(conversations=2, cells=900, holders=6, system="s" * 40)
    for i in range(20):
        chat = said(speaker, chat, f"Turn {i}")
    assert chat.computed == chat.held == len(chat.now.tokens) - 1 and chat.reused == 0
    chat = said(speaker, edits.drop(chat, "main"), "You")
    assert chat.spent.read <= chat.now.turns[0].asked - chat.now.frame.keep
    chat = edits.drop(chat, "main")
    for letter in "1234":
        chat = said(speaker, chat, letter * 150)
    before, answers = chat.computed, [turn.answer for turn in chat.now.turns]
    chat, why = edits.unanswered(chat)
    assert why == "" and chat.held == len(chat.now.tokens) - 1
    chat = speaker.answer(chat)
    assert (chat.spent.read, [turn.answer for turn in chat.now.turns]) == (1, answers)
    for turns in (1, 2):
        for _ in range(turns):
            chat, why = edits.undo(chat)
            assert why == "" and chat.held >= len(chat.now.tokens) - 1
        chat = said(speaker, chat, str(5 - turns) * 150)
        assert chat.spent.read == 1  # that message was kept, too
        assert [turn.answer for turn in chat.now.turns] == answers[: 5 - turns]
    assert chat.computed == before + 3 * 4  # three answers, and the token before each
    save(tmp_path / "chat", chat, speaker.model)
    elsewhere = speaker.begin(conversations=4, cells=900, holders=4)
    back, why = edits.undo(load(tmp_path / "chat", elsewhere, speaker.model))
    assert why == "" and back.held >= len(back.now.tokens) - 1
    chat, why = edits.undo(edits.undo(chat)[0])  # further than there are holders
    assert why in (
        "a window of 12 has let go of what it would see, and so has what was kept",
        "a recurrent state cannot forget what it has seen, and no state was kept from there",
    )
    assert said(speaker, chat, "2" * 150).now.turns[-1].answer == answers[1]


@pytest.fixture(scope="module", params=STATEFUL)
def stateful(request):
    return Speaker(model=tiny(request.param), max_tokens=4, ubatch_size=16)


def test_what_a_window_lost_is_computed_anew_without_what_was_forgotten():
    """As a conversation would be that never had the passage."""
    speaker = Speaker(model=tiny("gemma3"), max_tokens=4, ubatch_size=16)
    begun = speaker.begin(conversations=2, cells=900, holders=6, system="sys")
    chat = slide(said(speaker, copied(begun), "1" * 30, "2" * 30))
    for letter in "34567":
        chat = said(speaker, chat, letter * 150)
    for _ in range(4):
        chat, _ = edits.undo(chat)
    now = chat.now
    assert chat.held == 0 < now.gap
    rest = now.tokens[: now.frame.keep] + now.tokens[now.frame.keep + now.gap :]
    never = begun.going_on(replace(begun.now.ask("", rest), frame=now.frame), begun.memory)
    (chat, found), (_, wanted) = (speaker._read_message(one) for one in (chat, never))
    assert chat.held == len(now.tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_full_memory_of_states_keeps_what_is_gone_back_to(stateful):
    """What shares the cells of the conversation would free none; what was taken back does."""
    chat = said(stateful, stateful.begin(conversations=2, cells=CELLS), "One")
    again, why = edits.unanswered(said(stateful, copied(chat), "Two"))
    assert why == "" and again.held == chat.held  # a short message is one pass as well
    chat = said(stateful, chat, "2" * 30)
    full = said(stateful, copied(chat), "3" * 30)
    assert full.now.turns[-1].finish == "full"
    back, why = edits.undo(full)
    assert why == "" and back.now == chat.now
    chat, _ = edits.undo(chat)
    assert cells_of(chat.memory)[0] > cells_of(chat.without_kept)[0] + 20
    chat = said(stateful, chat, "4" * 30)
    assert chat.now.turns[-1].finish == "length" and cells_of(chat.memory)[0] <= CELLS


def test_forks_and_files_of_states(stateful, tmp_path):
    chat = said(stateful, stateful.begin(conversations=2, cells=CELLS), "One", "Two")
    chat = edits.fork(stateful.settle(chat), "b")
    told = tell(stateful, chat)
    b = said(stateful, edits.switch(chat, "b"), "Elsewhere")
    assert tell(stateful, edits.switch(b, "main")) == told
    save(tmp_path / "chat", b, stateful.model)
    empty = stateful.begin(conversations=3, cells=80)
    loaded = load(tmp_path / "chat", empty, stateful.model)
    assert loaded.current == "b" and tell(stateful, loaded) == tell(stateful, b)
    back, why = edits.undo(loaded)
    assert why == "" and tell(stateful, back) == told
    with pytest.raises(ChatError, match="a recurrent state cannot forget"):
        slide(back)
    with pytest.raises(ChatError, match="leave --on-full slide out"):
        replace(stateful, on_full="slide").begin(conversations=1, cells=64)


# ------------------------------------------------------------------------------------------- files


def test_a_saved_chat_goes_on_with_nothing_computed(speaker, twice, tmp_path):
    chat = edits.fork(copied(twice), "b")
    path = tmp_path / "chat.safetensors"
    save(path, chat, speaker.model)
    empty = speaker.begin(conversations=2, cells=200)
    loaded = load(path, empty, speaker.model)
    assert (loaded.conversations, loaded.current) == (chat.conversations, "main")
    assert loaded.computed == 0 and loaded.held == twice.held
    assert tell(speaker, loaded) == tell(speaker, twice)
    undone, _ = edits.undo(said(speaker, loaded, "3" * 30))
    save(tmp_path / "undone", undone, speaker.model)
    few = load(tmp_path / "undone", speaker.begin(conversations=2, cells=32), speaker.model)
    assert few.now == undone.now and few.held == undone.held and not few.store.texts
    info = snapshot.inspect(path)
    assert info.model == fingerprint(speaker.model)
    assert info.sequences == (0, 1, *(text.holder for text in twice.store.texts))


def test_other_weights_have_another_fingerprint(model):
    weights = {**model.weights, "norm": jax.tree.map(lambda x: x + 1, model.weights["norm"])}
    same, other = replace(model), replace(model, weights=weights)
    assert fingerprint(same) == fingerprint(model) != fingerprint(other)
    assert json.loads(json.dumps(fingerprint(model))) == fingerprint(model)


def test_files_that_are_none_are_refused_and_change_nothing(speaker, twice, tmp_path):
    chat, path = copied(twice), tmp_path / "chat.safetensors"
    save(path, edits.fork(edits.fork(chat, "b"), "c"), speaker.model)

    def refused(message, *, chat=chat, model=speaker.model, path=path):
        before = np.asarray(chat.memory.table.position)
        with pytest.raises(ChatError, match=message):
            load(path, chat, model)
        np.testing.assert_array_equal(chat.memory.table.position, before)
        assert not chat.memory.buffers.k[0].is_deleted()

    refused("cannot be read: No such file", path=tmp_path / "none")
    small_one = speaker.begin(conversations=2, cells=64)
    refused("holds 3 conversations, and 2 may be here", chat=small_one)
    refused(
        "does not fit: .* start with more --cells", chat=speaker.begin(conversations=3, cells=9)
    )
    other = replace(speaker.model, dtype=jnp.dtype("bfloat16"))
    refused("is of another model, llama float32", model=other)
    snapshot.save(tmp_path / "plain", chat.memory, model=fingerprint(speaker.model))
    refused("is a snapshot and no chat", path=tmp_path / "plain")
    (tmp_path / "cut").write_bytes(path.read_bytes()[:-9])
    refused("cannot be loaded: wanted a snapshot", path=tmp_path / "cut")
    data = path.read_bytes()
    (tmp_path / "bent").write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    refused("cannot be loaded: wanted .* with the checksum", path=tmp_path / "bent")
    assert tell(speaker, chat) == tell(speaker, twice)
    with pytest.raises(ChatError, match="cannot be written"):
        save(tmp_path / "none" / "chat", chat, speaker.model)


NOTES = {"kind": "models.chat", "current": "main", "kept": [], "conversations": {}}
TURN = {"message": "a", "start": 0, "asked": 1, "answer": "b", "finish": "stop"}
ONE = {"sequence": 0, "frame": {"keep": 0, "closing": 0}, "system": None, "turns": [TURN], "gap": 0}


@pytest.mark.parametrize(
    "one",
    [
        ONE | {"sequence": "0"},
        ONE | {"turns": [TURN | {"start": 9}]},
        ONE | {"turns": [TURN | {"finish": "tired"}]},
        ONE | {"turns": [TURN | {"message": 7}]},
        ONE | {"turns": [{}]},
        ONE | {"system": []},
        ONE | {"gap": -1},
        ONE | {"frame": None},
        {},
        None,
    ],
    ids=str,
)
def test_notes_that_lie_are_refused(speaker, twice, tmp_path, one):
    path, mark = tmp_path / "chat", fingerprint(speaker.model)
    notes = NOTES | {"conversations": {"main": one}}
    snapshot.save(path, twice.memory, tokens={0: [1, 2, 3]}, model=mark, notes=notes)
    with pytest.raises(ChatError, match="cannot be loaded"):
        load(path, twice, speaker.model)


def test_an_answer_that_slid_into_itself_is_computed_anew():
    """What was forgotten reaches into the answer that is taken back, or into its message."""
    speaker = Speaker(model=tiny("llama_tied"), max_tokens=60, ubatch_size=32, on_full="slide")
    chat = said(speaker, speaker.begin(conversations=3, cells=64), "Hello")
    assert chat.now.gap > chat.now.turns[-1].asked
    before, why = edits.unanswered(copied(chat))
    assert before.held <= len(before.now.tokens) and before.now.gap == 0 and not why
    again = speaker.answer(before)
    assert again.now.turns[-1].answer == chat.now.turns[-1].answer
    after = said(speaker, again, "And you?")
    assert after.held <= len(after.now.tokens)


def test_a_refused_command_leaves_the_chat_as_it_was():
    """Also where a fork had to compute a token first, which gives up the buffers."""
    speaker = Speaker(model=tiny("llama_tied"), max_tokens=6, ubatch_size=32)
    chat = speaker.answer(speaker.ask(speaker.begin(conversations=3, cells=64), "Hello"))
    talk = Talk(speaker, chat)
    for line in ("/fork main", "/fork", "/save a\0b", "/switch \x1b[2J"):
        with pytest.raises(ChatError):
            talk.take(line)
    talk.take("next")
    assert len(talk.chat.now.turns) == 2


def test_bytes_that_are_no_text_are_a_sentence(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi\xff\xfe\n"), "utf-8"))
    with pytest.raises(InputError, match="stdin cannot be read"):
        Pipe().read("main")
