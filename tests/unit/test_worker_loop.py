"""Which errors of a step the worker survives: it answers StepFailed, else Fatal, and goes on."""

from __future__ import annotations

from collections import deque

import pytest

from loongd.errors import PlanError, StepRefusedError, WorkerError
from loongd.wire import (
    Fatal,
    RunStep,
    Start,
    StepDone,
    StepFailed,
    Stop,
    ToDaemon,
    ToWorker,
    decode_to_daemon,
    encode,
)
from loongd.worker.flight import Flight, Landed
from loongd.worker.heart import Pulse
from loongd.worker.loop import WorkerLoop
from loongd.worker.runner import Runner

START = Start(
    rank=0,
    world_size=2,
    epoch=1,
    rendezvous="",
    model_dir="",
    load_format="dummy",
    dtype="float32",
    device="cpu",
    cores=[],
    kv_pool_tokens=10,
    gpu_memory_utilization=0.9,
    max_step_tokens=10,
    seed=0,
)


class Socket:
    """A daemon that has said all it will say."""

    def __init__(self, *messages: ToWorker) -> None:
        self._inbox = deque(encode(message) for message in messages)
        self.answers: list[ToDaemon] = []

    def poll(self, _: int) -> bool:
        return bool(self._inbox)

    def recv(self) -> bytes:
        return self._inbox.popleft()

    def send(self, data: bytes) -> None:
        self.answers.append(decode_to_daemon(data))


class Failing:
    """A runner whose first step fails."""

    def __init__(self, error: Exception, *, alone: bool) -> None:
        self.alone = alone
        self._errors = [error]

    def ready(self) -> StepDone:
        return StepDone(instance=0, step_id=0, elapsed_s=0.0, sampled=[])

    def launch(self, _: RunStep) -> Flight:
        if self._errors:
            raise self._errors.pop()
        return Landed([])


@pytest.mark.parametrize(
    ("error", "members", "alone", "survives"),
    [
        (StepRefusedError("no room"), [0, 1], True, True),
        (StepRefusedError("no room"), [0, 1], False, True),
        (StepRefusedError("no room"), [0], False, True),
        (WorkerError("out of memory"), [0], True, True),
        (WorkerError("out of memory"), [0, 1], True, False),
        (WorkerError("out of memory"), [0], False, False),
        (PlanError("no slots"), [0], False, True),
        (PlanError("no slots"), [0, 1], True, False),
        (RuntimeError("broken"), [0], True, True),
        (RuntimeError("broken"), [0], False, False),
    ],
)
def test_only_what_leaves_nobody_waiting_is_survived(
    error: Exception,
    members: list[int],
    alone: bool,
    survives: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Runner, "start", lambda *_: Failing(error, alone=alone))
    steps = [RunStep(step_id=n, epoch=1, members=members, batch=[]) for n in (1, 2)]
    socket = Socket(START, *steps, Stop())
    code = WorkerLoop(socket, 0, Pulse()).run()
    answers = socket.answers[2:]
    if survives:
        assert answers[0] == StepFailed(instance=0, step_id=1, message=str(error))
        assert isinstance(answers[1], StepDone)
        assert (answers[1].step_id, code) == (2, 0)
    else:
        (fatal,) = answers
        assert isinstance(fatal, Fatal)
        assert str(error) in fatal.message
        assert code == 1
