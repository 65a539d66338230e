"""The admin API, served on the unix socket only; its file mode is its authentication.

Knows: that a response's id leads to the stories of its submissions, and how a client's own id
leads to the response's (`context.new_response_id`).
Does not know: what is in a status or a story; the engine says it.
"""

from __future__ import annotations

import re
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from loongd.errors import LoongError, RequestError
from loongd.profiling.profiler import ProfileRequest
from loongd.rest.context import CONTEXT, log
from loongd.rest.errors import json_response
from loongd.submission import Engine

_CHOICE = re.compile(r"(?<=[0-9a-f]{8})-\d{1,4}$")
"""What the id of a choice has after that of its response, which ends in hexadecimal digits."""
_MOST_NAMES = 4


async def status(request: web.Request) -> web.Response:
    """What the engine says of itself."""
    return json_response(request.app[CONTEXT].engine.status())


async def drain(request: web.Request) -> web.Response:
    """Refuse new requests from now on; running ones finish."""
    engine = request.app[CONTEXT].engine
    log.info("drain: new requests are refused")
    engine.drain()
    return json_response(_load(engine))


async def undrain(request: web.Request) -> web.Response:
    """Admit requests again. Raises RequestError when the daemon is on its way out."""
    context = request.app[CONTEXT]
    if context.is_ending():
        raise RequestError("the daemon is stopping: start it anew", status=409, code="shutdown")
    engine = context.engine
    log.info("undrain: new requests are admitted")
    engine.undrain()
    return json_response(_load(engine))


async def plan(request: web.Request) -> web.Response:
    """What would become of a prompt of `tokens` tokens and `max_tokens` more, if it came now.

    Raises RequestError for missing or wrong numbers, or when the engine makes no predictions.
    """
    numbers = {}
    for name, default in (("tokens", ""), ("max_tokens", "128")):
        text = request.query.get(name, default)
        if not text.isdecimal() or int(text) < 1:
            raise RequestError(f"{name} is {text!r}, not a whole number of at least 1", param=name)
        numbers[name] = int(text)
    found = request.app[CONTEXT].engine.plan(numbers["tokens"], numbers["max_tokens"])
    if found is None:
        raise RequestError("this server makes no predictions", status=404)
    return json_response(found)


async def profile(request: web.Request) -> web.StreamResponse:
    """Measure the workers (`ProfileRequest`); one JSON object a line as it goes.

    Raises RequestError (409) while requests are here, or msgspec.ValidationError.
    """
    profiler = request.app[CONTEXT].profiler
    if profiler is None:
        raise RequestError("There are no workers to profile.", status=404)
    asked = msgspec.json.decode(await request.read() or b"{}", type=ProfileRequest)
    async with aclosing(profiler.run(asked)) as words:
        # What cannot begin is an error with its own status, so the first word comes first.
        word: dict[str, Any] | None = await anext(words)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            while word is not None:
                await response.write(msgspec.json.encode(word) + b"\n")
                word = await anext(words, None)
        except LoongError as error:
            await response.write(msgspec.json.encode({"error": str(error)}) + b"\n")
        except ConnectionResetError:
            log.info("a profile was given up: its client has left")
            return response
    await response.write_eof()
    return response


async def story(request: web.Request) -> web.Response:
    """The life of a request, by the `id` of its response, the id of one of its choices, the
    client's own X-Request-Id, or a part of an id.

    Raises RequestError (404) for an unknown id, or a part that several have.
    """
    engine = request.app[CONTEXT].engine
    asked = request.match_info["request_id"]
    found = _tale(engine, asked) or _tale(engine, _meant(asked, *engine.story_ids()))
    if found is None:
        raise RequestError(f"No request {asked} is known here.", status=404)
    return json_response(found)


def _tale(engine: Engine, request_id: str) -> dict[str, Any] | None:
    found = engine.story(request_id)
    if found is not None:
        return found
    choices: list[dict[str, Any]] = []
    while (part := engine.story(f"{request_id}-{len(choices)}")) is not None:
        choices.append(part)
    return {"request_id": request_id, "choices": choices} if choices else None


def _meant(asked: str, ended: list[str], live: list[str]) -> str:
    """The id of the response that a client's own id leads to (the last one, when it used it more
    than once), or a part of an id that no other has; live requests come first. Else `asked`."""
    own = re.compile(rf"(?P<call>[a-z]+-{re.escape(asked)}(-[0-9a-f]{{8}})?)(-\d{{1,4}})?")
    for ids in (live, ended):
        if calls := [match["call"] for one in ids if (match := own.fullmatch(one))]:
            return calls[-1]
    for ids in (live, ended):
        alike = list(dict.fromkeys(_CHOICE.sub("", one) for one in ids if asked in one))
        if len(alike) > 1:
            names = f"{', '.join(alike[-_MOST_NAMES:])}{', ...' * (len(alike) > _MOST_NAMES)}"
            raise RequestError(
                f"{len(alike)} requests have {asked} in their id: {names}", status=404
            )
        if alike:
            return alike[0]
    return asked


def _load(engine: Engine) -> dict[str, Any]:
    queue = engine.status().get("queue", {})
    return {
        "draining": engine.draining,
        "running": queue.get("running", 0),
        "waiting": queue.get("waiting", 0),
    }
