"""From token ids to bytes.

Knows: the decoders of tokenizer.json that llama-family models use (byte-level BPE; SentencePiece
with byte fallback; Metaspace), as a table from id to bytes plus one rule for the start of a text.
Does not know: streams, requests.

Text is the concatenated bytes read as UTF-8. This differs from `tokenizers` in one place: when a
run of byte-fallback tokens is not valid UTF-8, `tokenizers` replaces the whole run by U+FFFD,
which no stream could do without holding the run back; here its valid characters survive.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

from loongd.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, reversed (`bytes_to_unicode` of openai/gpt-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


BYTE_OF_CHAR: Mapping[str, int] = _byte_of_char()


class TokenBytes:
    """The bytes of each token, computed when first asked for.

    Attributes:
        num_tokens: largest id plus one; ids outside are no tokens and give no bytes.
        strip_left: how many leading spaces the start of a text loses.
    """

    def __init__(self, backend: tokenizers.Tokenizer, decoder: Mapping[str, Any] | None) -> None:
        """`decoder` is the entry of tokenizer.json; ModelError when it is not supported."""
        self.num_tokens = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.strip_left = 0
        self._backend = backend
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._table: list[bytes | None] = [None] * self.num_tokens
        self._specials = frozenset(
            index for index, added in backend.get_added_tokens_decoder().items() if added.special
        )
        steps = [decoder or {}]
        if steps[0].get("type") == "Sequence":
            steps = list(steps[0]["decoders"])
        for position, step in enumerate(steps):
            fused = any(earlier.get("type") == "Fuse" for earlier in steps[:position])
            self._add_step(step, fused)

    def _add_step(self, step: Mapping[str, Any], fused: bool) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                self._replacements.append((pattern, content))
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                self.strip_left = start
            case {"type": "Metaspace", "replacement": str(pattern)}:
                self._replacements.append((pattern, " "))
                self.strip_left = int(step.get("prepend_scheme", "always") != "never")
            case _:
                raise ModelError(
                    f"the decoder {step.get('type', 'null')} in tokenizer.json is not supported"
                )

    def of(self, token: int) -> bytes:
        """The bytes of one token, specials included; empty for an id that is no token."""
        if not 0 <= token < self.num_tokens:
            return b""
        data = self._table[token]
        if data is None:
            data = self._table[token] = self._compute(token)
        return data

    def join(self, tokens: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """The bytes of all `tokens`, before anything is stripped."""
        hidden = self._specials if skip_special_tokens else frozenset()
        return b"".join(self.of(token) for token in tokens if token not in hidden)

    def _compute(self, token: int) -> bytes:
        text: str | None = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self._byte_level:
            codes = [BYTE_OF_CHAR.get(char) for char in text]
            known = [code for code in codes if code is not None]
            # A token with any other character was added as plain text.
            return bytes(known) if len(known) == len(codes) else text.encode()
        for pattern, content in self._replacements:
            text = text.replace(pattern, content)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(match[1], 16)])
        return text.encode()


def strip_start(text: str, num_spaces: int) -> tuple[str, int]:
    """Drop up to `num_spaces` leading spaces; return the text and how many may still follow."""
    if not text or not num_spaces:
        return text, num_spaces
    kept = text.lstrip(" ")
    num_dropped = min(len(text) - len(kept), num_spaces)
    return text[num_dropped:], 0 if kept else num_spaces - num_dropped
