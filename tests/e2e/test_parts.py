"""A long prompt that passes through the layers in parts, on real workers."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from daemon_kit import Server, serving

LONG = [20 + 7 * i % 900 for i in range(2500)]


def _ask(server: Server, prompt: list[int], into: list[Any]) -> threading.Thread:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}

    def run() -> None:
        into.append(server.post("/v1/completions", body))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _wait_for_steps(server: Server, count: int) -> None:
    """Until so many more prefill steps have begun."""
    before, deadline = server.status()["totals"]["prefill_steps"], time.monotonic() + 60
    while server.status()["totals"]["prefill_steps"] < before + count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _leave_while_it_runs(server: Server) -> None:
    host = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    body = json.dumps({"prompt": LONG, "max_tokens": 8})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    _wait_for_steps(server, 3)
    connection.close()


def _token_ids(answers: list[Any]) -> list[list[int]]:
    assert [status for status, _ in answers] == [200] * len(answers), answers
    return [answer["choices"][0]["token_ids"] for _, answer in answers]


def test_others_clients_that_leave_and_dead_workers_between_parts(smollm2_dir: Path) -> None:
    """The long prompt gets the tokens that it gets undisturbed; nothing leaks."""
    options = ("--model", str(smollm2_dir), "--dtype", "float32", "--max-prefill-wait", "0.1")
    with serving(*options, instances=2) as server:
        undisturbed: list[Any] = []
        _ask(server, LONG, undisturbed).join()
        (expected,) = _token_ids(undisturbed)
        story = json.loads(server.ctl("story", undisturbed[0][1]["id"], "--json").stdout)
        prefill = next(entry for entry in story["entries"] if entry["event"] == "prefill")
        assert " parts" in prefill["text"], prefill
        assert prefill["num_tokens"] == len(LONG)
        assert prefill["num_steps"] > 3

        beside: list[Any] = []
        shorts: list[Any] = []
        thread = _ask(server, LONG, beside)
        for number in range(3):
            _wait_for_steps(server, 1)
            _ask(server, [30 + number] * 20, shorts).join()
        assert not beside, "short prompts came in between"
        thread.join()
        assert _token_ids(beside) == [expected]

        _leave_while_it_runs(server)
        assert server.wait_empty(60)["totals"]["cancelled"] == 1

        killed: list[Any] = []
        thread = _ask(server, LONG, killed)
        _wait_for_steps(server, 3)
        os.kill(server.worker_pids()[1], signal.SIGKILL)
        thread.join()
        assert _token_ids(killed) == [expected]
        status = server.wait_empty()
        assert status["pool"]["free"] == status["pool"]["total"]
