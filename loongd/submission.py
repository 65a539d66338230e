"""What the front end hands to the engine and what it gets back.

Knows: a request in tokens (`Submission`), its answer as an asynchronous stream of tokens
(`TokenStream`), and the little the front end may ask of an engine (`Engine`, a protocol so that
the front end is tested without workers).
Does not know: text, HTTP, scheduling.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from loongd.errors import RequestError
from loongd.wire import Sampling


@dataclass(frozen=True, slots=True)
class Submission:
    """One sequence to generate (a client call with n > 1 is n submissions).

    Args:
        request_id: unique in this daemon; appears in logs, metrics and stories.
        prompt: token ids, at least one.
        sampling: how tokens are drawn; `history` and `banned` stay empty here, the engine
            fills them for each step.
        max_tokens: hard limit on new tokens, at least 1.
        reserve_tokens: growth that admission counts on, 1 to `max_tokens`.
        stop_token_ids: ids that end the request (already empty of EOS when ignore_eos is set).
        min_tokens: stop ids are not drawn before this many tokens.
    """

    request_id: str
    prompt: array[int]
    sampling: Sampling
    max_tokens: int
    reserve_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """A drawn token. `top` holds (id, log-probability) of the best alternatives, best first."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Timings:
    """Monotonic seconds of a request's milestones; None until reached.

    `predicted_ttft_s` is a duration: what the engine expected on arrival, None when it cannot;
    `is_rough_ttft`: that rests on no measurement, or is an upper bound.
    """

    arrived_s: float
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    predicted_ttft_s: float | None = None
    is_rough_ttft: bool = False


@dataclass(slots=True)
class TokenStream:
    """The answer to one submission: iterate it for tokens; afterwards `finish_reason` is set.

    The stop token that ended the request is not yielded; `num_tokens` counts it. Iterating
    raises RequestError when the engine gives the request up. Whoever stops iterating early must
    call `cancel`; calling it twice, or after the end, is harmless.
    """

    request_id: str
    timings: Timings
    on_cancel: Callable[[str, str], None]
    finish_reason: str | None = None
    stop_token: int | None = None
    num_tokens: int = 0
    _queue: asyncio.Queue[Token | str | RequestError] = field(default_factory=asyncio.Queue)

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Token:
        if self.finish_reason is not None:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Token):
            return item
        if isinstance(item, RequestError):
            self.finish_reason = "error"
            raise item
        self.finish_reason = item
        raise StopAsyncIteration

    def drain_ready(self) -> list[Token]:
        """Tokens that have already arrived, without waiting (to merge small chunks)."""
        ready: list[Token] = []
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if not isinstance(item, Token):
                self._queue.put_nowait(item)
                break
            ready.append(item)
        return ready

    def cancel(self, cause: str) -> None:
        """Stop the request and free its slots; `cause` is client, stop, timeout, ..."""
        if self.finish_reason is None:
            self.finish_reason = cause
            self.on_cancel(self.request_id, cause)

    def refusal(self) -> RequestError | None:
        """Engine side: the error, if the request has failed before any token was taken."""
        first = None if self._queue.empty() else self._queue.get_nowait()
        return first if isinstance(first, RequestError) else None

    def put_token(self, token: Token) -> None:
        """Engine side: one more token."""
        self._queue.put_nowait(token)

    def put_end(self, end: str | RequestError) -> None:
        """Engine side: the finish reason, or the error that ended the request."""
        self._queue.put_nowait(end)


class Engine(Protocol):
    """What the front end may ask of the global manager."""

    @property
    def ready(self) -> bool:
        """All instances are up and the scheduler admits requests."""

    @property
    def alive(self) -> bool:
        """The engine makes progress; False once it has failed for good."""

    @property
    def draining(self) -> bool:
        """New requests are refused; running ones finish."""

    @property
    def max_model_len(self) -> int:
        """Most tokens (prompt and answer) that one request may have: model and pool allow it."""

    def submit(self, submission: Submission) -> TokenStream:
        """Queue a request. Raises RequestError at once if it can never or not now be served
        (503 when draining or the queue is full, 400 when it cannot fit the pool)."""

    def status(self) -> dict[str, Any]:
        """A JSON-able snapshot: node, instances, groups, pool, queue."""

    def story(self, request_id: str) -> dict[str, Any] | None:
        """A JSON-able account of one request's life; None when unknown."""

    def story_ids(self) -> tuple[list[str], list[str]]:
        """Ids of the ended and of the live requests that have a story, oldest first."""

    def plan(self, prompt_tokens: int, max_tokens: int) -> dict[str, Any] | None:
        """A JSON-able account of what would become of a prompt now; None when it cannot tell."""

    def drain(self) -> None:
        """Refuse new requests from now on."""

    def undrain(self) -> None:
        """Admit requests again."""
