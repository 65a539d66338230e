"""Answers are the same whether decode steps are queued ahead or not, and no slot is lost."""

from __future__ import annotations

import http.client
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from daemon_kit import Server, serving

PROMPTS = ([*range(20, 60)], [9, 8, 7])


def _bodies() -> list[dict[str, Any]]:
    """Some run to the limit, some to a stop; greedy, drawn, and with a penalty."""
    common = {"max_tokens": 16, "return_token_ids": True, "temperature": 0, "logprobs": 2}
    bodies: list[dict[str, Any]] = [{"prompt": p, **common, "ignore_eos": True} for p in PROMPTS]
    bodies.append({**bodies[0], "temperature": 1.0, "seed": 5})
    bodies.append({**bodies[1], "presence_penalty": 0.7})
    bodies.append({"prompt": "Once upon a time, there was", **common, "stop": [" the", ","]})
    bodies.append({"prompt": "The capital of France is", **common, "min_tokens": 4})
    return bodies


def _ask(server: Server, body: dict[str, Any]) -> tuple[Any, ...]:
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    choice = answer["choices"][0]
    return (choice["token_ids"], choice["text"], choice["finish_reason"], choice["stop_reason"])


def _leave(server: Server) -> None:
    """A client that reads a little of a long stream and goes."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = {"prompt": [5, 6, 7], "max_tokens": 500, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    for _ in range(8):
        answer.readline()
    answer.close()
    connection.close()


def _answers(server: Server) -> list[tuple[Any, ...]]:
    """One at a time, for the batch decides the last bits; then all together with leavers."""
    bodies = _bodies()
    alone = [_ask(server, body) for body in bodies]
    stops = [alone[0][0][9], alone[1][0][12]]
    stopping = [{**body, "stop_token_ids": stops} for body in bodies[:2]]
    alone += [_ask(server, body) for body in stopping]
    threads = [threading.Thread(target=_ask, args=(server, body)) for body in bodies + stopping]
    threads += [threading.Thread(target=_leave, args=(server,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return alone


def _wait_for_audit(server: Server) -> str:
    """The results of an audit of all workers after the last request; they audit when idle."""
    server.wait_empty()
    deadline = time.monotonic() + 20
    while True:
        lines = server.get("/metrics")[1].splitlines()
        audits = [line for line in lines if line.startswith("loongd:kv_pool_audits_total{")]
        if audits:
            return "\n".join(audits)
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.timeout(600)
def test_answers_are_the_same_and_no_slot_is_lost(smollm2_dir: Path) -> None:
    arguments = ("--model", str(smollm2_dir), "--dtype", "float32", "--kv-pool-tokens", "2000")
    answers = []
    for flag in ("--queue-ahead", "--no-queue-ahead"):
        with serving(*arguments, flag, instances=2) as server:
            answers.append(_answers(server))
            totals = server.wait_empty()["totals"]
            queued, steps = totals["queued_ahead"], totals["decode_steps"]
            assert queued > steps / 3 if flag == "--queue-ahead" else queued == 0, totals
            assert 'result="mismatch"' not in _wait_for_audit(server)
            assert "while nothing runs" not in server.log
    assert answers[0] == answers[1]
    reasons = {(reason, stop) for _, _, reason, stop in answers[0]}
    assert len(reasons) > 3, "stopped at the limit, at a token and at a text"
