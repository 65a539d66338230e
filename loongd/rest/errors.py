"""From errors to OpenAI's error object.

Knows: the types and headers that belong to a status, and how aiohttp's and msgspec's errors read.
Does not know: what went wrong; `RequestError` already says it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from loongd.errors import RequestError
from loongd.rest.context import CONTEXT, REQUEST_ID, log

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable",
}

# msgspec ends its messages with the path, such as "- at `$.messages[0].role`".
_PATH = re.compile(r"(?P<what>.*) - at `(?P<key>key in )?\$\.(?P<param>[^`]+)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<param>[^`]+)`$")


def error_body(error: RequestError) -> dict[str, Any]:
    """The nested error object; clients in the middle of a stream understand no other shape."""
    kind = _TYPES.get(
        error.status, "server_error" if error.status >= 500 else "invalid_request_error"
    )
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }


def error_response(error: RequestError) -> web.Response:
    """The error as a response, with the headers that tell a client whether to try again."""
    response = json_response(error_body(error), status=error.status)
    if error.retry_after_s is not None:
        response.headers["Retry-After"] = str(error.retry_after_s)
    if error.code == "context_length_exceeded":
        response.headers["x-should-retry"] = "false"
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        # A load balancer should pick another server for the client's next request.
        response.force_close()
    return response


def json_response(body: object, *, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def from_validation(error: msgspec.DecodeError) -> RequestError:
    """A body that is not JSON, or whose field has the wrong type, as a 400 naming the field."""
    if not isinstance(error, msgspec.ValidationError):
        return RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json")
    text = str(error)
    if missing := _MISSING.match(text):
        param = missing["param"]
        return RequestError(f"{param} is missing from the request.", param=param)
    if found := _PATH.match(text):
        what = found["what"]
        return RequestError(
            f"{found['param']}: {what[:1].lower()}{what[1:]}.", param=found["param"]
        )
    return RequestError(f"The request body is wrong: {text}.")


def from_http(error: web.HTTPException, request: web.Request) -> RequestError:
    """What aiohttp itself refuses: unknown paths and methods, and bodies that are too large."""
    status = error.status
    match error:
        case web.HTTPNotFound():
            message = f"There is no {request.path} here."
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} does not take {request.method}, only {allowed}."
        case web.HTTPRequestEntityTooLarge():
            message = f"The request body is too large: {(error.text or '').rstrip('.')}."
        case _:
            message = error.reason
    return RequestError(message, status=status)


@web.middleware
async def errors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every foreseen error becomes an error object; others are aiohttp's 500, logged by it."""
    try:
        return await handler(request)
    except RequestError as error:
        return _refuse(request, error)
    except msgspec.DecodeError as error:
        return _refuse(request, from_validation(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = _refuse(request, from_http(error, request))
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _refuse(request: web.Request, error: RequestError) -> web.Response:
    """The error as a response, with a line in the log that tells it without the client's words."""
    log.debug("%s %.200s refused: %s", request.method, request.path, error.message)
    if request.app[CONTEXT].config.enable_log_requests:
        log.info(
            "%s %.200s refused with %d",
            request.method,
            request.path,
            error.status,
            extra={
                "code": error.code,
                "param": error.param,
                "request_id": request[REQUEST_ID],
            },
        )
    return error_response(error)
