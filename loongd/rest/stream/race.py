"""All choices of one call, as one sequence of pieces in the order they arrive.

Knows: how to wait for several answers at once, and that leaving must cancel them.
Does not know: what the pieces become.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from loongd.errors import RequestError
from loongd.rest.stream.answer import Answer, Delta


class Race:
    """Use as `async with`: on leaving, for whatever reason, unfinished answers are cancelled."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self._waiting: dict[asyncio.Task[Delta], int] = {}
        self._done: list[asyncio.Task[Delta]] = []

    async def __aenter__(self) -> Race:
        for index in range(len(self.answers)):
            self._ask(index)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cause = "error" if isinstance(error, RequestError) else "client"
        for answer in self.answers:
            answer.stream.cancel(cause)
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._waiting, return_exceptions=True)

    @property
    def finished(self) -> bool:
        """Every answer has given its last piece."""
        return not self._waiting

    async def next(self, silence_s: float | None = None) -> tuple[int, Delta] | None:
        """The next piece and the index of its answer; None when `silence_s` passed without one.

        Raises RequestError when the engine gave up one of the requests. Must not be called once
        `finished`.
        """
        if not self._done:
            done, _ = await asyncio.wait(
                self._waiting, timeout=silence_s, return_when=asyncio.FIRST_COMPLETED
            )
            self._done = sorted(done, key=self._waiting.__getitem__, reverse=True)
        if not self._done:
            return None
        task = self._done.pop()
        index = self._waiting.pop(task)
        delta = task.result()
        if not self.answers[index].finished:
            self._ask(index)
        return index, delta

    def _ask(self, index: int) -> None:
        self._waiting[asyncio.create_task(self.answers[index].next())] = index
