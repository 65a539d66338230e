"""POST /v1/chat/completions.

Knows: the JSON of chat completions and their chunks. Does not know: how tokens are made.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from loongd.rest import shapes
from loongd.rest.context import SYSTEM_FINGERPRINT, RestContext
from loongd.rest.generate import generate
from loongd.rest.prepare import Call, prepare_chat
from loongd.rest.protocol import ChatBody
from loongd.rest.stream.answer import Answer, Delta
from loongd.submission import Token


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """The next message of a conversation, whole or as a stream."""
    return await generate(
        request, prefix="chatcmpl", body_type=ChatBody, prepare=prepare_chat, shape=ChatShape
    )


class ChatShape:
    """Builds the answers of one call."""

    def __init__(self, context: RestContext, call: Call, answers: list[Answer]) -> None:
        self._tokenizer = context.tokenizer
        self._call = call
        self._answers = answers

    def whole(self, deltas: list[list[Delta]]) -> dict[str, Any]:
        """The answer of a call without stream."""
        body = self._envelope("chat.completion")
        body["choices"] = [self._choice(i, pieces) for i, pieces in enumerate(deltas)]
        body["usage"] = self._usage()
        if self._call.return_token_ids:
            body["prompt_token_ids"] = self._call.prompts[0].tolist()
        return body

    def opening(self) -> list[dict[str, Any]]:
        """One chunk for each choice that names the role."""
        chunks = [
            self._chunk(index, {"role": "assistant", "content": ""})
            for index in range(len(self._answers))
        ]
        if self._call.return_token_ids:
            chunks[0]["prompt_token_ids"] = self._call.prompts[0].tolist()
        return chunks

    def piece(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """A chunk of text, and a chunk of its own for the end."""
        chunks: list[dict[str, Any]] = []
        if delta.text or delta.tokens:
            chunk = self._chunk(index, {"content": delta.text}, tokens=delta.tokens)
            if self._call.return_token_ids:
                chunk["choices"][0]["token_ids"] = [token.id for token in delta.tokens]
            chunks.append(chunk)
        if delta.finish_reason is not None:
            chunk = self._chunk(index, {})
            choice = chunk["choices"][0]
            choice["finish_reason"] = delta.finish_reason
            choice["stop_reason"] = delta.stop_reason
            if self._call.return_token_ids:
                choice["token_ids"] = [] if delta.stop_token is None else [delta.stop_token]
            chunks.append(chunk)
        return chunks

    def closing(self) -> list[dict[str, Any]]:
        """The chunk with usage, if the client asked for it."""
        if not self._call.include_usage:
            return []
        return [{**self._envelope("chat.completion.chunk"), "choices": [], "usage": self._usage()}]

    def _choice(self, index: int, pieces: list[Delta]) -> dict[str, Any]:
        tokens = [token for piece in pieces for token in piece.tokens]
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(piece.text for piece in pieces),
                "refusal": None,
            },
            "logprobs": self._logprobs(tokens),
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
        }
        if self._call.return_token_ids:
            choice["token_ids"] = [i for piece in pieces for i in piece.token_ids]
        return choice

    def _chunk(
        self, index: int, delta: dict[str, Any], *, tokens: list[Token] | None = None
    ) -> dict[str, Any]:
        chunk = self._envelope("chat.completion.chunk")
        chunk["choices"] = [
            {
                "index": index,
                "delta": delta,
                "logprobs": self._logprobs(tokens) if tokens else None,
                "finish_reason": None,
            }
        ]
        if self._call.include_usage:
            chunk["usage"] = self._usage() if self._call.continuous_usage else None
        return chunk

    def _logprobs(self, tokens: list[Token]) -> dict[str, Any] | None:
        if self._call.num_logprobs is None:
            return None
        return shapes.chat_logprobs(self._tokenizer, tokens, self._call.num_logprobs)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._call.response_id,
            "object": kind,
            "created": self._call.created,
            "model": self._call.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def _usage(self) -> dict[str, Any]:
        return shapes.usage(self._call.num_prompt_tokens, self._answers)
