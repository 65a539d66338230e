"""Every error loongd raises on purpose.

Knows: the sentence a person should read, and for requests the HTTP status and the OpenAI fields.
Does not know: HTTP, logging or exit codes; the rims (`rest.errors`, `__main__`) know those.
"""

from __future__ import annotations


class LoongError(Exception):
    """Base of all errors that carry a message for a person."""


class ConfigError(LoongError):
    """An option or a configuration file is wrong; the message names the key and the value."""


class BusyError(LoongError):
    """Another process has the port or the directory, or the address or name is not there (yet):
    another try may go well."""


class ModelError(LoongError):
    """The model cannot be served: unsupported, incomplete or broken; the message names what."""


class WorkerError(LoongError):
    """A worker process could not start, or died; the message is one readable line."""


class StepRefusedError(LoongError):
    """A step was not begun; all workers of all of its members raise this together, or none."""


class PlanError(LoongError):
    """A worker was handed a plan that contradicts what it holds (a bug, never a user's fault)."""


class RequestError(LoongError):
    """A request cannot be served; becomes the OpenAI error object.

    Args:
        message: one sentence that names the field and the numbers.
        status: HTTP status (400, 401, 404, 413, 429, 500, 503).
        param: the request field at fault, if one is.
        code: machine-readable code, such as `context_length_exceeded`.
        retry_after_s: seconds for `Retry-After`; None leaves the header out.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
