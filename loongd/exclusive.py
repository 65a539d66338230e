"""The workers lent to one caller, who sends them steps of its own while nobody is served.

Knows: the instances, the epoch, and how their reports are collected. Does not know: what the
steps are for, or who else may want the workers (the manager does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from loongd.errors import WorkerError
from loongd.pool import PoolEvent, WorkerLost
from loongd.wire import (
    Audit,
    AuditRequest,
    FreeSegments,
    Ready,
    RunMigrate,
    RunStep,
    StepDone,
    StepFailed,
    ToWorker,
)

Send = Callable[[int, ToWorker], None]


class Exclusive:
    """Runs one step at a time. Ids of steps are negative, so that none is taken for the
    scheduler's; a report that comes late, after its waiter has gone, is skipped by its id."""

    def __init__(self, send: Send, instances: Iterable[Ready], epoch: int) -> None:
        self._send = send
        self._inbox: asyncio.Queue[PoolEvent] = asyncio.Queue()
        self._last_step = 0
        self.instances = tuple(sorted(instances, key=lambda ready: ready.instance))
        self.epoch = epoch

    def put(self, event: PoolEvent) -> None:
        """Owner's side: a worker's report, or its loss."""
        self._inbox.put_nowait(event)

    def next_step_id(self) -> int:
        """An id for a step."""
        self._last_step -= 1
        return self._last_step

    async def run(self, step: RunStep | RunMigrate) -> float:
        """Run a step on its members; seconds that the slowest took. Raises WorkerError."""
        for member in step.members:
            self._send(member, step)
        missing = set(step.members)
        elapsed_s = 0.0
        while missing:
            event = await self._receive()
            if isinstance(event, Audit) or event.step_id != step.step_id:
                continue
            if isinstance(event, StepFailed):
                raise WorkerError(f"instance {event.instance}: {event.message}")
            missing.discard(event.instance)
            elapsed_s = max(elapsed_s, event.elapsed_s)
        return elapsed_s

    def free(self, segments: Sequence[int]) -> None:
        """Free segments on all instances, after the steps sent so far."""
        if segments:
            for ready in self.instances:
                self._send(ready.instance, FreeSegments(segments=list(segments)))

    async def num_used(self) -> int:
        """Slots that the workers count as used. Raises WorkerError."""
        for ready in self.instances:
            self._send(ready.instance, AuditRequest())
        missing = {ready.instance for ready in self.instances}
        used = 0
        while missing:
            event = await self._receive()
            if isinstance(event, Audit):
                missing.discard(event.instance)
                used += event.used
        return used

    async def _receive(self) -> StepDone | StepFailed | Audit:
        event = await self._inbox.get()
        if isinstance(event, WorkerLost):
            raise WorkerError(f"instance {event.instance} is lost: {event.message}")
        return event
