"""GET /v1/models.

Knows: the model card. `max_model_len` is what the engine can really hold.
Does not know: the model's files; paths are not shown.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from loongd.rest.context import CONTEXT, RestContext
from loongd.rest.encode import check_model
from loongd.rest.errors import json_response


async def list_models(request: web.Request) -> web.Response:
    """The one model that is served."""
    return json_response({"object": "list", "data": [_card(request.app[CONTEXT])]})


async def get_model(request: web.Request) -> web.Response:
    """One model by name. Raises RequestError (404) for another name."""
    context = request.app[CONTEXT]
    check_model(context, request.match_info["model"])
    return json_response(_card(context))


def _card(context: RestContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "loongd",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.engine.max_model_len,
    }
