"""POST /v1/completions.

Knows: the JSON of completions and their chunks, and echo. Does not know: how tokens are made.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from loongd.rest import shapes
from loongd.rest.context import SYSTEM_FINGERPRINT, RestContext
from loongd.rest.generate import generate
from loongd.rest.prepare import Call, prepare_completion
from loongd.rest.protocol import CompletionBody
from loongd.rest.stream.answer import Answer, Delta
from loongd.submission import Token


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts, whole or as a stream."""
    return await generate(
        request,
        prefix="cmpl",
        body_type=CompletionBody,
        prepare=prepare_completion,
        shape=CompletionShape,
    )


class CompletionShape:
    """Builds the answers of one call; choices are numbered prompt by prompt."""

    def __init__(self, context: RestContext, call: Call, answers: list[Answer]) -> None:
        self._tokenizer = context.tokenizer
        self._call = call
        self._answers = answers
        self._sent_prompt = [False] * len(answers)
        self._offsets = [0] * len(answers)

    def whole(self, deltas: list[list[Delta]]) -> dict[str, Any]:
        """The answer of a call without stream."""
        body = self._envelope()
        body["choices"] = [self._whole_choice(i, pieces) for i, pieces in enumerate(deltas)]
        body["usage"] = self._usage()
        return body

    def opening(self) -> list[dict[str, Any]]:
        """Completions begin with their text."""
        return []

    def piece(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """One chunk; the last of a choice has its finish reason."""
        chunk = self._envelope()
        chunk["choices"] = [self._choice(index, delta.text, delta.tokens, delta)]
        if self._call.return_token_ids:
            chunk["choices"][0]["token_ids"] = delta.token_ids
        if self._call.include_usage:
            chunk["usage"] = self._usage() if self._call.continuous_usage else None
        return [chunk]

    def closing(self) -> list[dict[str, Any]]:
        """The chunk with usage, if the client asked for it."""
        if not self._call.include_usage:
            return []
        return [{**self._envelope(), "choices": [], "usage": self._usage()}]

    def _whole_choice(self, index: int, pieces: list[Delta]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.tokens]
        choice = self._choice(index, text, tokens, pieces[-1])
        if self._call.return_token_ids:
            choice["token_ids"] = [i for piece in pieces for i in piece.token_ids]
        return choice

    def _choice(self, index: int, text: str, tokens: list[Token], last: Delta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": self._logprobs(index, tokens),
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        if not self._sent_prompt[index]:
            self._sent_prompt[index] = True
            prompt = index // self._call.n
            if self._call.echo is not None:
                choice["text"] = self._call.echo[prompt] + text
            if self._call.return_token_ids:
                choice["prompt_token_ids"] = self._call.prompts[prompt].tolist()
        return choice

    def _logprobs(self, index: int, tokens: list[Token]) -> dict[str, Any] | None:
        top = self._call.num_logprobs
        if top is None:
            return None
        offset = self._offsets[index]
        found = shapes.completion_logprobs(self._tokenizer, tokens, top, offset=offset)
        self._offsets[index] += sum(map(len, found["tokens"]))
        return found

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._call.response_id,
            "object": "text_completion",
            "created": self._call.created,
            "model": self._call.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def _usage(self) -> dict[str, Any]:
        return shapes.usage(self._call.num_prompt_tokens, self._answers)
