"""Tokenizers of Hugging Face folders, and of the package `tokenizers`."""

import json
from functools import partial
from threading import Lock
from typing import Any

import tokenizers

from models.errors import ModelError
from models.text.token_bytes import from_letters, from_pieces
from models.text.tokenizer import Tokenizer


def tokenizer_from_folder(loaded: Any, source: str) -> Tokenizer:
    """Convert a tokenizer of `transformers`.

    Args:
      loaded: fast tokenizer, which has a tokenizer of the package `tokenizers`.
      source: folder, for messages.

    Raises:
      ModelError: If the tokenizer is of another kind.
    """
    if not loaded.is_fast:
        raise ModelError(
            f"{source}: expected a tokenizer that has a tokenizer.json, got "
            f"{type(loaded).__name__}; write one with save_pretrained of a fast tokenizer."
        )
    inner = loaded.backend_tokenizer
    inner.no_truncation()  # the file may have the settings of the training
    inner.no_padding()
    render = partial(loaded.apply_chat_template, tokenize=False, add_generation_prompt=True)
    ids, plain = (inner.encode("a", add_special_tokens=adds).ids for adds in (True, False))
    count = next(i for i in range(len(ids) + 1) if ids[i : i + len(plain)] == plain)
    return from_tokenizers(
        inner,
        source=f"{source}/tokenizer.json",
        eos=loaded.eos_token_id,
        prefix=tuple(ids[:count]),
        suffix=tuple(ids[count + len(plain) :]),
        render=render if loaded.chat_template else None,
    )


def from_tokenizers(inner: tokenizers.Tokenizer, *, source: str, **fields: Any) -> Tokenizer:
    """Make a `Tokenizer` from a tokenizer of the package `tokenizers`.

    The argument `source` is a file name for messages. The arguments `fields` are fields of
    `Tokenizer` that cannot be read from `inner`, such as `eos`.
    """
    steps = _steps(inner.decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        bytes_of_token = from_letters
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        bytes_of_token = from_pieces
    else:
        raise ModelError(
            f"{source}: expected a byte-level or SentencePiece decoder, got "
            f"{', '.join(sorted(kinds)) or 'none'}; give another model."
        )
    added = inner.get_added_tokens_decoder()
    lock = Lock()

    def to_ids(text: str, special: bool) -> list[int]:
        with lock:  # the choice is a mutable attribute of the tokenizer
            inner.encode_special_tokens = not special
            return inner.encode(text, add_special_tokens=False).ids

    def to_bytes(id: int) -> bytes:
        if id in added:
            return added[id].content.encode()
        token = inner.id_to_token(id) if id >= 0 else None
        return b"" if token is None else bytes_of_token(token)

    return Tokenizer(
        to_ids=to_ids,
        to_bytes=to_bytes,
        size=inner.get_vocab_size(),
        control={token.content: id for id, token in added.items() if token.special},
        space_first=any(_drops_space(step) for step in steps),
        **fields,
    )


def _steps(decoder: Any) -> list[dict[str, Any]]:
    """Return the steps of a decoder, in the form of `tokenizer.json`."""
    if decoder is None:
        return []
    step = json.loads(decoder.__getstate__())
    return step["decoders"] if step["type"] == "Sequence" else [step]


def _drops_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme") != "never"
    return step["type"] == "Strip" and step.get("start", 0) > 0
