"""Text from a stream of token ids.

Knows: which part of a UTF-8 character is still to come, and what the prompt ended with.
Does not know: stop strings, requests, how a token becomes bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from loongd.text.token_bytes import strip_start
from loongd.text.tokenizer import Tokenizer

# A character has at most four bytes, so at most three of them can wait for the rest.
MAX_PENDING_BYTES = 3


class IncrementalDetokenizer:
    """The text that generated ids add to a prompt, piece by piece.

    All pieces together are what decoding prompt and ids at once gives after the prompt's text.
    No piece ends in half a character. The cost of a push depends on the ids pushed alone.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._bytes = tokenizer.token_bytes_table
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_strip = self._bytes.strip_left
        tail = b""
        for token in reversed(prompt_ids):
            if len(tail) >= MAX_PENDING_BYTES:
                break
            tail = self._join((token,)) + tail
        if tail:
            # A character that the prompt only began is new text once it is complete.
            self._utf8.decode(tail)
            self._num_strip = 0

    def push(self, ids: Iterable[int]) -> str:
        """The text that is complete with `ids`; may be empty."""
        text = self._utf8.decode(self._join(ids))
        text, self._num_strip = strip_start(text, self._num_strip)
        return text

    def finish(self) -> str:
        """The rest: U+FFFD when the last character lacks bytes, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _join(self, ids: Iterable[int]) -> bytes:
        return self._bytes.join(ids, skip_special_tokens=self._skip_special_tokens)
