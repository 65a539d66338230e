"""Serve a small model on the CPU and show what loongd does with three requests.

Uses the plain HTTP API with the standard library only, as any client could; the time bars come
from the admin socket, as `loongctl story` prints them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

from loongd import ctl, ctl_render

ROOT = Path(__file__).resolve().parents[1]
LONG_PROMPT_TOKENS = 6000
# Shared by all instances, so that with several the long prompt fits no single one.
POOL_TOKENS = 16384
STOP_TIMEOUT_S = 180


class DemoError(Exception):
    """Ends the demo with one line."""


@dataclass
class Answer:
    """What a request gave: `first_s` is None where the client cannot tell (no stream)."""

    request_ids: list[str]
    text: str
    prompt_tokens: int
    completion_tokens: int
    first_s: float | None
    total_s: float


# ---- the daemon -------------------------------------------------------------------------------


class Server:
    """A loongd of our own, on a free port, with its sockets and log in a directory of its own."""

    def __init__(self, args: argparse.Namespace, model: str, directory: Path) -> None:
        self.port = _free_port()
        self.directory = directory
        self.log = directory / "log"
        self._show = threading.Event()
        self._show.set()
        empty = directory / "loongd.toml"
        empty.touch()
        command = [sys.executable, "-m", "loongd", "--config", str(empty), "--model", model]
        command += ["--device", "cpu", "--dtype", args.dtype, "--instances", str(args.instances)]
        command += ["--kv-pool-tokens", str(POOL_TOKENS // args.instances)]
        command += ["--port", str(self.port), "--runtime-dir", str(directory)]
        print(f"$ loongd {' '.join(command[5:])}\n", flush=True)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={k: v for k, v in os.environ.items() if not k.startswith("LOONGD_")},
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the demo, which then stops the daemon in order.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._forward, daemon=True)
        self._reader.start()

    def _forward(self) -> None:
        assert self.process.stderr is not None
        with self.log.open("w") as log:
            for line in self.process.stderr:
                log.write(line)
                log.flush()
                if self._show.is_set():
                    print(f"  {line}", end="", flush=True)

    def wait_ready(self) -> float:
        """Seconds until the API takes requests. Raises DemoError when the daemon gives up."""
        begin = time.monotonic()
        while self.process.poll() is None:
            with contextlib.suppress(OSError):
                if self.request("GET", "/ready").status == 200:
                    self._show.clear()
                    return time.monotonic() - begin
            time.sleep(0.1)
        self._reader.join()
        raise DemoError(f"loongd ended with exit code {self.process.returncode} (its lines above)")

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        """One call of the HTTP API."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, headers)
        return connection.getresponse()

    def post(self, path: str, body: dict[str, Any]) -> HTTPResponse:
        """A call that must succeed. Raises DemoError with the API's own words."""
        response = self.request("POST", path, body)
        if response.status != 200:
            text = response.read().decode()
            raise DemoError(f"POST {path}: HTTP {response.status}: {text}")
        return response

    def story(self, request_ids: list[str]) -> dict[str, Any] | None:
        """The daemon's account of a request, by the first of its ids that it knows."""
        for request_id in request_ids:
            url = f"/admin/story/{request_id}"
            status, tale = ctl.call(str(self.directory / "admin.sock"), "GET", url)
            if status == 200:
                found: dict[str, Any] = tale["choices"][0] if "choices" in tale else tale
                return found
        return None

    def stop(self) -> int:
        """Ask the daemon to stop, as systemd does; its exit code."""
        self._show.set()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except KeyboardInterrupt:  # once more: loongd then stops without waiting for requests
            self.process.send_signal(signal.SIGTERM)
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise DemoError(f"loongd did not stop within {STOP_TIMEOUT_S} s") from None

    def kill(self) -> None:
        """Leave no process behind, however the demo ends: the daemon, then its workers."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self._reader.join()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- requests ---------------------------------------------------------------------------------


def chat(server: Server, question: str, max_tokens: int) -> Answer:
    """One chat completion, answered as a whole."""
    begin = time.monotonic()
    response = server.post("/v1/chat/completions", _body(question, max_tokens))
    body = json.load(response)
    total_s = time.monotonic() - begin
    usage, text = body["usage"], body["choices"][0]["message"]["content"]
    print(text.strip())
    return Answer(
        request_ids=[body["id"], response.headers.get("x-request-id", "")],
        text=text,
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        first_s=None,
        total_s=total_s,
    )


def stream_chat(server: Server, question: str, max_tokens: int) -> Answer:
    """One chat completion, printed as its tokens come."""
    body = _body(question, max_tokens)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    begin = time.monotonic()
    response = server.post("/v1/chat/completions", body)
    answer = Answer([], "", 0, 0, None, 0.0)
    for chunk in _events(response):
        if "error" in chunk:
            raise DemoError(f"the stream ended with: {chunk['error']['message']}")
        if not answer.request_ids:
            answer.request_ids = [chunk["id"], response.headers.get("x-request-id", "")]
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            if piece and answer.first_s is None:
                answer.first_s = time.monotonic() - begin
            answer.text += piece
            print(piece, end="", flush=True)
        if usage := chunk.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
    answer.total_s = time.monotonic() - begin
    print()
    return answer


def _body(question: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0}


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to `[DONE]`; comments keep a silent line alive."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def long_question(server: Server) -> str:
    """A diary of about 6,000 tokens that hides one fact, and a question for it."""
    weather = ("rain", "fog", "a calm sea", "wind from the north", "snow", "bright sun")
    work = ("painted the rail", "trimmed the lamp", "mended the boat", "counted the ships")
    days = [
        f"Day {n}. There was {weather[n % 6]}, and the keeper {work[n % 4]} until evening."
        for n in range(1, 600)
    ]
    # One day costs about as much as any other: measure some, then take as many as fit.
    sample = json.load(server.post("/tokenize", {"prompt": "\n".join(days[:100])}))["count"]
    days = days[: LONG_PROMPT_TOKENS * 100 // sample]
    days.insert(len(days) // 2, "That night the keeper hid the golden key under the blue boat.")
    diary = "\n".join(days)
    return f"{diary}\n\nWhere did the keeper of this diary hide the golden key?"


# ---- what is shown ----------------------------------------------------------------------------


def show(server: Server, answer: Answer) -> None:
    """Numbers and time bar of one request."""
    tale = server.story(answer.request_ids)
    first_s = answer.first_s if answer.first_s is not None else _first_token_s(tale)
    print(f"\n  {answer.prompt_tokens:,} tokens in, {answer.completion_tokens} out", end="")
    print(f", all in {ctl_render.seconds(answer.total_s)}", end="")
    if first_s is not None:
        print(f", first token after {ctl_render.seconds(first_s)}", end="")
        decode_s = answer.total_s - first_s
        if answer.completion_tokens > 1 and decode_s > 0:
            print(f", then {(answer.completion_tokens - 1) / decode_s:.1f} tokens/s", end="")
    print("\n")
    print(ctl_render.story(tale) if tale else "(the daemon has no story of this request)")


def _first_token_s(tale: dict[str, Any] | None) -> float | None:
    """When the last prefill ended, by the daemon's clock."""
    entries = tale["entries"] if tale else []
    ends = [e["at_s"] + (e.get("duration_s") or 0) for e in entries if e["event"] == "prefill"]
    return max(ends, default=None)


