"""One choice of an answer: from the engine's tokens to pieces of text.

Knows: incremental decoding, stop strings, what counts as usage. Does not know: HTTP, the shape of
chunks, the other choices.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from loongd.submission import Token, TokenStream
from loongd.text.detokenizer import IncrementalDetokenizer
from loongd.text.stops import StopMatcher
from loongd.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How tokens become text, the same for all choices of a request."""

    stops: tuple[str, ...] = ()
    client_stop_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: the text of `tokens`, and at the end why it ended.

    `stop_reason` is the stop string or the client's stop token id, None for end-of-sequence.
    `stop_token` is the token that ended the answer, counted but without text.
    """

    text: str
    tokens: list[Token]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stop_token: int | None = None

    @property
    def token_ids(self) -> list[int]:
        """Ids of all tokens of this piece, the stop token included."""
        ids = [token.id for token in self.tokens]
        return ids if self.stop_token is None else [*ids, self.stop_token]


class Answer:
    """Reads one token stream; `next` gives its pieces until one has a finish reason."""

    def __init__(
        self,
        stream: TokenStream,
        *,
        prompt: array[int],
        tokenizer: Tokenizer | None,
        options: TextOptions,
    ) -> None:
        self.stream = stream
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = 0
        self.finished = False
        self._options = options
        self._decoder = (
            None
            if tokenizer is None
            else IncrementalDetokenizer(
                tokenizer,
                prompt_ids=prompt,
                skip_special_tokens=options.skip_special_tokens,
            )
        )
        self._matcher = StopMatcher(options.stops, include_stop=options.include_stop)
        self._held: list[Token] = []

    async def next(self) -> Delta:
        """The next piece: text, or the end. Tokens whose text is held back come with later text.

        Safe to cancel while it waits: nothing is lost. Raises RequestError when the engine gives
        the request up.
        """
        while True:
            first = await anext(self.stream, None)
            if first is None:
                return self._end()
            delta = self._take([first, *self.stream.drain_ready()])
            if delta is not None:
                return delta

    def _take(self, tokens: list[Token]) -> Delta | None:
        pieces: list[str] = []
        for token in tokens:
            self._held.append(token)
            self.num_tokens += 1
            if self._decoder is None:
                continue
            text, stop = self._matcher.push(self._decoder.push([token.id]))
            pieces.append(text)
            if stop is not None:
                self.stream.cancel("stop")
                return self._finish("".join(pieces), "stop", stop_reason=stop)
        text = "".join(pieces)
        if not text and self._decoder is not None:
            return None
        return Delta(text, self._release())

    def _end(self) -> Delta:
        stop_token = self.stream.stop_token
        reason = self.stream.finish_reason
        text, stop = "", None
        if self._decoder is not None:
            last = [] if stop_token is None or not self._options.include_stop else [stop_token]
            tail = self._decoder.push(last) + self._decoder.finish()
            text, stop = self._matcher.push(tail)
            text += self._matcher.finish() if stop is None else ""
        if stop_token is not None:
            self.num_tokens += 1
        client_stop = stop_token if stop_token in self._options.client_stop_ids else None
        return self._finish(
            text,
            "stop" if stop is not None else reason if reason in ("stop", "length") else "error",
            stop_reason=client_stop if stop is None else stop,
            stop_token=stop_token,
        )

    def _finish(
        self,
        text: str,
        finish_reason: str,
        *,
        stop_reason: str | int | None,
        stop_token: int | None = None,
    ) -> Delta:
        self.finished = True
        return Delta(text, self._release(), finish_reason, stop_reason, stop_token)

    def _release(self) -> list[Token]:
        tokens, self._held = self._held, []
        return tokens
