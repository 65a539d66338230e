"""Server-sent events: a race of answers written to one client.

Knows: the frames, the headers, keep-alive comments, errors in mid-stream. Headers are sent with
the first piece or the first comment, whichever comes first, so that what fails early still gets
its proper status.
Does not know: the JSON inside the frames; the `Chunks` of an endpoint make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from loongd.errors import RequestError
from loongd.rest.context import log
from loongd.rest.errors import error_body
from loongd.rest.stream.answer import Delta
from loongd.rest.stream.race import Race

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx would otherwise collect the whole answer before passing it on.
    "X-Accel-Buffering": "no",
}

_encoder = msgspec.json.Encoder()


class Chunks(Protocol):
    """Makes the chunks of one endpoint."""

    def opening(self) -> Sequence[dict[str, Any]]:
        """Chunks before the first piece."""

    def piece(self, index: int, delta: Delta) -> Sequence[dict[str, Any]]:
        """Chunks for one piece of choice `index`."""

    def closing(self) -> Sequence[dict[str, Any]]:
        """Chunks after the last piece."""


async def stream_answer(
    request: web.Request, race: Race, chunks: Chunks, *, keep_alive_s: float
) -> web.StreamResponse:
    """Write the race to the client until it ends or the client goes away.

    Args:
        keep_alive_s: seconds of silence before a comment; 0 writes none.

    Raises RequestError when a request fails before any byte was written.
    """
    silence_s = keep_alive_s or None
    first = await race.next(silence_s)
    response = web.StreamResponse(headers=HEADERS)
    try:
        await response.prepare(request)
        try:
            await _write_pieces(response, race, chunks, first, silence_s)
        except RequestError as error:
            log.info("%s failed in mid-stream: %s", request.path, error.message)
            await response.write(_frame([error_body(error)]))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionResetError:
        log.debug("%s: the client went away", request.path)
    return response


async def _write_pieces(
    response: web.StreamResponse,
    race: Race,
    chunks: Chunks,
    found: tuple[int, Delta] | None,
    silence_s: float | None,
) -> None:
    started = False
    while True:
        if found is None:
            await response.write(b": keep-alive\n\n")
        else:
            before = () if started else chunks.opening()
            started = True
            await response.write(_frame([*before, *chunks.piece(*found)]))
        if race.finished:
            break
        found = await race.next(silence_s)
    await response.write(_frame(chunks.closing()))


def _frame(chunks: Sequence[dict[str, Any]]) -> bytes:
    return b"".join(b"data: %b\n\n" % _encoder.encode(chunk) for chunk in chunks)
