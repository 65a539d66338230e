"""Predicted times of bursts: each request is asked about as it arrives, and then served."""

from itertools import pairwise
from pathlib import Path

import pytest
from sched_kit import VirtualTime, make_sib

from loongd.sched.plan import PrefillPlan
from loongd.sched.policies.static import FixedGroups
from loongd.sched.sib import ModelFacts, Sib, default_profile
from loongd.sim.systems import load_profile

PROFILES = Path(__file__).resolve().parents[2] / "etc" / "profiles"
SMALL = ModelFacts(
    name="135M",
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    element_bytes=4,
)


def sib_of(device):
    if device == "cpu":
        return Sib(default_profile(SMALL, "cpu"))
    return Sib(load_profile(device, PROFILES))


def predict(world, tokens, max_tokens):
    world.scheduler._sib = world.sib
    found = world.scheduler.predict(tokens, max_tokens, world.now)
    world.scheduler._sib = None  # corrections would follow the steps
    return found


def burst(world, lengths, max_tokens=64):
    """Predicted TTFT of each, asked just before it arrives; all at the same time."""
    predicted = []
    for number, tokens in enumerate(lengths):
        found = predict(world, tokens, max_tokens)
        predicted.append(found.queue_s + found.prefill_s)
        world.arrive(f"r{number}", tokens, max_tokens)
    world.run()
    return [one / world.ttft_s(f"r{number}") for number, one in enumerate(predicted)]


BURSTS = [(50, 4), (50, 16), (500, 16), (500, 40), (5000, 8)]
CASES = [
    *(
        ("h200-llama2-7b-tp1", num_instances, *burst)
        for num_instances in (1, 2)
        for burst in BURSTS
    ),
    *(("cpu", 1, *burst) for burst in BURSTS),
    *(("cpu", 2, *burst) for burst in BURSTS if burst[0] != 500),
]
"""500 tokens are long on a CPU. Of two instances that both answer such prompts have one, which is
not foretold."""


@pytest.mark.parametrize(("device", "num_instances", "tokens", "count"), CASES)
def test_the_last_of_a_burst_is_told_how_long_those_ahead_take(
    device, num_instances, tokens, count
):
    """Of the others some are prefilled together with later ones, of which nobody knew."""
    slots = [400_000] * num_instances
    world = VirtualTime(*slots, sib=sib_of(device), num_layers=30)
    ratios = burst(world, [tokens] * count)
    assert 0.9 < ratios[-1] < 1.4
    assert max(ratios) < 1.4


@pytest.mark.parametrize("policy", ["fcfs", FixedGroups(together=False)])
@pytest.mark.parametrize("num_instances", [1, 2])
def test_where_decode_has_no_share_it_has_a_step(num_instances, policy):
    slots = [400_000] * num_instances
    world = VirtualTime(*slots, sib=sib_of("h200-llama2-7b-tp1"), policy=policy, num_layers=32)
    assert burst(world, [5000] * 8) == pytest.approx([1.0] * 8, rel=0.05)


def test_between_prefills_decode_has_its_share():
    """Each prefill takes 0.26 s; decode gets 13 steps of 10 ms behind it, or as many as there are
    tokens to come."""
    for max_tokens, steps in ((200, 13), (5, 4), (1, 0)):
        world = VirtualTime(50_000)
        ratios = burst(world, [250] * 4, max_tokens)
        starts_s = [start_s for start_s, _, plan in world.plans if isinstance(plan, PrefillPlan)]
        assert starts_s[1] == pytest.approx(0.26 + steps * 0.0105, abs=0.005)
        assert ratios == pytest.approx([1.0] * 4, rel=0.02)


def test_decode_steps_come_whole():
    """Half of a prefill's 60 ms is owed, but a decode step takes 50."""
    world = VirtualTime(50_000, sib=make_sib(decode_s=0.05), decode_share=0.5)
    ratios = burst(world, [50] * 2, max_tokens=50)
    assert world.ttft_s("r1") == pytest.approx(0.06 + 0.05 + 0.06, abs=0.001)
    assert ratios[1] == pytest.approx(1.0, rel=0.01)


def test_those_ahead_share_the_time_of_a_batch():
    """80 ms for up to 70 tokens: 8 of 10 tokens take 90 ms and not 640."""
    world = VirtualTime(50_000, sib=make_sib(least_s=0.08))
    ratios = burst(world, [10] * 9, max_tokens=2)
    assert world.ttft_s("r8") == pytest.approx(0.08 + 0.01 + 0.09, abs=0.001)
    assert ratios[-1] == pytest.approx(1.0, rel=0.01)


