"""Cutting a long text where tokens cannot cross.

Knows: places that every pre-tokenizer of the GPT-2 and cl100k families cuts at, and how to check
that a given one does. Does not know: how text is encoded.

Why: `Encoding.ids` builds its list with the interpreter lock held, 80 ms for five megabytes;
encoding chunks keeps each such moment short, and uses several cores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import tokenizers

# Latin, Cyrillic, kana, Han and Hangul: letters in every version of Unicode.
_LETTER = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0400-\u0481\u048a-\u052f"
    "\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
# A letter ends the match before a space, and a newline never begins a match with a letter. Before
# the newline no space may stand: whether a run of spaces is split depends on what follows it.
CUT = re.compile(f"(?<=[{_LETTER}])(?= [{_LETTER}])|(?<=\\S\n)(?=[{_LETTER}])")

_PROBE_PARTS = (
    "word",
    "don't",
    "1",
    "12.",
    "!?",
    "\t",
    " ",
    "\u4e00",
    "\u00e9",
    "\r\n",
    "\n\n",
    "'s",
)


def chunks_of(text: str, chunk_chars: int) -> list[str]:
    """`text` in pieces of about `chunk_chars` characters, cut only where `CUT` allows it."""
    chunks = []
    start = 0
    while len(text) - start > chunk_chars:
        cut = CUT.search(text, start + chunk_chars)
        if cut is None:
            break
        chunks.append(text[start : cut.start()])
        start = cut.start()
    chunks.append(text[start:])
    return chunks


def can_cut(backend: tokenizers.Tokenizer, description: Mapping[str, Any]) -> bool:
    """Whether this tokenizer never joins what `CUT` separates.

    Args:
        backend: the tokenizer.
        description: its tokenizer.json.
    """
    normalizer = (description.get("normalizer") or {"type": "NFC"})["type"]
    if normalizer != "NFC" or backend.pre_tokenizer is None:
        return False
    if any(CUT.search(added["content"]) for added in description.get("added_tokens", ())):
        return False
    sides = [f"{left}{right}" for left in _PROBE_PARTS for right in _PROBE_PARTS]
    probe = "".join(f"{side}\nx {side} y" for side in sides)
    return _pieces(backend, chunks_of(probe, 1)) == _pieces(backend, [probe])


def _pieces(backend: tokenizers.Tokenizer, chunks: list[str]) -> list[str]:
    split = backend.pre_tokenizer.pre_tokenize_str
    return [piece for chunk in chunks for piece, _ in split(chunk)]
