"""Random events against the scheduler, judged by an independent model of the workers."""

from collections import Counter
from math import isfinite

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from sched_kit import make_sib
from sched_world import World, new_scheduler


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["loongserve", "loongserve", "loongserve", "fcfs"]),
    num_instances=st.integers(1, 8),
    num_events=st.integers(0, 120),
    tiny=st.booleans(),
    queue_ahead=st.booleans(),
)
def test_random_events(seed, policy, num_instances, num_events, tiny, queue_ahead):
    world = World(
        seed, num_instances=num_instances, tiny=tiny, policy=policy, queue_ahead=queue_ahead
    ).run(num_events)
    world.check_end()
    assert queue_ahead or not world.workers.num_queued
    event(f"parts: {world.workers.num_parts > 0}")
    event(f"queued ahead: {world.workers.num_queued > 0}")
    totals = world.scheduler.snapshot().totals
    event(f"preemptions: {totals.num_preemptions > 0}")
    event(f"scale-ups: {totals.num_scale_ups > 0}")
    event(f"scale-downs: {totals.num_scale_downs > 0}")


@pytest.mark.parametrize("policy", ["loongserve", "fcfs"])
@pytest.mark.parametrize("seed", range(6))
def test_replay_is_identical(seed, policy):
    tiny = seed % 2 == 0
    world = World(seed, num_instances=4, tiny=tiny, policy=policy).run(100)
    again = new_scheduler(policy, world.scheduler._state.limits, tiny=tiny)
    for past, actions in world.log:
        assert tuple(again.handle(past)) == actions


@pytest.mark.parametrize("queue_ahead", [False, True])
@pytest.mark.parametrize("policy", ["loongserve", "fcfs"])
def test_random_worlds_reach_the_rare_paths(policy, queue_ahead):
    seen = Counter()
    for seed in range(40):
        world = World(
            seed,
            num_instances=1 + seed % 8,
            tiny=seed % 4 > 0,
            policy=policy,
            queue_ahead=queue_ahead,
        ).run(150)
        world.check_end()
        seen["queued"] += world.workers.num_queued
        seen["moved"] += world.workers.num_moves
        seen["chunk"] += world.workers.num_chunks
        seen["part"] += world.workers.num_parts
        totals = world.scheduler.snapshot().totals
        seen["preempted"] += totals.num_preemptions
        seen["scaled up"] += totals.num_scale_ups
        seen["scaled down"] += totals.num_scale_downs
        seen["lost"] += totals.num_lost
        seen.update(world.workers.ended.values())
    expected = {"preempted", "scaled up", "scaled down", "lost", "length", "stop", "cancelled"}
    expected |= {"step_failed", "context_length_exceeded", "draining", "overloaded"}
    expected |= {"chunk", "moved", "part"} if policy == "loongserve" else {"chunk"}
    expected |= {"queued"} if queue_ahead else set()
    assert expected <= {name for name, count in seen.items() if count > 5}, seen


class Asking(World):
    """Asks after every event what would become of a prompt."""

    num_asked = 0

    def handle(self, event):
        super().handle(event)
        self.num_asked += 1
        tokens = (1, 300, 3_000, 60_000)[self.num_asked % 4]
        max_tokens = (1, 64, 4_000)[self.num_asked % 3]
        found = self.scheduler.predict(tokens, max_tokens, self.now)
        for seconds in (found.queue_s, found.prefill_s):
            assert isfinite(seconds), found
            assert seconds >= 0.0, found


@pytest.mark.parametrize("seed", range(20))
def test_predicted_times_are_finite_whatever_has_happened(seed):
    """Instances lost and back, drained daemons, answers longer than any before; for every other
    seed decode steps that are said to take no time."""
    world = Asking(
        seed,
        num_instances=1 + seed % 4,
        tiny=seed % 3 == 0,
        policy="fcfs" if seed % 5 == 4 else "loongserve",
    )
    if seed % 2:
        world.scheduler._sib.replace(make_sib(decode_s=0.0, kv_token_s=0.0, over_s=0.0).profile)
    world.run(100)
    assert world.num_asked > 50