def test_the_first_instance_that_is_free_is_waited_for():
    world = VirtualTime(50_000, 50_000)
    world.arrive("a", 290, max_tokens=1)
    world.arrive("b", 100, max_tokens=1)
    world.scheduler._sib = world.sib
    found = world.scheduler.predict(200, 1, world.now)
    assert found.queue_s == pytest.approx(0.11)
    world.arrive("c", 200, max_tokens=1)
    found = world.scheduler.predict(200, 1, world.now)
    assert found.queue_s == pytest.approx(0.30), "behind `a`; `c` goes behind `b`"
    assert found.prefill_s == pytest.approx(0.21)


@pytest.mark.parametrize("tokens", [200, 400])
def test_those_beyond_sight_are_like_the_others(tokens):
    """Of 400 that wait 256 are looked at; with one token each nobody decodes. 400 are long."""
    world = VirtualTime(500_000, max_num_seqs=1_000)
    for number in range(401):
        world.arrive(f"r{number}", tokens, max_tokens=1)
    found = predict(world, tokens, 1)
    assert found.queue_s == pytest.approx(401 * (0.01 + 0.001 * tokens), rel=0.01)


@pytest.mark.parametrize("after_s", [0.27, 0.30, 0.33, 0.345])
def test_what_a_running_decode_step_pays_is_not_owed_behind_it(after_s):
    """0.13 s are owed behind a prefill of 0.26 s, and a decode step takes 50 ms: three, and not
    more when one of them is asked in its midst. So soon an interruption gains nothing."""
    world = VirtualTime(50_000, sib=make_sib(decode_s=0.05))
    world.arrive("short answer", 10, max_tokens=10)
    began_s = world.run().now
    world.arrive("a", 250, max_tokens=200)
    world.run(until=began_s + after_s)
    world.now = began_s + after_s
    found = predict(world, 200, 10)
    world.arrive("b", 200, max_tokens=10)
    world.run()
    assert found.queue_s == pytest.approx(0.26 + 3 * 0.05025 - after_s, abs=0.001)
    assert found.queue_s + found.prefill_s == pytest.approx(world.ttft_s("b"), abs=0.001)


def test_answers_have_their_turns_between_the_parts_of_long_prompts():
    """Four parts of 228 ms each, and 12 steps of 10 ms between them while `a` answers."""
    world = VirtualTime(50_000, num_layers=30)
    world.arrive("a", 50, max_tokens=1_000)
    world.run(until=1.0)
    world.now = 1.0
    alone_s, gap_s = 0.91, 12 * 0.0102
    queues_s = []
    for number in range(3):
        found = predict(world, 900, 200)
        queues_s.append(found.queue_s)
        assert found.prefill_s == pytest.approx(alone_s + 3 * gap_s, rel=0.03)
        world.arrive(f"r{number}", 900, max_tokens=200)
    for earlier_s, later_s in pairwise(queues_s):
        assert later_s - earlier_s == pytest.approx(alone_s + 4 * gap_s, rel=0.03)


def test_answers_have_their_turns_between_the_parts_of_a_prompt_that_has_begun():
    world = VirtualTime(50_000, num_layers=30)
    world.arrive("a", 50, max_tokens=1_000)
    world.arrive("begun", 900, max_tokens=200, at=1.0)
    world.run(until=1.5)
    world.now = 1.5
    found = predict(world, 900, 200)
    world.arrive("next", 900, max_tokens=200)
    world.run()
    assert found.queue_s + found.prefill_s == pytest.approx(world.ttft_s("next"), rel=0.03)


def test_behind_a_short_prompt_ahead_there_is_a_step_however_much_the_next_one_gains():
    """Answers last for 10 s: a prompt of 60 tokens may interrupt any, behind one step of 10 ms."""
    world = VirtualTime(50_000)
    world.arrive("answer", 10, max_tokens=1_000)
    world.run()
    ratios = burst(world, [60] * 4, max_tokens=100)
    assert world.ttft_s("r3") == pytest.approx(4 * 0.07 + 3 * 0.01, abs=0.001)
    assert ratios == pytest.approx([1.0] * 4, rel=0.01)


def test_behind_a_chunk_that_is_not_the_last_nobody_answers():
    world = VirtualTime(50_000, num_layers=1, max_step_tokens=500)
    world.arrive("long", 900, max_tokens=100)
    found = predict(world, 10, 100)
    assert found.queue_s == pytest.approx(0.01 + 0.256)


def test_those_ahead_share_a_step_as_far_as_its_tokens_go():
    """Two prompts of 10 tokens a step."""
    world = VirtualTime(50_000, max_num_batched_tokens=20)
    ratios = burst(world, [10] * 9, max_tokens=1)
    assert world.ttft_s("r8") == pytest.approx(0.02 + 4 * 0.03)
    assert ratios[-1] == pytest.approx(1.0)
