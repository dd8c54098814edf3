"""Conversion of vocabulary entries to bytes, for byte-level and SentencePiece vocabularies."""

import functools
import re

from tokenizers.pre_tokenizers import ByteLevel


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter of a byte-level vocabulary.

    The letter of a printable byte has the same code as the byte. The letters of other bytes have
    codes above 255, in the order of the bytes.
    """
    letters = sorted(ByteLevel.alphabet())
    codes = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = (byte for byte in range(256) if byte not in codes.values())
    return codes | {letter: next(others) for letter in letters if letter not in codes}


def from_letters(token: str) -> bytes:
    """Return the bytes of an entry in a byte-level vocabulary."""
    letters = _byte_letters()
    return b"".join(
        bytes((letters[letter],)) if letter in letters else letter.encode() for letter in token
    )


def from_pieces(token: str) -> bytes:
    """Return the bytes of a SentencePiece entry: "▁" is a space, and <0x0A> is a single byte."""
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes((int(token[3:5], 16),))
    return token.replace("▁", " ").encode()
