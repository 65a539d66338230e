import shutil
import subprocess
from pathlib import Path

import pytest

from loongd.__main__ import load
from loongd.config import DEFAULT_FILE, Config

UNIT = Path(__file__).parents[2] / "systemd" / "loongd.service"


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_systemd_accepts_it_without_a_word() -> None:
    # It exits 0 on an unknown key too, and only says so.
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.fail("systemd-analyze is missing: install systemd")
    done = subprocess.run([analyze, "verify", UNIT], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0


def test_every_setting_stands_below_a_reason() -> None:
    before = ""
    for line in UNIT.read_text().splitlines():
        # A block of settings shares the reason above it.
        assert before or not line or line[0] in "#[", f"no comment above {line}"
        before = line


def test_the_command_line_is_one_that_loongd_takes() -> None:
    env, program, *argv = settings()["ExecStart"][0].split()
    assert (env, program) == ("/usr/bin/env", "loongd")
    assert argv == ["--config", DEFAULT_FILE]
    example = UNIT.parents[1] / "etc" / "loongd.toml"
    assert load(["--config", str(example), "m"], {}) == Config(model="m")


def test_stopping_waits_longer_than_the_daemon() -> None:
    assert float(settings()["TimeoutStopSec"][0]) > Config().shutdown_timeout


def test_what_the_daemon_relies_on() -> None:
    found = settings()
    assert found["Type"] == ["notify"]
    assert found["KillMode"] == ["mixed"]
    assert found["RuntimeDirectory"] == ["loongd"]
    assert found["RuntimeDirectoryMode"] == ["0700"]
    assert found["RestartPreventExitStatus"] == ["2"]
    assert "MemoryDenyWriteExecute" not in found
