import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from loongd import log


@pytest.fixture(autouse=True)
def _root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # Detached and not closed: they are pytest's.
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def logged(style: Literal["text", "json"], message: str, *args: object, **extra: object) -> str:
    stream = io.StringIO()
    log.setup("info", style, env={}, stream=stream)
    logging.getLogger("loongd.test").info(message, *args, extra=extra)
    logging.getLogger("loongd.test").debug("not shown")
    return stream.getvalue()


def test_a_text_line_is_a_sentence_with_fields() -> None:
    line = logged(
        "text", "prefill of %d tokens", 7, request_id="cmpl-1", took_s=0.123456789, x=None
    )
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO loongd\.test: "
        r"prefill of 7 tokens request_id=cmpl-1 took_s=0\.123457\n",
        line,
    )


def test_a_field_that_would_confuse_is_quoted() -> None:
    line = logged("text", "m", a="two words", b="", c='q"', d="k=v", e="x\ny")
    assert line.endswith(r'm a="two words" b="" c="q\"" d="k=v" e="x\ny"' + "\n")


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_message_cannot_forge_a_line(end: str) -> None:
    assert logged("text", "asked for %s", f"a{end}ERROR b").count("\n") == 1


def test_a_json_line_is_one_object() -> None:
    line = logged("json", "prefill\nof %d", 7, request_id="cmpl-1", where=Path("/x"))
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "info",
        "logger": "loongd.test",
        "message": "prefill\nof 7",
        "request_id": "cmpl-1",
        "where": "/x",
    }


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_traceback_is_kept(style: Literal["text", "json"]) -> None:
    stream = io.StringIO()
    log.setup("info", style, env={}, stream=stream)
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("loongd.test").exception("broke")
    assert "KeyError: 'gone'" in stream.getvalue()


def test_the_journal_gets_a_priority_and_no_time(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("w") as stream:
        status = os.fstat(stream.fileno())
        env = {"JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        log.setup("info", "text", env=env, stream=stream)
        logging.getLogger("loongd.test").warning("slow", extra={"dop": 2})
    assert (tmp_path / "journal").read_text() == "<4>loongd.test: slow dop=2\n"


def test_an_inherited_journal_variable_does_not_count(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as stream:
        assert not log.is_journal({"JOURNAL_STREAM": "1:1"}, stream)
        assert not log.is_journal({}, stream)
    assert not log.is_journal({"JOURNAL_STREAM": "1:1"}, io.StringIO())
