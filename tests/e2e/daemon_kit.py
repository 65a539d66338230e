"""A real daemon with real workers for a test: started, reached over HTTP, stopped, checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 90.0


@dataclass
class Server:
    """A running daemon; `log` is what it wrote to stderr so far."""

    process: subprocess.Popen[bytes]
    port: int
    runtime_dir: Path
    log_path: Path
    clean: bool = field(default=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> tuple[int, Any]:
        return self._call(urllib.request.Request(self.url + path))

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 110) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        return self._call(urllib.request.Request(self.url + path, data), timeout_s)

    def _call(self, request: urllib.request.Request, timeout_s: float = 30) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                status, raw = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, raw = error.code, error.read()
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode(errors="replace")

    def ctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run loongctl against this daemon."""
        return subprocess.run(
            [sys.executable, "-m", "loongd.ctl", "--runtime-dir", self.runtime_dir, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def status(self) -> Any:
        answer = self.ctl("status", "--json")
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    def wait_empty(self, timeout_s: float = 20.0) -> Any:
        """Wait until nothing runs and no slot is used; the status then."""
        deadline = time.monotonic() + timeout_s
        while True:
            status = self.status()
            if status["pool"]["used"] == 0 and status["queue"]["running"] == 0:
                return status
            assert time.monotonic() < deadline, status
            time.sleep(0.1)

    def worker_pids(self) -> list[int]:
        return [instance["pid"] for instance in self.status()["instances"]]

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)


def launch(directory: Path, *arguments: str, instances: int = 1) -> Server:
    """Start a daemon on a free port; does not wait."""
    runtime_dir = directory / "run"
    log_path = directory / "log"
    command = [sys.executable, "-m", "loongd", "--config", str(directory / "loongd.toml")]
    (directory / "loongd.toml").touch()
    command += ["--port", "0", "--device", "cpu", "--instances", str(instances)]
    command += ["--runtime-dir", str(runtime_dir), *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("LOONGD_")}
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stderr=log, env=environment)
    return Server(process, 0, runtime_dir, log_path)


def wait_ready(server: Server) -> None:
    """Wait for /ready, and learn the port from the log."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while "ready: " not in server.log:
        assert server.process.poll() is None, server.log
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    server.port = int(server.log.split("API on http://127.0.0.1:")[1].split(",")[0])
    assert server.get("/ready")[0] == 200


@contextmanager
def serving(*arguments: str, instances: int = 1) -> Iterator[Server]:
    """A ready daemon; on leaving it must stop with exit code 0, and leave no process, file or
    error."""
    with tempfile.TemporaryDirectory(prefix="loongd-test-") as name:
        server = launch(Path(name), *arguments, instances=instances)
        try:
            wait_ready(server)
            pids = server.worker_pids()
            yield server
            assert server.stop() == 0, server.log
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
            assert [left.name for left in server.runtime_dir.iterdir()] == ["lock"]
            assert not server.clean or "Traceback" not in server.log, server.log
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
