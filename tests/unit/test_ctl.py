import json
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from loongd import ctl, ctl_render
from loongd.config import Config, dump_toml, merge, parse_toml

STATUS: dict[str, Any] = {
    "node": {
        "name": "node-a",
        "version": "0.1.0",
        "pid": 4242,
        "uptime_s": 7384.2,
        "state": "ready",
        "model": "SmolLM2-135M-Instruct",
        "max_model_len": 8192,
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch",
        "policy": "fcfs",
        "api": "http://127.0.0.1:8000",
    },
    "instances": [
        {
            "id": 0,
            "state": "ready",
            "pid": 4300,
            "device": "cpu",
            "slots_total": 4096,
            "slots_used": 2048,
            "slots_free": 2048,
            "phase": "prefill",
            "step_id": 7,
        },
        {
            "id": 1,
            "state": "starting",
            "pid": None,
            "device": None,
            "slots_total": 0,
            "slots_used": 0,
            "slots_free": 0,
            "phase": "idle",
            "step_id": None,
        },
    ],
    "groups": [
        {
            "members": [0, 1, 2, 5],
            "dop": 4,
            "phase": "decode",
            "num_requests": 2,
            "masters": [0, 2],
            "step_id": 1234567,
            "age_s": 0.0042,
        }
    ],
    "pool": {"total": 4096, "used": 2048, "free": 2048, "reserved": 100},
    "queue": {"waiting": 2, "running": 3, "waiting_tokens": 10240},
    "totals": {
        "started": 12,
        "finished": 6,
        "cancelled": 1,
        "failed": 0,
        "rejected": 0,
        "preempted": 0,
        "lost": 2,
    },
}

STORY: dict[str, Any] = {
    "request_id": "cmpl-1",
    "state": "finished",
    "prompt_tokens": 6012,
    "generated_tokens": 64,
    "entries": [
        {
            "at_s": 0.0,
            "event": "arrived",
            "text": "6012 prompt tokens, up to 64 new ones",
            "group": None,
            "dop": None,
            "masters": None,
            "kept": None,
            "num_steps": None,
            "num_tokens": None,
            "duration_s": None,
        },
        {
            "at_s": 0.5,
            "event": "prefill",
            "text": "4 instances, because 6012 tokens at 512 an instance ask for 12 and 4 are idle",
            "group": [0, 1, 2, 3],
            "dop": 4,
            "masters": [],
            "kept": {"0": 3006, "1": 3006},
            "num_steps": 1,
            "num_tokens": 6012,
            "duration_s": 1.5,
        },
        {
            "at_s": 2.0,
            "event": "decode",
            "text": "scaled down to the instances that hold its tokens",
            "group": [0, 1],
            "dop": 2,
            "masters": [0],
            "kept": {"0": 63},
            "num_steps": 63,
            "num_tokens": 63,
            "duration_s": 2.0,
        },
        {"at_s": 4.0, "event": "finish", "text": "length", "group": None},
    ],
}


class FakeDaemon(socketserver.ThreadingUnixStreamServer):
    """Answers the admin API; `left` are the queue lengths it reports, the last one for ever."""

    daemon_threads = True

    def __init__(self, path: str) -> None:
        super().__init__(path, _Handler)
        self.asked: list[str] = []
        self.left = [0]

    def queue(self) -> dict[str, int]:
        running = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        return {"running": running, "waiting": 0, "waiting_tokens": 0}


class _Handler(BaseHTTPRequestHandler):
    server: FakeDaemon

    def do_GET(self) -> None:
        self.server.asked.append(self.requestline.removesuffix(" HTTP/1.1"))
        if self.path == "/admin/status":
            self._answer(200, STATUS | {"queue": self.server.queue()})
        elif self.path == "/admin/story/cmpl-1":
            self._answer(200, STORY)
        else:
            self._answer(404, {"error": {"message": "no request 'x/y' is known"}})

    def do_POST(self) -> None:
        self.server.asked.append(self.requestline.removesuffix(" HTTP/1.1"))
        self._answer(200, {"draining": "un" not in self.path} | self.server.queue())

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    path = str(tmp_path / "admin.sock")
    monkeypatch.setenv("LOONGD_ADMIN_SOCKET", path)
    with FakeDaemon(path) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctl, "_POLL_S", 0.01)


# ---- commands ---------------------------------------------------------------------------------


def test_status(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["status"]) == 0
    assert "SmolLM2-135M-Instruct" in capsys.readouterr().out
    assert daemon.asked == ["GET /admin/status"]


