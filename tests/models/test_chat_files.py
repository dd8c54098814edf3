"""Chats in files: they continue without computing again; other files raise."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv import snapshot
from models.chat import chat as edits
from models.chat.conversation import ChatError
from models.chat.saved import load, save
from models.fingerprint import fingerprint
from tests.models.speaking import CELLS, copy_chat, next_answer, say

pytestmark = pytest.mark.core


def test_load_saved_chat_goes_on_with_nothing_computed(speaker, two_turns, tmp_path):
    chat = edits.fork(copy_chat(two_turns), "b")
    path = tmp_path / "chat.safetensors"
    save(path, chat, speaker.model)
    loaded = load(path, speaker.begin(conversations=3, cells=CELLS), speaker.model)
    assert (loaded.conversations, loaded.current) == (chat.conversations, "main")
    assert loaded.computed == 0 and loaded.num_cached == two_turns.num_cached
    assert next_answer(speaker, loaded) == next_answer(speaker, two_turns)
    undone, _ = edits.undo(say(speaker, loaded, "3" * 20))
    save(tmp_path / "undone", undone, speaker.model)  # fits into fewer cells and sequences
    few = load(tmp_path / "undone", speaker.begin(conversations=2, cells=32), speaker.model)
    assert few.now == undone.now and few.num_cached == undone.num_cached and not few.store.prompts
    info = snapshot.inspect(path)
    assert info.model_id == fingerprint(speaker.model)
    assert info.sequences == (0, 1, *(text.sequence for text in two_turns.store.prompts))


def test_fingerprint_other_weights_differ(speaker):
    model = speaker.model
    params = {**model.params, "norm": jax.tree.map(lambda x: x + 1, model.params["norm"])}
    same, other = replace(model), replace(model, params=params)
    assert fingerprint(same) == fingerprint(model) != fingerprint(other)


def test_load_other_files_raises_and_changes_nothing(speaker, two_turns, tmp_path):
    chat, path = copy_chat(two_turns), tmp_path / "chat.safetensors"
    save(path, edits.fork(edits.fork(chat, "b"), "c"), speaker.model)

    def refused(message, *, chat=chat, model=speaker.model, path=path):
        before = np.asarray(chat.cache.table.position)
        with pytest.raises(ChatError, match=message):
            load(path, chat, model)
        np.testing.assert_array_equal(chat.cache.table.position, before)
        assert not chat.cache.buffers.k[0].is_deleted()

    refused("cannot be read: No such file", path=tmp_path / "none")
    few, narrow = (speaker.begin(conversations=n, cells=cells) for n, cells in ((2, 64), (3, 9)))
    refused("contains 3 conversations, and the limit is 2", chat=few)
    refused("does not fit: .* start with more --cells", chat=narrow)
    other = replace(speaker.model, dtype=jnp.dtype("bfloat16"))
    refused("expected a chat with llama bfloat16 .*, got one with llama float32", model=other)
    snapshot.save(chat.cache, path=tmp_path / "plain", model_id=fingerprint(speaker.model))
    refused("is a snapshot without a chat", path=tmp_path / "plain")
    data = path.read_bytes()
    (tmp_path / "cut").write_bytes(data[:-9])
    refused("cannot be loaded: expected a snapshot", path=tmp_path / "cut")
    (tmp_path / "bent").write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    refused("cannot be loaded: expected .* with the checksum", path=tmp_path / "bent")
    assert next_answer(speaker, chat) == next_answer(speaker, two_turns)
    with pytest.raises(ChatError, match="cannot be written"):
        save(tmp_path / "none" / "chat", chat, speaker.model)


NOTES = {"kind": "models.chat", "current": "main", "kept": [], "conversations": {}}
TURN = {"message": "a", "start": 0, "asked": 1, "answer": "b", "finish": "stop"}
ONE = {"sequence": 0, "frame": {"keep": 0, "closing": 0}, "system": None, "turns": [TURN], "gap": 0}
LIES = [{"sequence": "0"}, {"turns": [{}]}, {"system": []}, {"gap": -1}, {"frame": None}]
LIES += [{"turns": [TURN | one]} for one in ({"start": 9}, {"finish": "tired"}, {"message": 7})]


def test_load_notes_that_lie_raises(speaker, two_turns, tmp_path):
    for i, one in enumerate([*(ONE | lie for lie in LIES), {}, None]):
        notes = NOTES | {"conversations": {"main": one}}
        tokens, mark = {0: [1, 2, 3]}, fingerprint(speaker.model)
        beside = dict(tokens=tokens, model_id=mark, notes=notes)
        snapshot.save(two_turns.cache, path=tmp_path / f"{i}", **beside)
        with pytest.raises(ChatError, match="cannot be loaded"):
            load(tmp_path / f"{i}", two_turns, speaker.model)
