"""The worker's main loop: receive a message, do it, answer.

Knows: the socket and the order of messages. Does not know: how a step is computed.
Synchronous on purpose: steps are the only work a worker has, and they run one after the other. But
while a step is with the device the socket is looked at, so that the step that follows it is queued
behind it and the device never waits for the host.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass

import msgspec
import zmq

from loongd.errors import LoongError, PlanError, StepRefusedError
from loongd.wire import (
    AuditRequest,
    Fatal,
    FreeSegments,
    Hello,
    KeepSegments,
    Progress,
    RunMigrate,
    RunStep,
    Start,
    StepDone,
    StepFailed,
    Stop,
    ToDaemon,
    ToWorker,
    decode_to_worker,
    encode,
)
from loongd.worker.flight import Flight, Landed
from loongd.worker.heart import Pulse
from loongd.worker.runner import Runner

_log = logging.getLogger(__name__)
_ORPHAN_CHECK_MS = 1000
_FLIGHT_CHECK_S = 20e-6
"""Between two looks at a step that is with the device."""


@dataclass(slots=True)
class _Started:
    """A step that is with the device."""

    step_id: int
    flight: Flight
    began_s: float


class WorkerLoop:
    """Serves one daemon until `Stop`, a fatal error, or the daemon's death."""

    def __init__(self, socket: zmq.Socket[bytes], instance: int, pulse: Pulse) -> None:
        self._socket = socket
        self._instance = instance
        self._pulse = pulse
        self._parent = os.getppid()
        self._epoch = 0
        self._runner: Runner | None = None
        self._started: deque[_Started] = deque()
        self._ended_s = 0.0

    def run(self) -> int:
        """Exit code: 0 after `Stop` or when the daemon is gone, 1 after a fatal error."""
        self._send(Hello(instance=self._instance, pid=os.getpid()))
        try:
            while (data := self._receive()) is not None:
                message = decode_to_worker(data)
                if isinstance(message, Stop):
                    break
                self._handle(message)
        except LoongError as error:
            return self._fail(str(error))
        except msgspec.ValidationError as error:
            return self._fail(f"bad message from the daemon: {error}")
        except Exception as error:  # noqa: BLE001 - the loop top: the daemon must learn of it
            _log.exception("instance %d failed", self._instance)
            return self._fail(f"{type(error).__name__}: {_first_line(error)}")
        return 0

    def _receive(self) -> bytes | None:
        """The next message; None when the daemon has died. Reports steps that end meanwhile."""
        while not self._socket.poll(0 if self._started else _ORPHAN_CHECK_MS):
            if self._started:
                if self._started[0].flight.ready():
                    self._report()
                else:
                    time.sleep(_FLIGHT_CHECK_S)
            elif os.getppid() != self._parent:
                return None
        return self._socket.recv()

    def _handle(self, message: ToWorker) -> None:
        if isinstance(message, Start):
            self._epoch = message.epoch
            self._runner = Runner.start(message, self._progress, self._pulse)
            self._send(self._runner.ready())
            return
        runner = self._runner
        if runner is None:
            raise PlanError(f"{type(message).__name__} before Start")
        match message:
            case RunStep() | RunMigrate():
                self._step(runner, message)
            case FreeSegments():
                runner.free(message.segments)
            case KeepSegments():
                runner.keep(message.segments)
            case AuditRequest():
                self._send(runner.audit())

    def _step(self, runner: Runner, step: RunStep | RunMigrate) -> None:
        if step.epoch != self._epoch:
            self._refuse(step, f"epoch {step.epoch}, this worker is in {self._epoch}")
            return
        while self._started and not (isinstance(step, RunStep) and step.follows):
            self._report()
        began_s = time.perf_counter()
        try:
            flight = self._launch(runner, step)
        except (LoongError, RuntimeError) as error:
            # With others in the step, they would wait for this worker: only alone can it go on,
            # or when all refuse. (All workers of a single member find the same PlanError.)
            together = len(step.members) == 1 and (runner.alone or isinstance(error, PlanError))
            if not (together or isinstance(error, StepRefusedError)):
                raise
            _log.warning("step %d failed: %s", step.step_id, _first_line(error))
            self._refuse(step, _first_line(error))
            return
        self._started.append(_Started(step.step_id, flight, began_s))
        if flight.ready():
            while self._started:
                self._report()

    def _report(self) -> None:
        """Wait for the oldest started step and tell the daemon."""
        started = self._started.popleft()
        sampled = started.flight.wait()
        now = time.perf_counter()
        # one that was queued behind another had the device only after that had ended
        elapsed_s = now - max(started.began_s, self._ended_s)
        self._ended_s = now
        self._send(
            StepDone(
                instance=self._instance,
                step_id=started.step_id,
                elapsed_s=elapsed_s,
                sampled=sampled,
            )
        )

    @staticmethod
    def _launch(runner: Runner, step: RunStep | RunMigrate) -> Flight:
        if isinstance(step, RunStep):
            return runner.launch(step)
        runner.migrate(step)
        return Landed([])

    def _refuse(self, step: RunStep | RunMigrate, message: str) -> None:
        self._send(StepFailed(instance=self._instance, step_id=step.step_id, message=message))

    def _progress(self, stage: str, fraction: float) -> None:
        self._send(Progress(instance=self._instance, stage=stage, fraction=fraction))

    def _send(self, message: ToDaemon) -> None:
        self._socket.send(encode(message))

    def _fail(self, message: str) -> int:
        self._send(Fatal(instance=self._instance, message=message))
        return 1


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
