"""The text of tokens from a tokenizer.json, as bytes: a token may be a part of a character."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import orjson

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Token id → bytes.

    Byte-level vocabularies (GPT-2's and all after it) and those of SentencePiece are read; of another kind the entry
    itself is its text.
    """

    def __init__(self, entries: Mapping[int, str], special: Mapping[int, str], is_byte_level: bool) -> None:
        self._entries, self._special, self._is_byte_level = entries, special, is_byte_level

    @classmethod
    def read(cls, path: Path) -> Vocabulary | None:
        """Read a tokenizer.json; None if it is missing or not a tokenizer's."""
        try:
            content = orjson.loads(path.read_bytes())
            model = content["model"]
            vocab = model["vocab"]
            pairs = vocab.items() if isinstance(vocab, dict) else ((entry[0], i) for i, entry in enumerate(vocab))
            entries = {int(number): str(text) for text, number in pairs}
            special = {int(entry["id"]): str(entry["content"]) for entry in content.get("added_tokens") or ()}
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return None  # a page with ids in place of text is better than none
        return cls(entries, special, b'"ByteLevel"' in orjson.dumps(content.get("decoder")))

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token; None for one that the vocabulary does not have."""
        if token in self._special:
            return self._special[token].encode("utf-8", "replace")
        entry = self._entries.get(token)
        if entry is None:
            return None
        if self._is_byte_level and all(char in BYTES for char in entry):
            return bytes(BYTES[char] for char in entry)
        if match := _BYTE.fullmatch(entry):
            return bytes([int(match[1], 16)])
        return entry.replace("▁", " ").encode("utf-8", "replace")

    def pieces(self, tokens: Iterable[int]) -> dict[int, str]:
        """The bytes of each of these tokens that the vocabulary has, a character a byte (latin-1)."""
        pairs = ((token, self.bytes_of(token)) for token in sorted(set(tokens)))
        return {token: piece.decode("latin-1") for token, piece in pairs if piece is not None}


def _byte_characters() -> dict[str, int]:
    """Character of a byte-level vocabulary → byte: printable ones map to themselves, others to 256, 257, …."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


BYTES = _byte_characters()
