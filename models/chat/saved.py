"""Chats in files: a snapshot of the cache, with conversations and stored prefixes."""

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, get_args

import jaxkv
from jaxkv import snapshot
from jaxkv.snapshot.load import SnapshotInfo
from models.chat.chat import Chat
from models.chat.conversation import ChatError, Conversation, Turn
from models.errors import first_line
from models.fingerprint import fingerprint
from models.model import Model
from models.text.turns import Frame
from models.texts import Finish

KIND = "models.chat"
"""Value of the key `kind` in the notes of a snapshot that contains a chat."""


def save(path: str | os.PathLike, chat: Chat, model: Model) -> None:
    """Write all conversations and stored prefixes of a chat to a file; may raise `ChatError`."""
    found = chat.conversations
    tokens = {conversation.sequence: conversation.tokens for conversation in found.values()}
    kept = {prompt.sequence: prompt.tokens for prompt in chat.store.prompts}
    notes = {
        "kind": KIND,
        "current": chat.current,
        "kept": [*kept],
        "conversations": {
            name: _conversation_json(conversation) for name, conversation in found.items()
        },
    }
    try:
        snapshot.save(
            chat.cache,
            path=path,
            sequences=[*tokens, *kept],
            tokens=tokens | kept,
            model_id=fingerprint(model),
            notes=notes,
        )
    except (OSError, ValueError) as error:  # ValueError for an invalid file name
        why = getattr(error, "strerror", None) or error
        raise ChatError(f"{path} cannot be written: {why}.") from error


def load(path: str | os.PathLike, chat: Chat, model: Model) -> Chat:
    """Return a chat whose conversations are replaced by the conversations in a file.

    After an exception, the chat is unchanged.

    Args:
      path: file written by `save`.
      chat: chat whose conversations are replaced. Its cache may have another size than the saved
        cache, and is donated.
      model: model that computed the saved conversations.

    Raises:
      ChatError: If the file is missing or damaged, or contains no chat.
      ChatError: If the chat was saved with another model, or does not fit the cache.
    """
    try:
        info = snapshot.inspect(path)
        found = conversations_in(info)
        if not found:
            raise ChatError(f"{path} is a snapshot without a chat; /load a file from /save.")
        if len(found) > chat.seats:
            raise ChatError(
                f"{path} contains {len(found)} conversations, and the limit is {chat.seats}: start "
                f"with --conversations {len(found)}."
            )
        own_model = fingerprint(model)
        if info.model_id != own_model:
            raise ChatError(
                f"{path}: expected a chat with {fingerprint_text(own_model)}, got one with "
                f"{fingerprint_text(info.model_id)}; start with its --model."
            )
        targets = {conversation.sequence: seat for seat, conversation in enumerate(found.values())}
        kept = kept_tokens(info)
        current = info.notes["current"]
        if current not in found:
            raise ValueError(f"its current conversation {current} is missing")
        chat = _load_chat(path, replace(chat, cache=jaxkv.clear(chat.cache)), targets, kept)
    except OSError as error:
        raise ChatError(f"{path} cannot be read: {error.strerror or error}.") from error
    except jaxkv.PlanRefusedError as error:
        raise ChatError(
            f"{path} does not fit: {first_line(error)}; start with more --cells."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ChatError(f"{path} cannot be loaded: {first_line(error)}.") from error
    conversations = {
        name: replace(conversation, sequence=i)
        for i, (name, conversation) in enumerate(found.items())
    }
    return replace(chat, conversations=conversations, current=current)


def _load_chat(
    path: str | os.PathLike, chat: Chat, targets: dict[int, int], kept: dict[int, list[int]]
) -> Chat:
    """Load conversations into an empty chat; load stored prefixes too if their cells fit.

    At most one prefix is loaded for each sequence of the prefix store, most recently used prefixes
    first. The dict `targets` maps saved sequences of conversations to target sequences. The dict
    `kept` maps the saved sequence of each prefix to the tokens of the prefix; the least recently
    used prefix is the first item. The cache of the chat is donated.
    """
    latest = [*kept][-len(chat.store.sequences) :]
    places = dict(zip(latest, chat.store.sequences, strict=False))
    try:
        cache = snapshot.load(path, into=chat.cache, sequences=targets | places, donate=True)
    except jaxkv.PlanRefusedError:
        places = {}
        cache = snapshot.load(path, into=chat.cache, sequences=targets, donate=True)
    store = chat.store.with_prompts({seq: kept[saved_seq] for saved_seq, seq in places.items()})
    return replace(chat, cache=cache, store=store)


def kept_tokens(info: SnapshotInfo) -> dict[int, list[int]]:
    """Return the tokens of each stored prefix, by saved sequence.

    Raises:
      KeyError, TypeError, ValueError: If `info.notes` was not written by `save`.
    """
    kept = {sequence: info.tokens[sequence] for sequence in info.notes["kept"]}
    spoken = {entry["sequence"] for entry in info.notes["conversations"].values()}
    numbers = [number for tokens in kept.values() for number in tokens]
    if spoken & {*kept} or not _are_counts(numbers):
        raise ValueError("its stored prefixes are invalid")
    return kept


def conversations_in(info: SnapshotInfo) -> dict[str, Conversation]:
    """Return the conversations of a snapshot by name; an empty dict if the snapshot is not a chat.

    Raises:
      KeyError, TypeError, ValueError: If `info.notes` was not written by `save`.
    """
    if not isinstance(info.notes, dict) or info.notes.get("kind") != KIND:
        return {}
    found = info.notes["conversations"]
    return {
        name: _conversation(entry, info.tokens[entry["sequence"]]) for name, entry in found.items()
    }


def fingerprint_text(model: Any) -> str:
    """Return the `model_id` of a snapshot as a text."""
    if isinstance(model, dict):
        return " ".join(str(value) for value in model.values())
    return "an unnamed model" if model is None else str(model)


def _conversation_json(conversation: Conversation) -> dict[str, Any]:
    """Return a conversation as JSON values; its tokens are not included.

    `save` passes the tokens to `snapshot.save` as another argument.
    """
    found = asdict(conversation)
    del found["tokens"]
    return found


def _conversation(found: dict[str, Any], tokens: list[int]) -> Conversation:
    """Make a conversation from values in a file; raise a ValueError for invalid values."""
    turns = tuple(Turn(**turn) for turn in found["turns"])
    texts = [text for turn in turns for text in (turn.message, turn.answer)]
    if found["system"] is not None:
        texts.append(found["system"])
    frame = Frame(**found["frame"])
    places = [0, *(place for turn in turns for place in (turn.start, turn.asked)), len(tokens)]
    numbers = [*places, *tokens, frame.keep, frame.closing, found["gap"], found["sequence"]]
    if not (
        all(isinstance(text, str) for text in texts)
        and all(turn.finish in get_args(Finish) for turn in turns)
        and _are_counts(numbers)
        and places == sorted(places)
    ):
        raise ValueError("its conversations are invalid")
    return Conversation(
        sequence=found["sequence"],
        frame=frame,
        system=found["system"],
        tokens=tuple(tokens),
        turns=turns,
        gap=found["gap"],
    )


def _are_counts(numbers: Sequence[Any]) -> bool:
    """Return whether all numbers are integers in `[0, 2**31)`."""
    return all(type(number) is int and 0 <= number < 2**31 for number in numbers)
