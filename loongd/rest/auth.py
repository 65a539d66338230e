"""API keys.

Knows: where keys come from, which paths need none, and how to compare without leaking the key.
Does not know: users or rights; a key is good for everything.
"""

from __future__ import annotations

import hmac
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Middleware

from loongd.config import Config
from loongd.errors import ConfigError, RequestError
from loongd.rest.errors import Handler

OPEN_PATHS = frozenset({"/health", "/healthz", "/livez", "/ready", "/readyz", "/ping", "/version"})


def load_keys(config: Config) -> tuple[bytes, ...]:
    """All keys of the options and of the file. Raises ConfigError when the file gives none."""
    keys = [key for key in config.api_key if key]
    if config.api_key_file is not None:
        try:
            lines = Path(config.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            what = f"api_key_file {config.api_key_file}: cannot be read"
            raise ConfigError(f"{what}: {why}") from error
        found = [key for line in lines if (key := line.partition("#")[0].strip())]
        if not found:
            raise ConfigError(f"api_key_file {config.api_key_file} holds no key")
        keys += found
    return tuple(key.encode() for key in keys)


def auth_middleware(keys: tuple[bytes, ...]) -> Middleware:
    """A middleware that raises RequestError (401) for a request without a good key."""

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        if keys and request.path not in OPEN_PATHS:
            scheme, _, key = request.headers.get("Authorization", "").partition(" ")
            given = key.strip().encode(errors="surrogateescape")
            # Every key is compared, so that time does not tell which one nearly fits.
            good = [hmac.compare_digest(given, known) for known in keys]
            if scheme.lower() != "bearer" or not any(good):
                raise RequestError(
                    "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                    status=401,
                    code="invalid_api_key",
                )
        return await handler(request)

    return check_key
