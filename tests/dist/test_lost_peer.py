"""A peer that dies in mid-exchange, and a message that never comes, end in errors, not in waiting.

Real worker processes over sockets, a model without weights. What the daemon then does (restart,
requests go on) is shown by tests/e2e/test_failures.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from loongd.pool import WorkerLost, WorkerPool
from loongd.vigil import Vigil
from loongd.wire import Extend, RunStep, Sampling, Start, StepDone, pack_tokens

pytestmark = [pytest.mark.dist, pytest.mark.timeout(90)]

STALL_S = 4.0


@asynccontextmanager
async def _two_instances(directory: Path, model_dir: Path) -> AsyncIterator[WorkerPool]:
    starts = [
        Start(
            rank=rank,
            world_size=2,
            epoch=1,
            rendezvous=str(directory / "rendezvous"),
            model_dir=str(model_dir),
            load_format="dummy",
            dtype="float32",
            device="cpu",
            cores=[],
            kv_pool_tokens=100,
            gpu_memory_utilization=0.9,
            max_step_tokens=64,
            seed=0,
        )
        for rank in range(2)
    ]
    pool = WorkerPool(
        runtime_dir=directory,
        startup_timeout_s=60,
        vigil=Vigil(silence_s=30, stall_s=STALL_S),
        log_level="warning",
    )
    try:
        await pool.start(starts, lambda *_: None)
        yield pool
    finally:
        await pool.kill()
        await pool.stop()


def _striped_prefill(number: int) -> RunStep:
    extend = Extend(
        request_id="0",
        tokens=pack_tokens(list(range(3, 13))),
        start=0,
        master=None,
        segment=number,
        keep=[(0, 10)],
        cached=[],
        holders=[],
        sampling=Sampling(),
    )
    return RunStep(step_id=number, epoch=1, members=[0, 1], batch=[extend])


async def _losses(pool: WorkerPool, count: int) -> dict[int, str]:
    """Instance -> why, of the next losses; nothing else may be reported."""
    found: dict[int, str] = {}
    while len(found) < count:
        event = await asyncio.wait_for(pool.receive(), 20)
        assert isinstance(event, WorkerLost), event
        found[event.instance] = event.message
    return found


async def test_a_peer_killed_in_mid_exchange_is_an_error_at_once(
    tmp_path: Path, llama_dir: Path
) -> None:
    """A step goes well; in the next, instance 1 leaves instance 0 waiting, and then dies."""
    async with _two_instances(tmp_path, llama_dir) as pool:
        for instance in (0, 1):
            pool.send(instance, _striped_prefill(1))
        for _ in range(2):
            assert isinstance(await asyncio.wait_for(pool.receive(), 20), StepDone)
        (victim,) = pool.pids[1]
        os.kill(victim, signal.SIGSTOP)
        for instance in (0, 1):
            pool.send(instance, _striped_prefill(2))
        await asyncio.sleep(0.5)
        os.kill(victim, signal.SIGKILL)
        losses = await _losses(pool, 2)
        assert losses[1] == "worker process was killed by signal 9"
        assert losses[0].startswith("another worker does not answer: "), "and not by the clock"


async def test_a_message_that_never_comes_is_an_error_within_seconds(
    tmp_path: Path, llama_dir: Path
) -> None:
    """Instance 1 has not been told of the step: both live, and instance 0 would wait for ever."""
    async with _two_instances(tmp_path, llama_dir) as pool:
        pool.send(0, _striped_prefill(1))
        losses = await _losses(pool, 1)
        assert "hung in a step" in losses[0]
