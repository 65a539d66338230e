"""Liveness, readiness, version, metrics.

Knows: that these are different questions. Alive: restart me if not. Ready: send me requests only
if so. Does not know: why the engine is what it is; /admin/status tells.
"""

from __future__ import annotations

from aiohttp import web

from loongd import __version__
from loongd.rest.context import CONTEXT
from loongd.rest.errors import json_response


async def live(request: web.Request) -> web.Response:
    """200 while the engine makes progress, or may still start; 503 once it has failed."""
    if request.app[CONTEXT].engine.alive:
        return json_response({"status": "ok"})
    return json_response({"status": "failed"}, status=503)


async def ready(request: web.Request) -> web.Response:
    """200 while new requests are admitted, else 503 that says why not."""
    engine = request.app[CONTEXT].engine
    if not engine.alive:
        return json_response({"status": "failed"}, status=503)
    if engine.draining:
        return json_response({"status": "draining"}, status=503)
    if not engine.ready:  # starting, or profiling
        return json_response({"status": engine.status()["node"]["state"]}, status=503)
    return json_response({"status": "ready"})


async def version(request: web.Request) -> web.Response:
    """The version of loongd."""
    return json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    """All metrics, for Prometheus."""
    body, content_type = request.app[CONTEXT].metrics.render()
    return web.Response(body=body, headers={"Content-Type": content_type})
