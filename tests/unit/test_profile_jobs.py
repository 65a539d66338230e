"""Runs of steps: in rounds, in bursts, and decode steps in a row as they are served."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
from profile_kit import FakeWorkers

from loongd.errors import WorkerError
from loongd.exclusive import Exclusive
from loongd.profiling import grid
from loongd.profiling.bench import Bench
from loongd.profiling.jobs import Job, burst, repeat
from loongd.profiling.session import _noise
from loongd.wire import RunStep, StepDone, StepFailed, ToWorker
from loongd.worker.kvcache import KvCache


class Steps:
    """Jobs whose steps take 10, 20, ... ms; `ran` says in which order, `now` what time it is."""

    def __init__(self, count: int) -> None:
        self.ran: list[int] = []
        self.now = 0.0
        self.jobs = [self._job(number) for number in range(count)]

    def _job(self, number: int) -> Job:
        async def run() -> list[float]:
            self.ran.append(number)
            self.now += 0.01 * (number + 1)
            return [0.01 * (number + 1)]

        return Job(run)


async def test_repetitions_come_in_rounds_of_changing_order() -> None:
    steps = Steps(6)
    effort = dataclasses.replace(grid.QUICK, point_s=0.2, max_rounds=7)
    done = [share async for share in repeat(steps.jobs, effort)]
    rounds = [len(one.times) for one in steps.jobs]
    assert rounds == [7, 7, 6, 5, 4, 3]
    assert done == sorted(done)
    assert done[-1] == pytest.approx(1.0)
    assert steps.ran[:6] == [*range(6)]
    orders = [tuple(steps.ran[at : at + 6]) for at in (0, 6, 12)]
    assert all(sorted(order) == [*range(6)] for order in orders)
    assert len(set(orders)) == 3


@pytest.mark.parametrize(("budget_s", "num_runs"), [(0.1, 12), (0.5, 13), (10.0, 32)])
async def test_when_time_is_up_each_step_has_run_twice(budget_s: float, num_runs: int) -> None:
    steps = Steps(6)
    effort = dataclasses.replace(grid.QUICK, point_s=0.2, max_rounds=7)
    shares = repeat(steps.jobs, effort, budget_s, clock=lambda: steps.now)
    done = [share async for share in shares]
    assert done[-1] == 1.0
    assert min(len(job.times) for job in steps.jobs) >= 2
    assert len(steps.ran) == pytest.approx(num_runs, abs=1)


async def test_when_time_is_up_each_step_has_run_as_often_as_it_must() -> None:
    steps = Steps(6)
    effort = dataclasses.replace(grid.QUICK, min_rounds=4, max_rounds=9)
    shares = repeat(steps.jobs, effort, 0.1, clock=lambda: steps.now)
    done = [share async for share in shares]
    assert done == sorted(done)
    assert [len(job.times) for job in steps.jobs] == [4] * 6


@pytest.mark.parametrize(("limit_s", "num_runs"), [(0.01, 18), (0.9, 26), (1.3, 37), (100.0, 54)])
async def test_past_the_limit_no_step_runs_that_has_run_three_times(
    limit_s: float, num_runs: int
) -> None:
    """A round takes 0.21 s; nine rounds are wanted, five at least."""
    steps = Steps(6)
    effort = dataclasses.replace(grid.QUICK, min_rounds=5, max_rounds=9, point_s=9.0)
    shares = repeat(steps.jobs, effort, limit_s=limit_s, clock=lambda: steps.now)
    done = [share async for share in shares]
    assert done == sorted(done)
    assert done[-1] == 1.0
    assert min(len(job.times) for job in steps.jobs) >= grid.LEAST_ROUNDS
    assert len(steps.ran) == pytest.approx(num_runs, abs=2)


async def test_a_burst_lasts_and_its_first_step_does_not_count() -> None:
    times = iter([0.05, 0.02, 0.01, 0.02, 9.0])

    async def run() -> float:
        return next(times)

    job = Job(lambda: burst(run, 0.09))
    await job.measure()
    assert (job.times, job.cost_s) == ([0.02], pytest.approx(0.10))
    assert await burst(run, 0.0) == [9.0]


def test_one_step_that_scatters_is_not_typical() -> None:
    assert _noise([0.02, 3.0, 0.01]) == 0.02
    assert _noise([]) == 0.0


async def test_a_row_of_steps_has_one_queued_behind_the_one_that_runs() -> None:
    sent: list[tuple[int, int]] = []
    exclusive = Exclusive(lambda to, step: sent.append((to, step.step_id)), [], epoch=1)
    steps = [RunStep(step_id=-i, epoch=1, members=[0, 1], batch=[]) for i in (1, 2, 3, 4)]
    row = asyncio.ensure_future(exclusive.run_row(steps))

    async def report(member: int, step_id: int, elapsed_s: float) -> None:
        exclusive.put(StepDone(member, step_id, elapsed_s, []))
        for _ in range(5):
            await asyncio.sleep(0)

    await asyncio.sleep(0)
    assert sent == [(0, -1), (1, -1), (0, -2), (1, -2)]
    await report(0, -1, 0.1)
    await report(0, -2, 0.5)  # the other member is late
    assert len(sent) == 4
    await report(1, -1, 0.2)
    assert sent[4:] == [(0, -3), (1, -3)]
    await report(1, -2, 0.4)
    assert sent[6:] == [(0, -4), (1, -4)]
    for step_id in (-3, -4):
        await report(0, step_id, 0.3)
        await report(1, step_id, 0.3)
    assert await row == [0.2, 0.5, 0.3, 0.3]


async def test_a_step_that_fails_ends_its_row() -> None:
    exclusive = Exclusive(lambda _to, _step: None, [], epoch=1)
    row = asyncio.ensure_future(
        exclusive.run_row([RunStep(step_id=-i, epoch=1, members=[0], batch=[]) for i in (1, 2, 3)])
    )
    exclusive.put(StepDone(0, -1, 0.1, []))
    exclusive.put(StepFailed(0, -2, "no room"))
    with pytest.raises(WorkerError, match="instance 0: no room"):
        await row


def spied(workers: FakeWorkers) -> list[RunStep]:
    """What instance 0 will have been sent."""
    sent: list[RunStep] = []
    deliver = workers.send

    def spy(instance: int, message: ToWorker) -> None:
        if isinstance(message, RunStep) and instance == 0:
            sent.append(message)
        deliver(instance, message)

    workers.send = spy  # type: ignore[method-assign]
    return sent


@pytest.mark.parametrize("dop", [1, 2])
async def test_what_chunks_read_lies_as_a_long_prompt_does(dop: int) -> None:
    """In a worker's pool, which is empty but for what is short."""
    workers = FakeWorkers(dop)
    sent = spied(workers)
    with workers.exclusive() as exclusive:
        bench = Bench(exclusive, vocab_size=300, max_tokens=8192)
        bench.group(dop)
        await bench.fill(60, 4096)
        bench.clear()
    kv = KvCache(
        num_layers=1,
        num_slots=20_000,
        num_kv_heads=1,
        head_dim=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    kv.extend(1, np.arange(30))
    blocks = []
    for extend in (extend for step in sent for extend in step.batch):
        count = dict(extend.keep)[0]
        slots = kv.extend(extend.segment, np.arange(count), after=extend.cached)
        if count == 60 // dop:
            blocks.append(slots)
    assert len(blocks) == grid.NUM_BLOCKS
    assert (np.diff(np.concatenate(blocks)) == 1).all()


@pytest.mark.parametrize(("max_tokens", "step_tokens"), [(8192, 2000), (130, 4096)])
async def test_no_step_of_a_fill_is_longer_than_asked(max_tokens: int, step_tokens: int) -> None:
    workers = FakeWorkers(2)
    sent = spied(workers)
    with workers.exclusive() as exclusive:
        bench = Bench(exclusive, vocab_size=300, max_tokens=max_tokens)
        bench.group(2)
        await bench.fill(70, step_tokens)
        bench.clear()
    assert workers.num_used == 0
    assert len(sent) < 20, "many blocks a step"
    for step in sent:
        assert sum(len(extend.tokens) // 4 for extend in step.batch) <= step_tokens
        assert all(extend.start + len(extend.tokens) // 4 <= max_tokens for extend in step.batch)


async def test_a_row_of_decode_steps_is_what_the_daemon_would_send() -> None:
    """The first names its tokens, each later one follows, and the new tokens have a segment."""
    workers = FakeWorkers(2)
    sent = spied(workers)
    with workers.exclusive() as exclusive:
        bench = Bench(exclusive, vocab_size=300, max_tokens=4096)
        bench.group(2)
        await bench.fill(8, 256)
        sent.clear()
        times = await bench.decode(num_masters=2, blocks=(3, 0, 1), num_steps=4)
        bench.clear()
    assert len(times) == len(sent) == 4
    assert workers.num_used == 0
    assert [step.follows for step in sent] == [0, *(step.step_id for step in sent[:3])]
    for number, step in enumerate(sent):
        assert [extend.start for extend in step.batch] == [24 + number, 16 + number, 8 + number]
        assert [extend.master for extend in step.batch] == [0, 1, 0]
        for extend, first in zip(step.batch, sent[0].batch, strict=True):
            assert len(extend.tokens) == (0 if number else 4)
            assert extend.segment == first.segment
            assert extend.cached == [*first.cached, *([first.segment] if number else [])]
    # the third step is the middle one of those that count: its requests read so many tokens
    assert bench.kv_tokens((3, 0, 1), 4) == sum(extend.start + 1 for extend in sent[2].batch)
