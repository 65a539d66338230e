"""What becomes of a manager whose requests are given up in the middle of a step."""

import asyncio
from array import array

import pytest
from sched_kit import make_sib

from loongd.errors import RequestError
from loongd.manager import GlobalManager
from loongd.metrics import Metrics
from loongd.rest.errors import error_response
from loongd.sched.policies import make_policy
from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler
from loongd.submission import Submission
from loongd.wire import Ready, RunStep, Sampled, Sampling, StepDone


class OnePool:
    """One instance, whose reports the test makes up."""

    def __init__(self):
        self.sent = []
        self.reports = asyncio.Queue()

    async def start(self, starts, on_progress):
        return [Ready(0, 3_000, 1, 1, "cpu", "reference")]

    def send(self, instance, message):
        self.sent.append(message)

    async def receive(self):
        return await self.reports.get()


async def test_a_step_that_ends_after_its_requests_were_given_up_is_no_error():
    pool, sib = OnePool(), make_sib()
    scheduler = Scheduler(make_policy("loongserve", sib), Limits(), sib)
    manager = GlobalManager(scheduler, pool, Metrics("m"), model_limit_tokens=10_000, node={})
    await manager.start(lambda _epoch: [], lambda *_: None)
    running = asyncio.ensure_future(manager.run(lambda _epoch: [], lambda *_: None))
    stream = manager.submit(
        Submission("r", array("i", [1]) * 20, Sampling(), max_tokens=9, reserve_tokens=9)
    )
    await asyncio.sleep(0)
    (step,) = [message for message in pool.sent if isinstance(message, RunStep)]
    manager.give_up()
    pool.reports.put_nowait(StepDone(0, step.step_id, 0.1, [Sampled("r", 7)]))
    await asyncio.wait_for(running, 5.0)
    with pytest.raises(RequestError, match="shutting down") as caught:
        async for _ in stream:
            pass
    assert error_response(caught.value).headers["Retry-After"] == "5"
