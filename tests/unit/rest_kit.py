"""A scripted engine, a tokenizer of bytes, and a server on loopback for the tests of `rest`."""

import asyncio
import json
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import tokenizers
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from tokenizers import decoders, models, pre_tokenizers, processors

from loongd.config import Config
from loongd.errors import RequestError
from loongd.metrics import Metrics
from loongd.rest.app import RestContext, make_app
from loongd.submission import Submission, Timings, Token, TokenStream
from loongd.text.tokenizer import Tokenizer

MODEL = "tiny"
BOS, EOS = 0, 1
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

Script = Callable[[Submission], tuple[Sequence[int | Token], str | RequestError | None]]


def make_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """One token a byte, and one of two: `b,`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(["<s>", "</s>", *alphabet, "b,"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("b", ",")]))
    backend.add_special_tokens(["<s>", "</s>"])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>"},
        bos_token_id=BOS,
        eos_token_ids=[EOS],
        templates={} if template is None else {"default": template},
    )


def ids(text: str) -> list[int]:
    """The tokens of a text, one for each byte."""
    tokenizer = make_tokenizer()
    by_byte = {tokenizer.token_bytes(i): i for i in range(2, tokenizer.vocab_size)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


class FakeEngine:
    """Answers each submission with its script; a script whose end is None leaves it open."""

    def __init__(self, script: Script | None = None, max_model_len: int = 100) -> None:
        self.script = script or say("hello")
        self.max_model_len = max_model_len
        self.ready = True
        self.alive = True
        self.draining = False
        self.refuse: RequestError | None = None
        self.refuse_after = 0
        self.submissions: list[Submission] = []
        self.streams: dict[str, TokenStream] = {}
        self.ended: list[str] = []
        self.cancelled: list[tuple[str, str]] = []
        self.changed = asyncio.Event()

    def submit(self, submission: Submission) -> TokenStream:
        if self.refuse is not None and len(self.submissions) >= self.refuse_after:
            raise self.refuse
        stream = TokenStream(submission.request_id, Timings(time.monotonic()), self._cancel)
        self.submissions.append(submission)
        self.streams[submission.request_id] = stream
        tokens, end = self.script(submission)
        for token in tokens:
            stream.put_token(token if isinstance(token, Token) else Token(token))
        if end is not None:
            self.end(stream, end)
        self.changed.set()
        return stream

    def end(self, stream: TokenStream, end: str | RequestError) -> None:
        """Finish a stream; `eos` is an end by the end-of-sequence token."""
        if end == "eos":
            stream.stop_token, end = EOS, "stop"
        stream.put_end(end)

    def _cancel(self, request_id: str, cause: str) -> None:
        self.cancelled.append((request_id, cause))
        self.changed.set()

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until the condition holds; it can only change with submissions and cancellations."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def status(self) -> dict[str, Any]:
        return {"node": {"state": "starting"}, "queue": {"running": 2, "waiting": 3}}

    def story(self, request_id: str) -> dict[str, Any] | None:
        return {"request_id": request_id} if request_id in self.streams else None

    def story_ids(self) -> tuple[list[str], list[str]]:
        return self.ended, [one for one in self.streams if one not in self.ended]

    def drain(self) -> None:
        self.draining = True

    def undrain(self) -> None:
        self.draining = False


def say(text: str, end: str | RequestError | None = "eos") -> Script:
    """A script that answers everything with one text."""
    return lambda submission: (ids(text), end)


def make_context(engine: FakeEngine, **changes: Any) -> RestContext:
    """A context for the tiny model; `config` is a dict of options."""
    options: dict[str, Any] = {
        "engine": engine,
        "tokenizer": make_tokenizer(),
        "config": Config(**changes.pop("config", {})),
        "model_name": MODEL,
        "vocab_size": 300,
        "metrics": Metrics(MODEL),
        "started_at": 1_700_000_000,
    }
    return RestContext(**(options | changes))


@asynccontextmanager
async def serve(engine: FakeEngine, **changes: Any) -> AsyncIterator[TestClient]:
    """A client of the public API."""
    async with TestClient(TestServer(make_app(make_context(engine, **changes)))) as client:
        yield client


async def error_of(response: ClientResponse, status: int) -> dict[str, Any]:
    """The error object of a response with this status; checks its shape."""
    body = await response.json()
    assert response.status == status, body
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


async def events_of(response: ClientResponse) -> list[Any]:
    """All frames of a stream: objects, comments as `: text`, and `[DONE]` last."""
    assert response.status == 200, await response.text()
    frames = (await response.text()).split("\n\n")
    assert frames.pop() == ""
    events: list[Any] = []
    for frame in frames:
        if frame.startswith(":"):
            events.append(frame)
            continue
        data = frame.removeprefix("data: ")
        assert data != frame
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def prompt_of(submission: Submission) -> str:
    """The prompt as text, special tokens included."""
    return make_tokenizer().decode(submission.prompt, skip_special_tokens=False)


def packed(*values: int) -> array:
    """Token ids as the engine gets them."""
    return array("i", values)
