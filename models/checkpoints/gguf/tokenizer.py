"""Tokenizers from GGUF metadata, with the pre-tokenization of llama.cpp."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from models.checkpoints.gguf.metadata import Metadata, token_id
from models.errors import ModelError, NoTokenizerError, first_line
from models.kinds import FLAG, TEXT, Kind, check, number, refusal, several, whole
from models.text.chat import render
from models.text.from_folder import from_tokenizers
from models.text.token_bytes import from_letters, from_pieces
from models.text.tokenizer import ENDS, Tokenizer

# Kinds of tokens in the file; SentencePiece has the same numbers.
_NORMAL, _UNKNOWN, _CONTROL, _USER = 1, 2, 3, 4
_TEXTS = several(TEXT, 2**24)

# Keys that are read, then keys of infilling, padding, classifiers and other tokenizers.
_KEYS = (
    "model pre tokens token_type scores merges add_bos_token add_space_prefix bos_token_id "
    "eos_token_id eot_token_id eom_token_id unknown_token_id seperator_token_id padding_token_id "
    "mask_token_id cls_token_id separator_token_id token_type_count "
    "precompiled_charsmap remove_extra_whitespaces fim_pre_token_id fim_suf_token_id "
    "fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id "
    "prefix_token_id suffix_token_id middle_token_id add_padding_token add_unknown_token "
    "eos_token_ids suppress_tokens"
)

_EITHER_CASE = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str, letters: str = r"\p{L}") -> list:
    """Return the pre-tokenizers of Qwen 2, Llama 3 and others.

    The argument `digits` is a regex for digits, and `letters` has the classes of letters.
    """
    words = f"{_BEFORE}[{letters}]+"
    signs = rf" ?[^\s{letters}\p{{N}}]+[\r\n]*"
    return _split(_EITHER_CASE, words, digits, signs, _SPACES)


def _o200k(ending: str = f"{_EITHER_CASE}?", digits: str = r"\p{N}{1,3}") -> list:
    """Return the pre-tokenizers of the vocabulary of GPT-4o and gpt-oss, and of similar ones.

    The arguments are regexes for the ending of a word and for digits.
    """
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = (f"{_BEFORE}{word}{ending}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*"))
    signs = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return _split(*words, digits, signs, _SPACES)


def _deepseek_v3() -> list:
    """Return the pre-tokenizers of DeepSeek V3: digits and signs of Chinese and Japanese first."""
    terms = r"[!-/:-@\[-`{-~][A-Za-z]+"
    words = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    signs = r" ?[\p{P}\p{S}]+[\r\n]*"
    last = "|".join((terms, words, signs, _SPACES))
    return _in_turn(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", last)


def _split(*patterns: str) -> list:
    """Return pre-tokenizers that split at any of the patterns."""
    return _in_turn("|".join(patterns))


def _in_turn(*patterns: str) -> list:
    """Return pre-tokenizers that split at the first pattern, then the parts at the second, etc."""
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in patterns]
    return [*splits, _letters(False)]


def _letters(split: bool) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that converts bytes to letters.

    If `split`, it first splits the text by the rules of GPT-2.
    """
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)


_LIKE_GPT_2 = ("gpt-2", "gpt2", "mpt", "olmo", "gigachat", "a.x-4.0", "mellum", "trillion")
_LIKE_GPT_2 += ("granite-docling",)
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon3", "falcon-h1", "pixtral")
_LLAMA_3 += ("midm-2.0",)
_WHOLE_WORDS = (*_LLAMA_3, "tekken")
"""Pre-tokenizers of vocabularies that begin a text with `bos`, and have words without merges."""
_CASED = (  # letters with two cases, without scripts that were added later
    r"\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C88}"
    r"\x{2D00}-\x{2D2D}\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}"
    r"\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF2A}]"
)
_EAST_ASIAN = r"[一-龥ࠀ-一가-\x{D7FF}]+"
_PRE_TOKENIZERS: dict[str, Callable[[], list]] = {
    # Of files without the key, and of vocabularies that converters do not know.
    "default": lambda: _in_turn(r"[\p{P}$+<=>^~|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(_LIKE_GPT_2, lambda: [_letters(True)]),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "minerva-7b"),
        lambda: [pre_tokenizers.Digits(individual_digits=True), _letters(True)],
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), lambda: _words(r"\p{N}")),
    "deepseek-llm": lambda: _in_turn(
        *(r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$"),
        *(_EAST_ASIAN, r"\p{N}+"),
    ),
    "deepseek-coder": lambda: _in_turn(
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"
    ),
    **dict.fromkeys(("deepseek-v3", "joyai-llm"), _deepseek_v3),
    "qwen35": lambda: _words(r"\p{N}", r"\p{L}\p{M}"),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _o200k),
    "tekken": lambda: _o200k("", r"\p{N}"),
    **dict.fromkeys((*_LLAMA_3, "dbrx", "smaug-bpe"), lambda: _words(r"\p{N}{1,3}")),
}


