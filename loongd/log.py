"""Log lines: a sentence with its fields, as text for people or JSON for machines.

Knows: the two formats, and the habits of the journal. Fields come through `extra`:
`log.info("prompt done", extra={"request_id": "cmpl-1", "dop": 2})`.
Does not know: what is worth a line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

# Whatever a record has beyond these came through `extra`.
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

# Priorities of syslog(3), which the journal reads from the start of a line.
_PRIORITIES = {"DEBUG": 7, "INFO": 6, "WARNING": 4, "ERROR": 3, "CRITICAL": 2}


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The fields handed over through `extra`, in their order, without those that are None."""
    return {
        name: value
        for name, value in vars(record).items()
        if name not in _OF_EVERY_RECORD and value is not None
    }


class TextFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO loongd.pool: worker is ready instance=0 pid=42`.

    For the journal, which has its own clock: `<6>loongd.pool: worker is ready instance=0 pid=42`.
    Line breaks in a message are escaped, so that a client cannot forge a log line; the lines of a
    traceback follow as they are.
    """

    def __init__(self, *, journal: bool) -> None:
        super().__init__()
        self._journal = journal

    def format(self, record: logging.LogRecord) -> str:
        if self._journal:
            head = f"<{_PRIORITIES.get(record.levelname, 6)}>"
        else:
            head = f"{_timestamp(record)} {record.levelname} "
        fields = "".join(f" {k}={_quoted(v)}" for k, v in fields_of(record).items())
        line = f"{head}{record.name}: {_one_line(record.getMessage())}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _timestamp(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def setup(
    level: Literal["debug", "info", "warning", "error"],
    style: Literal["text", "json"],
    *,
    env: Mapping[str, str],
    stream: TextIO = sys.stderr,
) -> None:
    """Send every record of the process to `stream`, which replaces what was set up before."""
    handler = logging.StreamHandler(stream)
    journal = is_journal(env, stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter(journal=journal))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def is_journal(env: Mapping[str, str], stream: TextIO) -> bool:
    """Whether `stream` itself leads to the journal.

    `JOURNAL_STREAM` alone does not say so: a child inherits it also when its output goes
    elsewhere. It names the device and inode of the journal's stream (systemd.exec(5)).
    """
    expected = env.get("JOURNAL_STREAM")
    if not expected:
        return False
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return False
    return expected == f"{status.st_dev}:{status.st_ino}"


def _timestamp(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, tz=UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _one_line(text: str) -> str:
    return "\\n".join(text.splitlines())


def _quoted(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if plain else json.dumps(text)