def show_requests(server: Server) -> None:
    """The three requests of the demo."""
    question = "What is the capital of France? Answer in one sentence."
    print(f"\n--- 1. a chat question: {question}\n")
    show(server, chat(server, question, 48))

    question = "Tell me three things about the moon."
    print(f"\n--- 2. the answer as a stream: {question}\n")
    show(server, stream_chat(server, question, 96))

    print(f"\n--- 3. a prompt of about {LONG_PROMPT_TOKENS:,} tokens: a diary that hides a fact")
    print("       (the keeper hid the golden key under the blue boat)")
    print("       it runs on several instances; on few cores that takes a while ...\n", flush=True)
    answer = stream_chat(server, long_question(server), 48)
    found = "found the fact" if "boat" in answer.text.lower() else "did not find the fact"
    print(f"\n  (the model {found}; one of 135M parameters often does not, served anywhere)")
    show(server, answer)


def keep(server: Server) -> None:
    """Serve until Ctrl-C."""
    url = f"http://127.0.0.1:{server.port}"
    loongctl = f"{Path(sys.executable).parent}/loongctl --runtime-dir {server.directory}"
    print(f"""
--- serving on {url} until Ctrl-C; log: {server.log}. In another terminal:

curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{{"messages": [{{"role": "user", "content": "Hello!"}}], "max_tokens": 32}}'
{loongctl} status --watch 1
{loongctl} story REQUEST   # "id" of an answer
""")
    code = server.process.wait()
    raise DemoError(f"loongd ended with exit code {code}: see {server.log}")


def main() -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(prog="tools/demo", description=__doc__)
    parser.add_argument("--instances", type=int, default=4, metavar="N", help="default: 4")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="default: float32")
    parser.add_argument("--keep", action="store_true", help="go on serving until Ctrl-C")
    args = parser.parse_args()
    if not 1 <= args.instances <= 64:
        parser.error("--instances: expected a number from 1 to 64")

    # A kill ends the demo the way Ctrl-C does, so that it never leaves a daemon behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    fetched = subprocess.run(
        [ROOT / "tools" / "fetch_model"], stdout=subprocess.PIPE, text=True, check=False
    )
    if fetched.returncode:
        return fetched.returncode
    with tempfile.TemporaryDirectory(prefix="loongd-demo-") as directory:
        server = Server(args, fetched.stdout.splitlines()[-1], Path(directory))
        try:
            return run(server, args)
        except (DemoError, OSError, HTTPException) as error:
            print(f"tools/demo: error: {error or type(error).__name__}", file=sys.stderr)
            return 1
        finally:
            server.kill()


def run(server: Server, args: argparse.Namespace) -> int:
    """The demo with a daemon that was just started; the exit code is the daemon's."""
    with contextlib.suppress(KeyboardInterrupt):
        print(f"\nready after {ctl_render.seconds(server.wait_ready())}", flush=True)
        show_requests(server)
        if args.keep:
            keep(server)
    print("\n--- stopping (SIGTERM: running requests finish first)", flush=True)
    code = server.stop()
    print(f"loongd ended with exit code {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
