"""The engine against schedules computed by hand, and what must hold of any run."""

from itertools import pairwise

import pytest
from sim_kit import A800, HandCosts, random_trace, simulate

from loongd.sched.policies.fcfs import FirstComeFirstServed
from loongd.sched.policies.loongserve import LoongServe
from loongd.sched.policies.static import FixedGroups
from loongd.sched.policy import Decisions, Limits
from loongd.sched.sib import Sib
from loongd.sim.engine import StalledError
from loongd.sim.trace import TracedRequest

POLICIES = {
    "fcfs": FirstComeFirstServed,
    "replicas": lambda: FixedGroups(together=False),
    "static_sp": lambda: FixedGroups(together=True),
    "chunked": lambda: FixedGroups(together=True, chunked=True),
    "loongserve": lambda: LoongServe(Sib(A800)),
}


def test_one_request_by_hand():
    run = simulate(FixedGroups(together=True), [TracedRequest(5.0, 400, 3)], slots=[1000, 1000])
    (outcome,) = run.outcomes
    # Prefill on both: 1 + 0.001 * 400 / 2 = 1.2 s; then two decode steps of 10 ms.
    assert outcome.first_token_s == pytest.approx(6.2)
    assert outcome.end_s == run.end_s == pytest.approx(6.22)
    assert (outcome.ttft_s, outcome.tpot_s) == (pytest.approx(1.2), pytest.approx(0.010))
    assert outcome.num_tokens == 3
    assert run.busy_s == {
        "prefill": pytest.approx(2.4),
        "decode": pytest.approx(0.04),
        "migrate": 0.0,
    }


def test_three_requests_on_one_instance_by_hand():
    trace = [TracedRequest(0.0, 100, 2), TracedRequest(0.5, 200, 1), TracedRequest(0.6, 300, 3)]
    run = simulate(FixedGroups(together=True), trace, slots=[5000], record_steps=True)
    first, second, third = run.outcomes
    # 0.0 to 1.1: prefill of the first. The decode step that it is owed: to 1.11, its last token.
    # 1.11 to 2.61: prefill of both others, 1 + 0.5 s. Then two decode steps of the third.
    assert first.first_token_s == pytest.approx(1.1)
    assert first.end_s == pytest.approx(1.11)
    assert second.first_token_s == second.end_s == pytest.approx(2.61)
    assert third.ttft_s == pytest.approx(2.01)
    assert third.end_s == pytest.approx(2.63)
    assert [(s.kind, s.items) for s in run.steps] == [
        ("prefill", (("r0", 100),)),
        ("decode", (("r0", 1),)),
        ("prefill", (("r1", 200), ("r2", 300))),
        ("decode", (("r2", 1),)),
        ("decode", (("r2", 1),)),
    ]


def test_chunks_take_turns_with_decode_by_hand():
    trace = [TracedRequest(0.0, 100, 3), TracedRequest(0.5, 250, 1)]
    run = simulate(
        FixedGroups(together=True, chunked=True),
        trace,
        slots=[5000],
        limits=Limits(max_num_batched_tokens=120),
        record_steps=True,
    )
    assert [(s.kind, s.items) for s in run.steps] == [
        ("prefill", (("r0", 100),)),
        ("decode", (("r0", 1),)),
        ("prefill", (("r1", 120),)),
        ("decode", (("r0", 1),)),
        ("prefill", (("r1", 120),)),
        ("prefill", (("r1", 10),)),
    ]
    first, second = run.outcomes
    assert first.end_s == pytest.approx(1.1 + 0.01 + 1.12 + 0.01)
    assert second.end_s == pytest.approx(first.end_s + 1.12 + 1.01)