def tokenizer_from_gguf(get: Metadata, template: str | None) -> Tokenizer:
    """Build the tokenizer of a GGUF file from metadata and a chat template.

    Raises `ModelError` if a key, a value or the kind of tokenizer is not supported.
    """
    get.ignore(_KEYS)
    get.check_all_read({"add_eos_token": (False,), "add_sep_token": (False,)})
    kind = get("model")
    if kind == "none" or kind is get("tokens") is None:
        raise NoTokenizerError(f"{get.source} has no tokenizer; give another model.")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise ModelError(
            f"{get.source}: expected a tokenizer of kind 'gpt2' (byte-level), 'llama' "
            f"(SentencePiece) or 'gemma4', got {kind!r}; give another model."
        )
    tokens, pre = get.required("tokens", _TEXTS), get("pre", default="default")
    bos = _special_id(get, "bos", kind, len(tokens))
    adds_bos = kind == "llama" or pre in _WHOLE_WORDS
    adds_bos = get("add_bos_token", FLAG, adds_bos) or kind == "gemma4"
    fields = {
        "eos": _special_id(get, "eos", kind, len(tokens)),
        "prefix": (bos,) if bos is not None and adds_bos else (),
        "render": None
        if template is None
        else partial(render, template, **_token_variables(get, tokens, kind)),
    }
    types = _for_each_token(get, "token_type", whole(1, 6), _NORMAL, len(tokens))
    # In some files, such as those of fine-tuned models, the end of a turn is not a control token.
    rows = zip(tokens, types, strict=True)
    types = [_CONTROL if token in ENDS else kind_of_token for token, kind_of_token in rows]
    if kind == "llama":
        return _pieces(get, tokens, types, **fields)
    inner = _bpe(get, tokens, types, pre if kind == "gpt2" else None)
    # The library has one id for each text, but a text may be repeated.
    to_bytes = _bytes_of(tokens, types, from_letters if kind == "gpt2" else from_pieces)
    plain = from_tokenizers(inner, source=get.source, **fields)
    return replace(plain, to_bytes=to_bytes, size=len(tokens))


def _special_id(get: Metadata, name: str, kind: str, count: int) -> int | None:
    # llama.cpp has default ids for SentencePiece vocabularies alone.
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if kind == "llama" else {}
    return token_id(get, f"{name}_token_id", defaults.get(name), count)


def _token_variables(get: Metadata, tokens: list[str], kind: str) -> dict[str, str]:
    """Return the variables of a chat template that contain tokens, such as `bos_token`."""
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad"}
    ids = {name: _special_id(get, key, kind, len(tokens)) for key, name in names.items()}
    return {f"{name}_token": tokens[id] for name, id in ids.items() if id in range(len(tokens))}


def _for_each_token(get: Metadata, name: str, kind: Kind, default: Any, count: int) -> list:
    """Return a metadata list with one value for each token.

    If the list is absent or empty, the value of every token is `default`.
    """
    values = get(name) or [default] * count
    check(values, several(kind, count), get.prefix + name, get.source)
    if len(values) != count:
        raise refusal(len(values), f"one value for each of {count} tokens", name, get.source)
    return values


