"""Files that options name are checked ahead of what takes long, but a pipe can be read once."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from loongd.config import Config
from loongd.daemon import Daemon
from loongd.errors import ConfigError


def check(**options: str) -> None:
    Daemon._check_files(SimpleNamespace(_config=Config(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["api_key_file", "profile"])
def test_a_file_that_is_not_there(option: str, tmp_path: Path) -> None:
    path = tmp_path / "none"
    with pytest.raises(ConfigError) as caught:
        check(**{option: str(path)})
    assert str(caught.value) == f"{option} {path}: cannot be read: No such file or directory"


def test_a_pipe_is_left_for_the_one_who_needs_it() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"secret\n")
    os.close(writing)
    check(api_key_file=f"/dev/fd/{reading}", profile=f"/dev/fd/{reading}")
    assert os.read(reading, 100) == b"secret\n"
    os.close(reading)
