"""What goes wrong in operation: dead workers, signals, wrong options, full pools."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from daemon_kit import Server, launch, serving, wait_ready


def _ask(server: Server, into: list[Any], **body: Any) -> threading.Thread:
    def run() -> None:
        into.append(server.post("/v1/completions", {"temperature": 0, "ignore_eos": True, **body}))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def _wait_for_decode(server: Server) -> None:
    deadline = time.monotonic() + 30
    while server.status()["totals"]["generated_tokens"] < 5:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_worker_loses_no_request(smollm2_dir: Path) -> None:
    """Same greedy tokens as without the loss, on the same open request; nothing leaks."""
    with serving("--model", str(smollm2_dir), instances=4) as server:
        body = {"prompt": list(range(20, 60)), "max_tokens": 60, "return_token_ids": True}
        undisturbed: list[Any] = []
        _ask(server, undisturbed, **body).join()
        answers: list[Any] = []
        threads = [_ask(server, answers, **body) for _ in range(2)]
        before = server.status()["totals"]["generated_tokens"]
        while server.status()["totals"]["generated_tokens"] < before + 10:
            time.sleep(0.02)
        os.kill(server.worker_pids()[1], signal.SIGKILL)
        for thread in threads:
            thread.join()
        expected = undisturbed[0][1]["choices"][0]["token_ids"]
        assert len(expected) == 60
        for status, answer in answers:
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == expected
        status = server.wait_empty()
        assert status["pool"]["free"] == status["pool"]["total"]
        assert "instance 1 is lost: worker process was killed by signal 9" in server.log
        metrics = server.get("/metrics")[1].splitlines()
        for name, count in (("engine_restarts", 1), ("requests_restarted", 2)):
            values = [x.split()[1] for x in metrics if x.startswith(f"loongd:{name}_total{{")]
            assert [float(value) for value in values] == [count], name
        story = json.loads(server.ctl("story", answers[0][1]["id"], "--json").stdout)
        assert story["state"] == "finished"


def test_a_frozen_worker_is_replaced_within_seconds(smollm2_dir: Path) -> None:
    """SIGSTOP is the silent failure: no connection breaks, no process ends."""
    with serving("--model", str(smollm2_dir), "--worker-timeout", "4", instances=2) as server:
        answers: list[Any] = []
        thread = _ask(server, answers, prompt=list(range(20, 60)), max_tokens=80)
        _wait_for_decode(server)
        os.kill(server.worker_pids()[0], signal.SIGSTOP)
        thread.join()
        assert answers[0][0] == 200
        assert answers[0][1]["usage"]["completion_tokens"] == 80
        assert "gave no sign of life" in server.log
        server.wait_empty()


@pytest.mark.parametrize("prompt_tokens", [20, 300])
def test_parameters_at_their_bounds_harm_no_neighbour(
    prompt_tokens: int, smollm2_dir: Path
) -> None:
    """As many banned ids as may be, and a penalty beyond its bound, beside others: on one instance
    and on two. (A row that can draw nothing at all: tests/dist/test_plans.py.)"""
    with serving(
        *("--model", str(smollm2_dir), "--prefill-tokens-per-instance", "100"), instances=2
    ) as server:
        body = {"prompt": list(range(20, 20 + prompt_tokens)), "max_tokens": 4}
        good: list[Any] = []
        threads = [_ask(server, good, **body) for _ in range(3)]
        pids = server.worker_pids()
        bad = {**body, "min_tokens": 2, "logprobs": 1, "ignore_eos": False}
        bad |= {"stop_token_ids": list(range(1024))}
        assert server.post("/v1/completions", bad)[0] == 200
        status, answer = server.post("/v1/completions", {**body, "repetition_penalty": 1e-300})
        assert (status, answer["error"]["param"]) == (400, "repetition_penalty")
        for thread in threads:
            thread.join()
        assert [status for status, _ in good] == [200] * 3
        assert server.worker_pids() == pids


def test_a_death_during_a_restart_is_one_more_restart(smollm2_dir: Path) -> None:
    with serving("--model", str(smollm2_dir), instances=2) as server:
        answers: list[Any] = []
        thread = _ask(server, answers, prompt=list(range(20, 60)), max_tokens=60)
        _wait_for_decode(server)
        first = server.worker_pids()
        os.kill(first[0], signal.SIGKILL)
        deadline = time.monotonic() + 60
        while not (young := _workers_of(server.process.pid) - set(first)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(min(young), signal.SIGKILL)
        thread.join()
        assert answers[0][0] == 200
        assert answers[0][1]["usage"]["completion_tokens"] == 60
        assert "a restart failed" in server.log
        server.wait_empty()


def _workers_of(daemon: int) -> set[int]:
    children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    return {int(pid) for pid in children}


def test_sigterm_lets_running_requests_finish(smollm2_dir: Path) -> None:
    with serving("--model", str(smollm2_dir), instances=2) as server:
        answers: list[Any] = []
        thread = _ask(server, answers, prompt="Once upon a time", max_tokens=40)
        _wait_for_decode(server)
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while server.get("/ready")[0] != 503:
            assert time.monotonic() < deadline
        status, refusal = server.post("/v1/completions", {"prompt": "late"})
        assert (status, refusal["error"]["code"]) == (503, "draining")
        thread.join()
        assert answers[0][0] == 200
        assert answers[0][1]["usage"]["completion_tokens"] == 40
        assert server.process.wait(15) == 0


def test_signals_while_it_stops_do_not_change_the_exit_code(smollm2_dir: Path) -> None:
    with serving("--model", str(smollm2_dir)) as server:
        deadline = time.monotonic() + 15
        for number in itertools.cycle((signal.SIGINT, signal.SIGTERM)):
            if server.process.poll() is not None:
                break
            server.process.send_signal(number)
            assert time.monotonic() < deadline
            time.sleep(0.002)
        assert server.process.returncode == 0
        assert "loongd.daemon: stopped" in server.log


def test_a_killed_daemon_leaves_no_worker(smollm2_dir: Path, tmp_path: Path) -> None:
    server = launch(tmp_path, "--model", str(smollm2_dir), instances=2)
    wait_ready(server)
    pids = server.worker_pids()
    server.process.kill()
    server.process.wait()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "workers outlive their daemon"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "arguments", "words"),
    [
        (1, ("--model", "/nowhere/at/all"), "loongd does not download models"),
        (1, ("--model", "/nowhere.gguf"), "/nowhere.gguf: no such file"),
        (1, ("--model", "{broken}"), "MambaForCausalLM"),
        (1, ("--model", "{model}", "--port", "{port}"), "Address already in use"),
        (2, ("--model", "{model}", "--max-model-len", "9000"), "max_model_len is 9000"),
        (2, ("--model", "{model}", "-tp", "2"), "tensor_parallel_size = 2 does not divide"),
        (1, ("--model", "{model}", "--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
        (1, ("--model", "{model}", "--host", "no.such.invalid"), "on no.such.invalid:0: "),
        (1, ("--model", "{model}", "--kv-pool-tokens", "10000M"), "lower kv_pool_tokens"),
        (2, ("--model", "{model}", "--device", "cuda"), "no GPU is visible"),
        # these before the model is looked at
        (2, ("--model", "/nowhere", "--api-key-file", "/no/keys"), "keys: cannot be read: No such"),
        (2, ("--model", "/nowhere", "--profile", "/no/profile"), "profile /no/profile"),
        (2, ("--model", "/nowhere", "--chat-template", "/no/template"), "chat_template: "),
        (2, ("--model", "{model}", "--port", "x"), "--port 'x'"),
        (2, ("--modle", "{model}"), "unrecognized arguments"),
    ],
)
def test_a_start_that_cannot_work_says_why_in_one_line(
    code: int, arguments: tuple[str, ...], words: str, smollm2_dir: Path, tmp_path: Path
) -> None:
    """Exit code 2 is for what trying again cannot help: systemd does not."""
    broken = tmp_path / "broken"
    broken.mkdir()
    config = json.loads((smollm2_dir / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (broken / "config.json").write_text(json.dumps(config))
    with socket.create_server(("127.0.0.1", 0)) as other:
        known = {"model": smollm2_dir, "broken": broken, "port": other.getsockname()[1]}
        server = launch(tmp_path, *(text.format(**known) for text in arguments))
        assert server.process.wait(60) == code, server.log
    last = server.log.strip().splitlines()[-1]
    assert last.startswith("loongd: error: ")
    assert words in last
    assert "Traceback" not in server.log


def test_a_worker_that_cannot_start_says_why_in_one_line(smollm2_dir: Path, tmp_path: Path) -> None:
    """The weights lack a tensor: the worker's own words reach the daemon's last line."""
    model = tmp_path / "model"
    model.mkdir()
    for file in smollm2_dir.iterdir():
        if file.suffix == ".json":
            (model / file.name).write_bytes(file.read_bytes())
    header = b'{"__metadata__":{}}'
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    server = launch(tmp_path, "--model", str(model), instances=2)
    assert server.process.wait(60) == 1
    last = server.log.strip().splitlines()[-1]
    assert last.startswith("loongd: error: instance ")
    assert "model.embed_tokens.weight" in last


def test_two_daemons_do_not_share_a_runtime_directory(smollm2_dir: Path, tmp_path: Path) -> None:
    with serving("--model", str(smollm2_dir)) as server:
        second = launch(
            tmp_path, "--model", str(smollm2_dir), "--runtime-dir", str(server.runtime_dir)
        )
        assert second.process.wait(30) == 1
        assert f"in use by another loongd (pid {server.process.pid})" in second.log
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


def test_a_full_pool_preempts_and_everyone_finishes(smollm2_dir: Path) -> None:
    """Requests without max_tokens reserve little, so the pool overflows and one must step back."""
    with serving(
        *("--model", str(smollm2_dir), "--kv-pool-tokens", "80"),
        *("--default-reserve-tokens", "10", "--max-model-len", "130"),
        instances=2,
    ) as server:
        answers: list[Any] = []

        def chat(number: int) -> None:
            message = {"role": "user", "content": f"Tell a story about the number {number}."}
            answers.append(
                server.post(
                    "/v1/chat/completions",
                    {"messages": [message], "temperature": 0, "ignore_eos": True},
                )
            )

        threads = [threading.Thread(target=chat, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for status, answer in answers:
            assert status == 200, answer
            assert answer["usage"]["total_tokens"] == 130
        assert server.wait_empty()["totals"]["preempted"] > 0