def test_status_as_json_is_what_the_daemon_said(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["instances"] == STATUS["instances"]


def test_drain_returns_at_once(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    daemon.left = [3]
    assert ctl.main(["drain"]) == 0
    assert daemon.asked == ["POST /admin/drain"]
    assert capsys.readouterr().out == "draining: 3 running, 0 waiting\n"


def test_drain_waits_until_nothing_is_left(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.left = [2, 2, 1, 0]
    assert ctl.main(["drain", "--wait"]) == 0
    out, err = capsys.readouterr()
    assert out == "drained: no request is left\n"
    assert err == "draining: 2 running, 0 waiting\ndraining: 1 running, 0 waiting\n"
    assert daemon.asked == ["POST /admin/drain"] + ["GET /admin/status"] * 3


def test_drain_gives_up_at_the_deadline(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.left = [2]
    assert ctl.main(["drain", "--wait", "0.05"]) == 1
    assert "after 0.05 s not empty: 2 running, 0 waiting" in capsys.readouterr().err


def test_undrain(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["undrain"]) == 0
    assert daemon.asked == ["POST /admin/undrain"]
    assert capsys.readouterr().out == "admitting requests: 0 running, 0 waiting\n"


def test_story(daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["story", "cmpl-1"]) == 0
    assert capsys.readouterr().out == ctl_render.story(STORY) + "\n"
    assert ctl.main(["story", "cmpl-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == STORY


def test_a_story_that_nobody_knows_is_exit_code_1(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ctl.main(["story", "x/y"]) == 1
    assert capsys.readouterr().err == "loongctl: error: no request 'x/y' is known\n"
    assert daemon.asked == ["GET /admin/story/x%2Fy"]


def test_no_daemon_is_exit_code_3_and_names_the_socket(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "none.sock")
    assert ctl.main(["--socket", path, "status"]) == 3
    expected = f"loongctl: error: no loongd answers on {path}: No such file or directory\n"
    assert capsys.readouterr().err == expected


def test_an_interrupt_is_exit_code_130(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    assert ctl.main(["status", "--watch", "1"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "argv", [[], ["halt"], ["drain", "--wait", "soon"], ["status", "--watch", "0"], ["story"]]
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ctl.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "tokens"),
    [("8000", 8000), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 1 << 20)],
)
def test_sizes_of_a_plan_have_suffixes_as_everywhere(
    given: str, tokens: int, daemon: FakeDaemon
) -> None:
    assert ctl.main(["plan", given, "--max-tokens", given]) == 1, "this daemon knows no plan"
    assert daemon.asked == [f"GET /admin/plan?tokens={tokens}&max_tokens={tokens}"]


def test_help_of_a_plan_says_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ctl.main(["plan", "--help"])
    assert "(default: 128)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("given", ["0", "-1", "8x", "k", "1.5", "1.0001k", ""])
def test_a_wrong_size_of_a_plan_says_what_is_expected(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ctl.main(["plan", "--", given])
    assert caught.value.code == 2
    assert "a whole number of at least 1 (8k is 8,000, 8K is 8,192)" in capsys.readouterr().err


def test_where_options_of_the_daemon_go(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ctl.main(["status", "--runtime-dir", "run"])
    assert "; --socket and --runtime-dir go ahead of the command" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        ctl.main(["status", "--runtime-directory", "run"])
    assert "go ahead" not in capsys.readouterr().err


def test_config_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.toml"
    path.write_text('model = "m"\nport = 9\n')
    monkeypatch.setenv("LOONGD_SEED", "5")
    assert ctl.main(["config", "check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: good\n"
    assert ctl.main(["config", "check", str(path), "--dump"]) == 0
    dumped = capsys.readouterr().out
    assert dumped == dump_toml(Config(model="m", port=9, seed=5))
    assert merge(parse_toml(dumped, file_name="f"), {}, {}).port == 9

    path.write_text("prot = 9\nseed = 'x'\n")
    assert ctl.main(["config", "check", str(path)]) == 1
    expected = f"loongctl: error: {path}: unknown key 'prot' (did you mean 'port'?)\n"
    expected += f"loongctl: error: {path}: seed = 'x': expected a whole number\n"
    assert capsys.readouterr().err == expected


def test_config_check_without_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The usual one may be missing, one that is asked for by name may not."""
    path = tmp_path / "none.toml"
    monkeypatch.setattr("loongd.config.DEFAULT_FILE", str(path))
    assert ctl.main(["config", "check"]) == 0
    expected = f"environment (there is no {path}): good; no model is named\n"
    assert capsys.readouterr().out == expected
    assert ctl.main(["config", "check", str(path)]) == 1
    assert "No such file" in capsys.readouterr().err


# ---- which socket -----------------------------------------------------------------------------


def test_where_the_socket_is_looked_for(tmp_path: Path) -> None:
    parse = ctl.build_parser().parse_args
    env = {"LOONGD_ADMIN_SOCKET": "/e/s", "LOONGD_RUNTIME_DIR": "/r"}
    assert ctl.find_socket(parse(["--socket", "/f", "status"]), env, 7) == "/f"
    assert ctl.find_socket(parse(["--runtime-dir", "/d", "status"]), env, 7) == "/d/admin.sock"
    plain = parse(["status"])
    assert ctl.find_socket(plain, env, 7) == "/e/s"
    del env["LOONGD_ADMIN_SOCKET"]
    assert ctl.find_socket(plain, env, 7) == "/r/admin.sock"
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    assert ctl.find_socket(plain, env, 7) == "/run/loongd/admin.sock"
    (tmp_path / "loongd").mkdir()
    (tmp_path / "loongd" / "admin.sock").touch()
    assert ctl.find_socket(plain, env, 7) == str(tmp_path / "loongd" / "admin.sock")


def test_all_places_are_named_when_nothing_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    places = [str(tmp_path / name) for name in ("run", "user", "tmp")]
    first, second, third = places
    monkeypatch.setattr(ctl, "_usual_sockets", lambda *_: places)
    for name in ("LOONGD_ADMIN_SOCKET", "LOONGD_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)

    def said() -> str:
        assert ctl.main(["status"]) == 3
        return capsys.readouterr().err.removeprefix("loongctl: error: no loongd answers on ")

    nothing = f"; nor is there a socket at {second} or {third}\n"
    assert said() == f"{first}: No such file or directory{nothing}"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(second)
    refused = f"{second}: Connection refused"
    assert said() == f"{refused}; nor is there a socket at {first} or {third}\n"
    Path(third).touch()
    assert said() == f"{refused}; nor is there a socket at {first}; try --socket {third}\n"


def test_it_imports_nothing_slow() -> None:
    code = "import sys, loongd.ctl; print({'msgspec', 'asyncio', 'tomllib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---- rendering --------------------------------------------------------------------------------


def test_the_status_table() -> None:
    assert (
        ctl_render.status(STATUS)
        == """\
loongd    0.1.0 on node-a, pid 4242
state     ready, up 2h03m
model     SmolLM2-135M-Instruct, up to 8,192 tokens a request
engine    cpu, float32, torch
policy    fcfs
api       http://127.0.0.1:8000
requests  3 running, 2 waiting (10,240 tokens)
so far    12 started: 6 finished, 1 cancelled, 2 restarted

INSTANCE  STATE         PID DEVICE   PHASE    POOL
0         ready        4300 cpu      prefill  [#####.....] 2,048/4,096
1         starting        - -        idle     [..........] 0/0
pool      2,048 free, 100 reserved            [#####.....] 2,048/4,096

GROUP          PHASE    DOP MASTERS        REQUESTS      STEP AGE
0-2,5          decode     4 0,2                   2   1234567 4.2 ms"""
    )


def test_a_lost_instance_has_its_reason_below_it() -> None:
    lost = json.loads(json.dumps(STATUS))
    lost["instances"][0] |= {"state": "lost", "phase": None, "why": "worker process was killed"}
    rows = ctl_render.status(lost).splitlines()
    row = next(n for n, line in enumerate(rows) if line.startswith("0 "))
    assert rows[row].split()[1:5] == ["lost", "4300", "cpu", "-"]
    assert rows[row + 1] == " " * 10 + "worker process was killed; all start again"
    assert rows[row + 2].split()[:2] == ["1", "starting"]


def test_the_story_table() -> None:
    assert (
        ctl_render.story(STORY)
        == """\
cmpl-1  finished  6,012 prompt + 64 generated tokens  4 s

      AT  TIME                  EVENT     DOP GROUP     MASTERS   TOKENS STEPS
    0 us  |                     arrived
          6012 prompt tokens, up to 64 new ones
  500 ms    ========            prefill     4 0-3                  6,012     1
          4 instances, because 6012 tokens at 512 an instance ask for 12 and 4
          are idle [1.5 s] [tokens kept: 3,006 on 0, 3,006 on 1]
     2 s            ==========  decode      2 0,1       0             63    63
          scaled down to the instances that hold its tokens [2 s] [tokens kept:
          63 on 0]
     4 s                     |  finish
          length"""
    )


WAITS: dict[str, Any] = {
    "text": "for 1,024 slots (34 prompt tokens, 990 reserved for its answer by max_tokens); 994 of "
    "2,048 are neither used nor reserved; 4 ahead of it",
    "at_s": 0.0,
    "duration_s": 12.5,
}


def test_the_story_of_one_that_waits_says_how_long_and_for_what() -> None:
    tale = STORY | {"state": "live", "generated_tokens": 0, "entries": STORY["entries"][:1]}
    assert (
        ctl_render.story(tale | {"elapsed_s": 12.5, "waiting": WAITS})
        == """\
cmpl-1  live  6,012 prompt + 0 generated tokens  12.5 s

      AT  TIME                  EVENT     DOP GROUP     MASTERS   TOKENS STEPS
    0 us  |                     arrived
          6012 prompt tokens, up to 64 new ones
    0 us  ====================  waiting
          for 1,024 slots (34 prompt tokens, 990 reserved for its answer by
          max_tokens); 994 of 2,048 are neither used nor reserved; 4 ahead of it
          [12.5 s]"""
    )


@pytest.mark.parametrize(("idle_s", "is_told"), [(0.05, False), (0.4, False), (1.5, True)])
def test_a_story_tells_of_time_without_a_step(idle_s: float, is_told: bool) -> None:
    """... where it is more than a blink and a fifth of the steps' own."""
    arrived, _, decode, finish = STORY["entries"]
    slow = decode | {"at_s": 0.5, "duration_s": 2.0, "idle_s": idle_s}
    lines = ctl_render.story(STORY | {"entries": [arrived, slow, finish]}).splitlines()
    told = " ".join(" ".join(lines).split())
    assert ("[2 s; 1.5 s without a step]" if is_told else "[2 s]") in told
    assert [line.count("=") for line in lines if "=" in line] == [18 if is_told else 10]


def test_a_live_story_lasts_until_now() -> None:
    tale = STORY | {"state": "live", "elapsed_s": 8.0, "waiting": None}
    head, *_, last, _ = ctl_render.story(tale).splitlines()
    assert head.endswith("tokens  8 s")
    assert last.rstrip() == "     4 s            |           finish"


def test_the_status_says_why_the_first_of_the_queue_waits() -> None:
    text = WAITS["text"].removesuffix("; 4 ahead of it")
    queue = STATUS["queue"] | {"first": WAITS | {"text": text}}
    rows = ctl_render.status(STATUS | {"queue": queue}).splitlines()
    row = next(n for n, line in enumerate(rows) if line.startswith("pool "))
    assert rows[row + 1 : row + 4] == [
        "waiting   2; the first for 1,024 slots (34 prompt tokens, 990 reserved for its",
        "          answer by max_tokens); 994 of 2,048 are neither used nor reserved",
        "",
    ]
    nobody = ctl_render.status(STATUS | {"queue": queue | {"first": None}})
    assert nobody == ctl_render.status(STATUS)


def test_several_choices_are_several_tables() -> None:
    one = ctl_render.story(STORY)
    both = {"request_id": "cmpl-1", "choices": [STORY, STORY]}
    assert ctl_render.story(both) == f"{one}\n\n{one}"


def test_no_line_is_wider_than_80_columns() -> None:
    wide = json.loads(json.dumps(STATUS))
    wide["node"]["model"] = "m" * 200
    wide["groups"][0]["members"] = list(range(0, 64, 2))
    wide["instances"][0] |= {"slots_total": 123_456_789, "slots_used": 98_765_432}
    wide["pool"] = {"total": 10**9, "used": 10**8, "free": 9 * 10**8, "reserved": 10**8}
    tale = json.loads(json.dumps(STORY))
    tale["entries"][1] |= {"group": list(range(0, 64, 2)), "text": "word " * 100}
    lines = (ctl_render.status(wide) + "\n" + ctl_render.story(tale)).splitlines()
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "[....]"), (0.001, "[#...]"), (0.5, "[##..]"), (0.999, "[###.]"), (1, "[####]")],
)
def test_a_bar_is_empty_or_full_only_when_it_is(share: float, text: str) -> None:
    assert ctl_render.bar(share, 4) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00085, "850 us"), (0.0123, "12.3 ms"), (4.21, "4.21 s"), (125, "2m05s"), (7384, "2h03m")],
)
def test_durations(value: float, text: str) -> None:
    assert ctl_render.seconds(value) == text


def test_runs_of_numbers_are_shortened() -> None:
    assert ctl_render.numbers([]) == "-"
    assert ctl_render.numbers([3]) == "3"
    assert ctl_render.numbers([0, 1]) == "0,1"
    assert ctl_render.numbers([0, 1, 2, 3, 6]) == "0-3,6"
    assert ctl_render.numbers([2, 1, 0]) == "2,1,0"


def test_a_reader_that_has_seen_enough_is_no_fault():
    code = "import sys; from loongd.ctl import main; sys.exit(main(['config', 'check']))"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141
