"""Compiling ahead where disk or kernel are not as they should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parent.parent.parent


def _compile(mode: str, cache: Path, tmp: Path) -> tuple[dict[str, Any], str]:
    """What it writes, and its log."""
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_CACHE_DIR": str(cache),
        "TMPDIR": str(tmp),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_ahead.py"), mode],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


def test_a_directory_that_cannot_be_written_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    report, log = _compile("good", file / "cache", tmp_path)
    assert report == {"kept": False, "late": [], "error": "", "waited": [False, True]}
    assert "kernels are compiled at every start" in log
    assert list(tmp_path.glob("loongd-kernels-*/*/add_to_flag.cubin"))


def test_a_kernel_that_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    """The others are not lost by it."""
    report, _ = _compile("broken", tmp_path / "cache", tmp_path)
    assert report["error"].startswith("kernel broken cannot be compiled: ")
    assert "\n" not in report["error"]
    assert report["kept"]
    again, _ = _compile("good", tmp_path / "cache", tmp_path)
    assert again == {"kept": True, "late": [], "error": "", "waited": [False, True]}
