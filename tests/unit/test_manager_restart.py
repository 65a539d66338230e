"""What the manager says of its instances while they start again, and counts."""

import asyncio
from array import array

from sched_kit import make_sib

from loongd.manager import GlobalManager
from loongd.metrics import Metrics
from loongd.pool import WorkerLost
from loongd.sched.policies import make_policy
from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler
from loongd.submission import Submission
from loongd.wire import Ready, Sampling


class SlowPool:
    """Two instances; they are up when the test says so."""

    def __init__(self):
        self.pids = {}
        self.up = asyncio.Event()
        self.starts = asyncio.Event()
        self.listens = asyncio.Event()
        self.reports = asyncio.Queue()

    def send(self, instance, message):
        pass

    async def start(self, starts, on_progress):
        self.starts.set()
        await self.up.wait()
        return [Ready(instance, 3_000, 1, 1, "cpu", "reference") for instance in range(2)]

    async def receive(self):
        self.listens.set()
        return await self.reports.get()

    async def kill(self):
        for event in (self.up, self.starts, self.listens):
            event.clear()


async def test_the_status_names_the_lost_instance_until_all_are_up_again():
    pool, sib = SlowPool(), make_sib()
    scheduler = Scheduler(make_policy("loongserve", sib), Limits(), sib)
    metrics = Metrics("m")
    manager = GlobalManager(scheduler, pool, metrics, model_limit_tokens=10_000, node={})

    def states():
        status = manager.status()
        return status["node"]["state"], [one["state"] for one in status["instances"]]

    pool.up.set()
    await manager.start(lambda _epoch: [], lambda *_: None)
    running = asyncio.create_task(manager.run(lambda _epoch: [], lambda *_: None))
    assert states() == ("ready", ["ready", "ready"])
    prompt = array("i", [1]) * 20
    manager.submit(Submission("r", prompt, Sampling(), max_tokens=9, reserve_tokens=9))
    async with asyncio.timeout(5):
        await pool.listens.wait()
        pool.starts.clear()
        pool.reports.put_nowait(WorkerLost(0, "worker process was killed by signal 9"))
        await pool.starts.wait()
        assert states() == ("starting", ["lost", "starting"])
        pool.up.set()
        await pool.listens.wait()
    assert states() == ("ready", ["ready", "ready"])
    running.cancel()
    counts = {"engine_restarts": 1, "requests_restarted": 1, "num_preemptions": 0}
    for name, count in counts.items():
        assert f'loongd:{name}_total{{engine="0",model_name="m"}} {count:.1f}' in (
            metrics.render()[0].decode()
        )
