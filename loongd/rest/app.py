"""The two applications: the public API, and the admin API of the unix socket.

Knows: routes and the order of middlewares. Does not know: what handlers do, or sockets.
Run them with `AppRunner(app, handler_cancellation=True)`, so that a client that leaves frees its
slots at once.
"""

from __future__ import annotations

import re
import time
import uuid

from aiohttp import web
from aiohttp.typedefs import Middleware

from loongd.rest import admin, chat, completions, health, models, tokenize
from loongd.rest.auth import auth_middleware, load_keys
from loongd.rest.context import (
    ARRIVED_S,
    CONTEXT,
    IS_ROUGH_TTFT,
    PREDICTED_TTFT_S,
    REQUEST_ID,
    RestContext,
    log,
)
from loongd.rest.errors import Handler, errors_middleware

__all__ = ["RestContext", "make_admin_app", "make_app"]

# What may be echoed into headers, logs and ids.
_REQUEST_ID = re.compile(r"[\w.:=/+@-]{1,128}", re.ASCII)


def make_app(context: RestContext) -> web.Application:
    """The public API. Raises ConfigError when the file of API keys cannot be used."""
    app = _make_base(context, auth_middleware(load_keys(context.config)))
    app.add_routes(
        [
            web.post("/v1/completions", completions.completions),
            web.post("/v1/chat/completions", chat.chat_completions),
            web.get("/v1/models", models.list_models),
            web.get("/v1/models/{model:.+}", models.get_model),
            web.post("/tokenize", tokenize.tokenize),
            web.post("/detokenize", tokenize.detokenize),
            *_health_routes(),
        ]
    )
    return app


def make_admin_app(context: RestContext) -> web.Application:
    """The admin API; whoever can open the socket may use it."""
    app = _make_base(context)
    app.add_routes(
        [
            web.get("/admin/status", admin.status),
            web.post("/admin/drain", admin.drain),
            web.post("/admin/undrain", admin.undrain),
            web.post("/admin/profile", admin.profile),
            web.get("/admin/plan", admin.plan),
            web.get("/admin/story/{request_id:.+}", admin.story),
            *_health_routes(),
        ]
    )
    return app


def _health_routes() -> list[web.RouteDef]:
    return [
        *(web.get(path, health.live) for path in ("/health", "/healthz", "/livez", "/ping")),
        *(web.get(path, health.ready) for path in ("/ready", "/readyz")),
        web.get("/version", health.version),
        web.get("/metrics", health.metrics),
    ]


def _make_base(context: RestContext, *middlewares: Middleware) -> web.Application:
    app = web.Application(
        middlewares=[_identify, errors_middleware, *middlewares],
        client_max_size=context.config.max_body_bytes,
    )
    app[CONTEXT] = context
    app.on_response_prepare.append(_add_own_headers)
    return app


@web.middleware
async def _identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    if given and request[REQUEST_ID] != given:
        log.debug("x-request-id %.140r is replaced by %s", given, request[REQUEST_ID])
    request[ARRIVED_S] = time.monotonic()
    return await handler(request)


async def _add_own_headers(request: web.Request, response: web.StreamResponse) -> None:
    if REQUEST_ID in request:
        response.headers["x-request-id"] = request[REQUEST_ID]
    if PREDICTED_TTFT_S in request:
        predicted_ms = round(request[PREDICTED_TTFT_S] * 1e3)
        response.headers["x-loongd-predicted-ttft-ms"] = str(predicted_ms)
        if request[IS_ROUGH_TTFT]:
            response.headers["x-loongd-predicted-ttft-rough"] = "1"
