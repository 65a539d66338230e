import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loongd import __version__
from loongd.__main__ import build_parser, load, main
from loongd.config import OPTIONS, Config
from loongd.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_configuration_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.touch()
    monkeypatch.setenv("LOONGD_CONFIG", str(empty))


def test_every_option_is_a_flag_and_only_they() -> None:
    flags = set(build_parser()._option_string_actions)
    expected = {option.flag for option in OPTIONS.values()}
    expected |= {"--help", "-h", "--version", "--config", "-tp", "--no-enable-log-requests"}
    expected |= {"--no-queue-ahead", "--no-deterministic"}
    assert flags == expected


def test_help_shows_each_description_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for option in OPTIONS.values():
        assert option.help in shown
    assert "Port of the API; 0 takes a free one. (default: 8000)" in shown
    assert "Exit codes: 0 stopped as asked; 1 failed" in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"loongd {__version__}\n"


def test_flags_become_a_configuration() -> None:
    argv = ["--model", "m", "--port", "0", "--api-key", "a", "--api-key", "b,c", "-tp", "1"]
    argv += ["--no-enable-log-requests", "--max-model-len", "128k"]
    assert load(argv, {}) == Config(
        model="m",
        port=0,
        api_key=["a", "b,c"],
        enable_log_requests=False,
        max_model_len=128_000,
    )


def test_the_model_may_stand_alone() -> None:
    assert load(["m"], {}) == load(["--model", "m"], {}) == load(["m", "--model", "m"], {})
    with pytest.raises(ConfigError, match="two models are given: 'm' and --model 'n'"):
        load(["m", "--model", "n"], {})


def test_file_environment_and_flags_are_layers(tmp_path: Path) -> None:
    path = tmp_path / "f.toml"
    path.write_text('model = "file"\nport = 1\nseed = 1\n')
    config = load(["--config", str(path), "--port", "3"], {"LOONGD_SEED": "2"})
    assert (config.model, config.port, config.seed) == ("file", 3, 2)
    assert load([], {"LOONGD_CONFIG": str(path)}).model == "file"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no model is given: loongd --model PATH (or LOONGD_MODEL, or the file)"),
        (["m", "--port", "x"], "--port 'x': expected a whole number from 0 to 65535"),
        (["m", "--config", "/no/such"], "/no/such: no such file"),
        (["m", "--config", "/"], "/: cannot be read: Is a directory"),
        (["m", "-tp", "0"], "--tensor-parallel-size '0': expected a whole number of at least 1"),
        (["serve", "m", "--port", "1"], 'there is no command "serve": loongd MODEL ...'),
        (["serve"], 'there is no command "serve": loongd MODEL ...'),
    ],
)
def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"loongd: error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("argv", [["--prot", "1"], ["m", "n"], ["m", "--port"], ["--por", "1"]])
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("loongd: error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "end"),
    [
        (["--modl", "x"], "--modl (did you mean '--model'? see loongd --help)\n"),
        (["--max_model_len=5"], "=5 (did you mean '--max-model-len'? see loongd --help)\n"),
        (["--zzzzz"], "--zzzzz (see loongd --help)\n"),
        (["m", "--port"], "expected one argument (see loongd --help)\n"),
    ],
)
def test_a_flag_that_is_nearly_right_is_suggested(
    argv: list[str], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert capsys.readouterr().err.endswith(end)


def test_a_model_may_be_called_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve").mkdir()
    assert load(["serve"], {}).model == "serve"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_daemon_has_stopped_leaves_the_exit_code(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It stops at once here. Signals come when it has, and while Python takes itself down."""
    code = (
        "import os, sys\nfrom loongd.__main__ import main\nfrom loongd.daemon import Daemon\n"
        "async def at_once(self): pass\n"
        "Daemon._serve_until_stopped = at_once\n"
        "class Late:\n"
        f"    def __del__(self, kill=os.kill, pid=os.getpid()): kill(pid, {int(number)})\n"
        "late = Late()\n"
        f"code = main(['m', '--device', 'cpu', '--runtime-dir', {str(tmp_path / 'run')!r}])\n"
        f"os.kill(os.getpid(), {int(number)})\n"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.rstrip().endswith("stopped")


def test_help_does_not_wait_for_the_daemon() -> None:
    code = (
        "import sys\nfrom loongd.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('slow' if {'aiohttp', 'uvloop', 'torch', 'zmq'} & set(sys.modules) else 'quick')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("quick\n")
