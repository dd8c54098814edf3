"""What bytes a vocabulary's entries stand for: two ways of writing bytes as text."""

import functools
import re

from tokenizers.pre_tokenizers import ByteLevel


@functools.cache
def _byte_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for.

    It is the letter's own where that can be printed, and otherwise the next of a row of letters
    beyond the 256 that a byte can hold.
    """
    letters = sorted(ByteLevel.alphabet())
    codes = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = (byte for byte in range(256) if byte not in codes.values())
    return codes | {letter: next(others) for letter in letters if letter not in codes}


def from_letters(token: str) -> bytes:
    """The bytes of an entry of a byte-level vocabulary."""
    letters = _byte_letters()
    return b"".join(
        bytes((letters[letter],)) if letter in letters else letter.encode() for letter in token
    )


def from_pieces(token: str) -> bytes:
    """The bytes of an entry of a SentencePiece vocabulary.

    A low bar stands for a space, and entries like <0x0A> for a single byte.
    """
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes((int(token[3:5], 16),))
    return token.replace("▁", " ").encode()