def _bpe(get: Metadata, tokens: list[str], types: list[int], pre: Any) -> Inner:
    """Build a tokenizer that merges pairs of tokens.

    The argument `pre` is the name of a pre-tokenizer of bytes. If it is None, characters are
    merged, across words, and a character that is no token is divided into bytes.
    """
    if pre is not None and (not isinstance(pre, str) or pre not in _PRE_TOKENIZERS):
        raise ModelError(
            f"{get.source}: expected a pre-tokenizer of {', '.join(_PRE_TOKENIZERS)}, got {pre!r}; "
            "give another model."
        )
    vocabulary = {token: id for id, token in enumerate(tokens)}
    merges = get("merges") and get("merges", _TEXTS)  # an empty list is allowed
    pairs = [tuple(merge.split(" ", 1)) for merge in merges or ()]
    options = {"ignore_merges": pre in _WHOLE_WORDS, "byte_fallback": pre is None}
    try:
        inner = Inner(models.BPE(vocabulary, pairs, **options))
    except Exception as error:  # the library raises Exception, or TypeError for half a pair
        raise ModelError(
            f"{get.source} has merges that do not match its tokens ({first_line(error)}); download "
            "it again."
        ) from error
    if pre is None:
        inner.normalizer = normalizers.Replace(" ", "▁")
        inner.decoder = decoders.Replace("▁", " ")
    else:
        inner.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre]())
        inner.decoder = decoders.ByteLevel()
    rows = list(zip(tokens, types, strict=True))
    inner.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, t in rows if t == _CONTROL]
    )
    inner.add_tokens([AddedToken(token, normalized=False) for token, t in rows if t == _USER])
    return inner


def _bytes_of(
    tokens: list[str], types: list[int], spelled: Callable[[str], bytes]
) -> Callable[[int], bytes]:
    """Return the function that returns the bytes of a token id."""

    def to_bytes(id: int) -> bytes:
        if not 0 <= id < len(tokens):
            return b""
        plain = types[id] in (_CONTROL, _USER)
        return (str.encode if plain else spelled)(tokens[id])

    return to_bytes


def _pieces(get: Metadata, tokens: list[str], types: list[int], **fields: Any) -> Tokenizer:
    """Build a SentencePiece tokenizer from a model proto."""
    from sentencepiece import SentencePieceProcessor
    from sentencepiece.sentencepiece_model_pb2 import ModelProto

    scores = _for_each_token(get, "scores", number(-1e30, 1e30), 0.0, len(tokens))
    unknown = _special_id(get, "unknown", "llama", len(tokens))
    space_first = get("add_space_prefix", FLAG, True)
    proto = ModelProto()
    for id, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True)):
        # User-defined tokens have spaces in the file, which are "▁" in normalised text.
        piece = token.replace(" ", "▁") if kind == _USER else token
        piece = piece or f"[EMPTY_{id}]"  # the library accepts no empty piece
        kind = _UNKNOWN if id == unknown else _CONTROL if kind == _UNKNOWN else kind
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.unk_id = unknown
    proto.trainer_spec.byte_fallback = True
    rules = proto.normalizer_spec
    rules.name = "identity"
    rules.add_dummy_prefix = space_first
    rules.remove_extra_whitespaces = False
    try:
        processor = SentencePieceProcessor(model_proto=proto.SerializeToString())
    except Exception as error:  # the library raises RuntimeError for invalid vocabularies
        raise ModelError(
            f"{get.source} has an invalid SentencePiece vocabulary ({first_line(error)}); download "
            "it again."
        ) from error

    control = {token: id for id, token in enumerate(tokens) if types[id] in (_CONTROL, _UNKNOWN)}
    longest_first = sorted(control, key=len, reverse=True)
    names = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if control else None

    def to_ids(text: str, special: bool) -> list[int]:
        # The library does not parse control tokens, so the text is split at them.
        cut = names.split(text) if special and names else [text]
        ids: list[int] = []
        for at, part in enumerate(cut):
            ids += [control[part]] if at % 2 else processor.encode(part) if part else []
        return ids

    return Tokenizer(
        to_ids=to_ids,
        to_bytes=_bytes_of(tokens, types, from_pieces),
        size=len(tokens),
        control=control,
        space_first=space_first,
        **fields,
    )
