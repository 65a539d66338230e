"""The workers lent to one caller, who sends them steps of its own while nobody is served.

Knows: the instances, the epoch, and how their reports are collected. Does not know: what the
steps are for, or who else may want the workers (the manager does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

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
_IN_FLIGHT = 2
"""Steps in a row that the members have at a time: one that runs, and the next (`sched.ahead`)."""


class Exclusive:
    """Runs one step, or one row of steps, at a time. Ids of steps are negative, so that none is
    taken for the scheduler's; a report that comes late, after its waiter has gone, is skipped by
    its id."""

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
        (elapsed_s,) = await self.run_row([step])
        return elapsed_s

    async def run_row(self, steps: Sequence[RunStep | RunMigrate]) -> list[float]:
        """Run steps, each of which follows the one before, as they are served: the next is queued
        on the members while one runs. Seconds of each, as `run`. Raises WorkerError."""
        missing = {step.step_id: set(step.members) for step in steps}
        elapsed_s = dict.fromkeys(missing, 0.0)
        to_send = iter(steps)
        self._send_all(islice(to_send, _IN_FLIGHT))
        for step in steps:
            while missing[step.step_id]:
                event = await self._receive()
                if isinstance(event, Audit) or event.step_id not in missing:
                    continue
                if isinstance(event, StepFailed):
                    raise WorkerError(f"instance {event.instance}: {event.message}")
                missing[event.step_id].discard(event.instance)
                slowest_s = max(elapsed_s[event.step_id], event.elapsed_s)
                elapsed_s[event.step_id] = slowest_s
            self._send_all(islice(to_send, 1))
        return list(elapsed_s.values())

    def _send_all(self, steps: Iterable[RunStep | RunMigrate]) -> None:
        for step in steps:
            for member in step.members:
                self._send(member, step)

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
