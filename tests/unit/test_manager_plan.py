"""What the manager adds to a prediction: the states in which nothing is served, and roughness."""

import asyncio
from array import array
from typing import ClassVar

import pytest
from sched_kit import make_sib

from loongd.errors import RequestError
from loongd.manager import GlobalManager
from loongd.metrics import Metrics
from loongd.sched.policies import make_policy
from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler
from loongd.submission import Submission
from loongd.wire import Ready, Sampling


class SilentPool:
    """Two instances that are ready and never answer."""

    pids: ClassVar = {}

    async def start(self, starts, on_progress):
        return [Ready(instance, 3_000, 1, 1, "cpu", "reference") for instance in range(2)]

    def send(self, instance, message):
        pass


def make_manager(metrics=None):
    sib = make_sib()
    scheduler = Scheduler(make_policy("loongserve", sib), Limits(), sib)
    manager = GlobalManager(
        scheduler, SilentPool(), metrics or Metrics("m"), model_limit_tokens=10_000, node={}
    )
    asyncio.run(manager.start(lambda _epoch: [], lambda *_: None))
    return manager


def submission(name, prompt, max_tokens, reserve):
    tokens = array("i", [1]) * prompt
    return Submission(name, tokens, Sampling(), max_tokens=max_tokens, reserve_tokens=reserve)


def test_a_plan_while_nothing_is_refused():
    answer = make_manager().plan(100, 10)
    assert (answer["dop"], answer["rough"], answer["at_most"]) == (1, False, False)
    assert answer["ttft_s"] == pytest.approx(0.11)


def test_a_plan_while_draining_says_so():
    manager = make_manager()
    manager.drain()
    answer = manager.plan(100, 10)
    assert answer["dop"] == 0
    assert answer["ttft_s"] == 0.0
    assert answer["reason"].startswith("draining")
    assert manager.plan(50_000, 10)["reason"].startswith("draining"), "whatever else is wrong"
    manager.undrain()
    assert manager.plan(100, 10)["dop"] == 1
    assert "more than the 6,000" in manager.plan(50_000, 10)["reason"]


def test_a_plan_while_the_speed_is_measured_says_so():
    manager = make_manager()
    with manager.exclusive():
        answer = manager.plan(100, 10)
        assert answer["dop"] == 0
        assert answer["reason"].startswith("profiling")
        with pytest.raises(RequestError):
            manager.submit(submission("r", 100, 10, 10))
    assert manager.plan(100, 10)["dop"] == 1


def test_a_stream_knows_whether_its_predicted_time_is_rough():
    manager = make_manager()
    timings = manager.submit(submission("a", 100, 2_900, 2_900)).timings
    assert (timings.predicted_ttft_s, timings.is_rough_ttft) == (pytest.approx(0.11), False)
    manager.submit(submission("b", 100, 2_900, 2_900))
    # 100 slots may be needed, 0 are left: it waits until one of the two has ended.
    timings = manager.submit(submission("c", 50, 50, 50)).timings
    assert timings.is_rough_ttft
    assert timings.predicted_ttft_s > 2_900 * 0.010


def test_the_reservation_of_a_submission_counts_not_its_limit():
    manager = make_manager()
    manager.submit(submission("a", 2_000, 3_000, 1_000))
    # Of 6,000 slots 3,000 are left; with its limit instead, `b` would need 3,100.
    timings = manager.submit(submission("b", 200, 2_900, 100)).timings
    assert not timings.is_rough_ttft


def test_stories_are_known_while_a_request_lives_and_after():
    manager = make_manager()
    streams = [manager.submit(submission(name, 10, 5, 5)) for name in ("a", "b", "c")]
    streams[1].cancel("client")
    assert manager.story_ids() == (["b"], ["a", "c"])
    assert manager.story("b")["state"] == "cancelled"
    assert manager.story("nobody") is None


def test_the_status_counts_requests_as_the_metrics_do():
    """Those that came and those that were refused, by whomever; only accepted ones can fail."""
    metrics = Metrics("m")
    manager = make_manager(metrics)
    manager.submit(submission("a", 10, 5, 5))
    metrics.request_rejected("invalid_request")  # as the API does for what is no request
    manager.drain()
    with pytest.raises(RequestError, match="draining"):
        manager.submit(submission("b", 10, 5, 5))
    metrics.request_rejected("draining")  # as the API does for this one
    totals = manager.status()["totals"]
    assert (totals["started"], totals["rejected"], totals["failed"]) == (3, 2, 0)
    assert totals["failed_by_code"] == {}
