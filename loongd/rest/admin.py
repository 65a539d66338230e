"""The admin API, served on the unix socket only; its file mode is its authentication.

Knows: that a response's id leads to the stories of its submissions. Does not know: what is in a
status or a story; the engine says it.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from loongd.errors import RequestError
from loongd.rest.context import CONTEXT
from loongd.rest.errors import json_response
from loongd.submission import Engine


async def status(request: web.Request) -> web.Response:
    """What the engine says of itself."""
    return json_response(request.app[CONTEXT].engine.status())


async def drain(request: web.Request) -> web.Response:
    """Refuse new requests from now on; running ones finish."""
    engine = request.app[CONTEXT].engine
    engine.drain()
    return json_response(_load(engine))


async def undrain(request: web.Request) -> web.Response:
    """Admit requests again."""
    engine = request.app[CONTEXT].engine
    engine.undrain()
    return json_response(_load(engine))


async def story(request: web.Request) -> web.Response:
    """The life of a request, by the `id` of its response or the id of one of its choices.

    Raises RequestError (404) for an unknown id.
    """
    engine = request.app[CONTEXT].engine
    request_id = request.match_info["request_id"]
    found = engine.story(request_id)
    if found is not None:
        return json_response(found)
    choices: list[dict[str, Any]] = []
    while (part := engine.story(f"{request_id}-{len(choices)}")) is not None:
        choices.append(part)
    if not choices:
        raise RequestError(f"No request {request_id} is known here.", status=404)
    return json_response({"request_id": request_id, "choices": choices})


def _load(engine: Engine) -> dict[str, Any]:
    queue = engine.status().get("queue", {})
    return {
        "draining": engine.draining,
        "running": queue.get("running", 0),
        "waiting": queue.get("waiting", 0),
    }