def test_replicas_work_side_by_side():
    trace = [TracedRequest(0.0, 100, 1), TracedRequest(0.0, 300, 1), TracedRequest(0.0, 500, 1)]
    run = simulate(FixedGroups(together=False), trace, slots=[600, 600])
    # r1 and r3 of the arrival numbers 1, 2, 3 share an instance: 1.1 s, then 1.5 s more.
    assert [o.end_s for o in run.outcomes] == [
        pytest.approx(1.1),
        pytest.approx(1.3),
        pytest.approx(2.6),
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_every_request_gets_exactly_its_tokens(policy, seed):
    trace = random_trace(seed, 60)
    run = simulate(POLICIES[policy](), trace, slots=[3200, 3200, 4000], record_steps=True)
    assert all(o.ok for o in run.outcomes), [o for o in run.outcomes if not o.ok][:3]
    assert [o.num_tokens for o in run.outcomes] == [r.output_tokens for r in trace]
    assert [o.arrival_s for o in run.outcomes] == [r.arrival_s for r in trace]
    decoded = sum(n for s in run.steps if s.kind == "decode" for _, n in s.items)
    assert decoded == sum(r.output_tokens - 1 for r in trace)
    assert run.totals.num_generated_tokens == sum(r.output_tokens for r in trace)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_instance_runs_two_steps_at_once(policy):
    run = simulate(POLICIES[policy](), random_trace(9, 80), slots=[4000, 4000], record_steps=True)
    for instance in range(2):
        spans = [(s.started_s, s.ended_s) for s in run.steps if instance in s.members]
        spans.sort()
        for (_, end_s), (start_s, _) in pairwise(spans):
            assert start_s >= end_s


@pytest.mark.parametrize("policy", POLICIES)
def test_runs_are_deterministic(policy):
    trace = random_trace(3, 60)

    def run(seed):
        return simulate(
            POLICIES[policy](), trace, slots=[4000] * 3, noise=0.2, seed=seed, record_steps=True
        )

    assert run(1) == run(1)
    assert run(1).end_s != run(2).end_s


def test_a_tight_pool_preempts_and_still_delivers():
    trace = [TracedRequest(0.0, 30, 40) for _ in range(8)]
    run = simulate(
        FixedGroups(together=True), trace, slots=[60, 60, 100], max_tokens=64, reserve_tokens=1
    )
    assert run.totals.num_preemptions > 0
    assert [o.num_tokens for o in run.outcomes] == [40] * 8


def test_what_can_never_fit_fails_with_the_numbers():
    trace = [TracedRequest(0.0, 700, 5), TracedRequest(0.0, 10, 5)]
    run = simulate(FixedGroups(together=False), trace, slots=[600, 600])
    long, short = run.outcomes
    assert short.ok
    assert "764" in long.failure
    assert "600" in long.failure


def test_oracle_reserves_just_the_output():
    # 2 x (90 + 10) fit 200 slots only when the scheduler knows the outputs.
    trace = [TracedRequest(0.0, 90, 10), TracedRequest(0.0, 90, 10)]
    known = simulate(FixedGroups(together=True), trace, slots=[200], oracle=True)
    guessed = simulate(FixedGroups(together=True), trace, slots=[200])
    # The first: 1.09 s of prefill, nine steps of 10 ms. The second prefills after the first of
    # these, or after all.
    assert known.outcomes[1].ttft_s == pytest.approx(1.09 + 0.01 + 1.09)
    assert guessed.outcomes[1].ttft_s == pytest.approx(1.09 + 0.09 + 1.09)


def test_overhead_is_added_to_every_step():
    trace = [TracedRequest(0.0, 100, 4)]
    plain = simulate(FixedGroups(together=True), trace, slots=[600])
    slow = simulate(FixedGroups(together=True), trace, slots=[600], overhead_s=0.5)
    assert slow.end_s - plain.end_s == pytest.approx(4 * 0.5)


class Lazy:
    """A policy that never starts anything."""

    steady_requests = 0
    steady_groups = False
    pays_decode = False

    def decide(self, view):
        return Decisions()


@pytest.mark.parametrize("tick_s", [0.0, 0.5])
def test_a_scheduler_that_stands_still_is_an_error(tick_s):
    with pytest.raises(StalledError, match="1 requests wait"):
        simulate(Lazy(), [TracedRequest(0.0, 5, 5)], slots=[100], tick_s=tick_s)


def test_decode_costs_see_the_batch():
    seen = []

    class Spy(HandCosts):
        def decode_s(self, **step):
            seen.append(step)
            return super().decode_s(**step)

    trace = [TracedRequest(0.0, 100, 3), TracedRequest(0.0, 200, 2)]
    simulate(FixedGroups(together=True), trace, slots=[5000, 5000], costs=Spy())
    # Both prompts arrive at 0.0, but the first starts alone; r1 joins after its owed step.
    assert seen == [
        {"dop": 2, "num_masters": 1, "batch": 1, "kv_tokens": 101},
        {"dop": 2, "num_masters": 1, "batch": 2, "kv_tokens": 303},
    ]
