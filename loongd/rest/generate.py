"""The course of every generating request: decode, prepare, submit, answer.

Knows: that whatever ends the handler (an error, a client that leaves) must free the submissions,
and that what is refused is counted, here alone.
Does not know: the shape of answers; completions and chat give it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from loongd.errors import RequestError
from loongd.rest.context import (
    ARRIVED_S,
    CONTEXT,
    IS_ROUGH_TTFT,
    PREDICTED_TTFT_S,
    RestContext,
    new_response_id,
)
from loongd.rest.errors import json_response
from loongd.rest.prepare import Call, submit
from loongd.rest.protocol import GenerationBody, decode
from loongd.rest.stream.answer import Answer, Delta
from loongd.rest.stream.race import Race
from loongd.rest.stream.sse import Chunks, stream_answer

Body = TypeVar("Body", bound=GenerationBody)


class Shape(Chunks, Protocol):
    """An endpoint's answers, in chunks or whole."""

    def whole(self, deltas: list[list[Delta]]) -> dict[str, Any]:
        """The answer of a call without stream, from the pieces of each choice."""


async def generate(
    request: web.Request,
    *,
    prefix: str,
    body_type: type[Body],
    prepare: Callable[[RestContext, Body, str], Awaitable[Call]],
    shape: Callable[[RestContext, Call, list[Answer]], Shape],
) -> web.StreamResponse:
    """Serve one request. Raises RequestError or msgspec.DecodeError before the first byte."""
    context = request.app[CONTEXT]
    response_id = new_response_id(prefix, request)
    data = await request.read()
    try:
        body = decode(data, body_type)
        call = await prepare(context, body, response_id)
        answers = await submit(context, call)
    except msgspec.DecodeError:
        context.metrics.request_rejected("invalid_request")
        raise
    except RequestError as error:
        context.metrics.request_rejected(error.code or "invalid_request")
        raise
    timings = [answer.stream.timings for answer in answers]
    if known := [
        (t.predicted_ttft_s, t.is_rough_ttft) for t in timings if t.predicted_ttft_s is not None
    ]:
        # The call's first token is its first choice's.
        request[PREDICTED_TTFT_S], request[IS_ROUGH_TTFT] = min(known)
    async with Race(answers) as race:
        shaped = shape(context, call, answers)
        if body.stream:
            keep_alive_s = context.config.sse_keep_alive_interval
            return await stream_answer(request, race, shaped, keep_alive_s=keep_alive_s)
        deltas = await _collect(race)
        response = json_response(shaped.whole(deltas))
    elapsed_ms = round((time.monotonic() - request[ARRIVED_S]) * 1000)
    response.headers["openai-processing-ms"] = str(elapsed_ms)
    return response


async def _collect(race: Race) -> list[list[Delta]]:
    deltas: list[list[Delta]] = [[] for _ in race.answers]
    while not race.finished:
        found = await race.next()
        if found is not None:
            index, delta = found
            deltas[index].append(delta)
    return deltas
