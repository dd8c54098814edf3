"""Tokenizers of Hugging Face folders, from `tokenizer.json`."""

import json
from pathlib import Path
from threading import Lock
from typing import Any

import tokenizers

from models.errors import ModelError, brief
from models.json_file import read_json
from models.kinds import TOKEN, check, refusal
from models.text.token_bytes import from_letters, from_pieces
from models.text.tokenizer import Tokenizer


def tokenizer_from_folder(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer of a Hugging Face folder.

    The tokens that begin and end a sequence are read from `tokenizer_config.json`. If a
    token is missing in this file or in the vocabulary, its id is read from the argument `config`
    (`bos_token_id`, `eos_token_id`).
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{folder} has no tokenizer.json; write one with save_pretrained of a fast tokenizer."
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception
        raise ModelError(f"{path} cannot be read ({brief(error)}); download it again.") from error
    settings = read_json(folder / "tokenizer_config.json")

    def special(name: str) -> int | None:
        token = settings.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and inner.token_to_id(token) is not None:
            return inner.token_to_id(token)
        id = config.get(f"{name}_token_id")
        id = id[0] if isinstance(id, list) and id else id
        if id is not None:
            check(id, TOKEN, f"{name}_token_id", str(folder))
        return id

    bos = special("bos")
    # The tokenizer's post-processor decides whether a prompt begins with `bos`; a few folders have
    # only the setting.
    begins = bos is not None and inner.encode("").ids[:1] == [bos]
    return from_tokenizers(
        inner,
        source=str(path),
        bos=bos,
        eos=special("eos"),
        add_bos=begins or (bos is not None and bool(settings.get("add_bos_token"))),
        template=_template(folder, settings),
    )


def from_tokenizers(inner: tokenizers.Tokenizer, *, source: str, **fields: Any) -> Tokenizer:
    """Make a `Tokenizer` from a tokenizer of the package `tokenizers`.

    The argument `source` is a file name for messages. The arguments `fields` are fields of
    `Tokenizer` that cannot be read from `inner`, such as `bos`.
    """
    steps = _steps(inner.decoder)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        spelled = from_letters
    elif kinds & {"Metaspace", "ByteFallback", "Replace"}:
        spelled = from_pieces
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
        return b"" if token is None else spelled(token)

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


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    beside = folder / "chat_template.jinja"  # newer folders have a separate file
    if beside.is_file():
        return beside.read_text(encoding="utf-8", errors="replace")
    found = settings.get("chat_template")
    if isinstance(found, list):  # several, by name
        templates = (each for each in found if isinstance(each, dict))
        found = next(
            (each.get("template") for each in templates if each.get("name") == "default"), None
        )
    if found is not None and not isinstance(found, str):
        raise refusal(found, "a text, or a list of named texts", "chat_template", str(folder))
    return found
