"""Policy loongserve in virtual time: one behaviour each, with a SIB of round numbers.

The SIB of `make_sib`: prefill 10 ms + 1 ms a token / dop, decode 10 ms + 1 us a KV token, so with
the default bound of 0.3 s a prompt of up to 290 tokens is short.
"""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_kit import VirtualTime, make_sib

from loongd.sched.chunks import (
    HOST_S,
    aligned_down,
    aligned_up,
    in_one_step,
    largest_within,
    least_s,
    left_s,
    next_chunk,
)
from loongd.sched.events import Cancelled, Finish, InstanceJoined
from loongd.sched.plan import DecodePlan, PrefillPlan
from loongd.sched.policy import Limits
from loongd.sched.sib import ModelFacts, default_profile

BOUND_S = 0.3
LIMITS = Limits(max_prefill_wait_s=BOUND_S)


# -- chunks


@pytest.mark.parametrize("dop", [1, 2, 4])
@pytest.mark.parametrize("square_s", [0.0, 1e-7, 1e-5])
@pytest.mark.parametrize("cached", [0, 100, 50_000])
def test_a_chunk_takes_the_bound_and_not_more(dop, square_s, cached):
    sib = make_sib(square_s=square_s)
    most = largest_within(sib.prefill_coefficients(dop), cached=cached, time_s=BOUND_S)
    assert most >= 1
    if most > 1:
        assert sib.prefill_s(dop, [(cached, most)]) <= BOUND_S * (1 + 1e-9)
    assert sib.prefill_s(dop, [(cached, most + 1)]) > BOUND_S


def chunks_of(sib, dop, num_tokens, limits=LIMITS):
    left, sizes, pace = num_tokens, [], in_one_step(limits)
    while left:
        sizes.append(next_chunk(sib, dop, cached=num_tokens - left, left=left, pace=pace))
        left -= sizes[-1]
    return sizes


def test_chunks_have_few_sizes_and_the_last_takes_the_rest():
    assert chunks_of(make_sib(), 1, 1000) == [256, 256, 256, 232]
    assert chunks_of(make_sib(), 1, 280) == [280], "one step takes it within the bound"
    sib = make_sib(token_s=1e-5, square_s=5e-10)
    for num_tokens in (64_000, 100_001, 200_000):
        sizes = chunks_of(sib, 2, num_tokens)
        assert sum(sizes) == num_tokens
        assert all(size % 2 == 0 for size in sizes[:-1]), "equal parts for both members"
        same = chunks_of(sib, 2, 300_000)[: len(sizes) - 1]
        assert sizes[:-1] == same, "the same for every prompt"
        octaves = max(size.bit_length() for size in sizes) - min(
            size.bit_length() for size in sizes[:-1]
        )
        assert len(set(sizes[:-1])) <= 4 * (octaves + 1)


@given(most=st.integers(1, 1 << 22), dop=st.integers(1, 8))
def test_an_aligned_chunk_is_one_of_few_sizes(most, dop):
    """Four an octave, eight from 32,768 on; multiples of 512 of all members together where it has
    twice so many."""
    low, high = aligned_down(most, dop), aligned_up(most, dop)
    assert 1 <= low <= most <= high
    assert aligned_down(high, dop) == high
    for chunk in {low, high} if most >= dop else {high}:
        each, rest = divmod(chunk, dop)
        assert rest == 0
        num_bits = each.bit_length() - ((each & -each).bit_length() - 1)
        assert num_bits <= (3 if each < 32768 else 4), "leading bits"
        piece = {1: 512, 2: 256, 3: 128, 4: 128}.get(dop, 64)
        if each >= 2 * piece:
            assert each % piece == 0
            assert abs(chunk - most) < max(piece * dop, 0.25 * (most + dop))
        else:
            assert 0.8 * (most - dop) < chunk < 1.25 * (most + dop)


@pytest.mark.parametrize("fixed_s", [0.001, 0.02, 0.5])
def test_a_chunk_is_long_enough_to_lose_five_percent_at_most(fixed_s):
    coefficients = make_sib(fixed_s=fixed_s).prefill_coefficients(1)
    assert least_s(coefficients) == pytest.approx(20 * (fixed_s + HOST_S))
    sib = make_sib(fixed_s=fixed_s)
    chunk = next_chunk(sib, 1, cached=0, left=10**6, pace=in_one_step(LIMITS))
    time_s = sib.prefill_s(1, [(0, chunk)])
    if fixed_s == 0.001:
        assert 0.8 * BOUND_S < time_s <= BOUND_S
    else:
        assert 20 * (fixed_s + HOST_S) - 0.001 < time_s < 1.25 * 20 * (fixed_s + HOST_S)


@pytest.mark.parametrize("cap", [64, 100, 128])
def test_a_chunk_keeps_the_cap_of_each_instance(cap):
    limits = Limits(max_step_tokens=cap)
    for dop in (1, 2, 3):
        sizes = chunks_of(make_sib(), dop, 1000, limits)
        assert max(sizes) <= cap * dop
        assert len(set(sizes[:-1])) == 1


def test_a_chunked_prefill_loses_little_and_says_how_long_it_takes():
    alone_s = make_sib().prefill_s(4, [(0, 20_000)])
    world = VirtualTime(50_000, 50_000, 50_000, 50_000)
    world.arrive("long", 20_000, max_tokens=1)
    world.run()
    assert alone_s < world.ttft_s("long") < 1.06 * alone_s, "fixed times of 16 ms for 0.3 s each"
    predicted_s = left_s(make_sib(), 4, cached=0, left=20_000, pace=in_one_step(LIMITS))
    assert world.ttft_s("long") == pytest.approx(predicted_s, rel=0.01)
    assert all(plan.dop == 4 for _, _, plan, _ in world.prefills("long")[:-1])


@pytest.mark.parametrize("policy", ["fcfs", "loongserve"])
def test_a_million_tokens_end_within_the_cap(policy):
    """Two instances, at most 131,072 new tokens of each in a step; KV that needs both."""
    sib = make_sib(token_s=1e-6, square_s=1e-12)
    world = VirtualTime(524_500, 524_500, policy=policy, sib=sib)
    world.arrive("book", 1_048_576, max_tokens=3)
    world.arrive("chat", 100, max_tokens=3, at=0.1)
    world.run()
    chunks = world.prefills("book")
    assert sum(item.num_tokens for _, _, _, item in chunks) == 1_048_576
    assert all(item.num_tokens <= 131_072 * plan.dop for _, _, plan, item in chunks)
    if policy == "fcfs":
        assert [(plan.dop, item.num_tokens) for _, _, plan, item in chunks] == [(2, 262_144)] * 4
        assert "tokens 262,144 to 524,288 of 1,048,576" in world.reasons[chunks[1][2].step_id - 1]
    assert {type(end) for end in world.done.values()} == {Finish}
    assert len(world.done) == 2


# -- short prompts beside a long one


def test_short_prompts_never_wait_longer_than_the_bound():
    world = VirtualTime(50_000, 50_000)
    world.arrive("long", 20_000, max_tokens=5)
    for n in range(20):
        world.arrive(f"s{n}", 50, max_tokens=3, at=0.11 + n * 0.237)
    world.run()
    slowest = max(world.ttft_s(f"s{n}") for n in range(20))
    own_s = make_sib().prefill_s(1, [(0, 50)])
    assert slowest <= BOUND_S + 2 * own_s
    assert world.ttft_s("long") < 1.7 * left_s(
        make_sib(), 2, cached=0, left=20_000, pace=in_one_step(LIMITS)
    )


def test_the_group_of_a_long_prompt_shrinks_and_grows_between_chunks():
    world = VirtualTime(50_000, 50_000)
    world.arrive("long", 5_000, max_tokens=2)
    world.arrive("short", 50, max_tokens=20, at=0.1)
    world.run()
    chunks = world.prefills("long")
    degrees = [plan.dop for _, _, plan, _ in chunks]
    assert [dop for dop, _ in itertools.groupby(degrees)] == [2, 1, 2]
    assert {i for _, _, _, item in chunks for i, _ in item.keep} == {0}, "KV stays on one"
    (_, _, plan, _) = world.prefills("short")[0]
    assert plan.members == (1,), "not where the long prompt's KV is"
    for _, _, _, item in chunks[1:]:
        assert item.holders == (0,)
    assert [item.samples for _, _, _, item in chunks[:-1]] == [False] * (len(chunks) - 1)


def test_with_one_instance_short_prompts_and_decode_get_in_between_chunks():
    world = VirtualTime(50_000)
    world.arrive("old", 20, max_tokens=200)
    world.arrive("long", 10_000, max_tokens=2, at=0.5)
    world.arrive("short", 50, max_tokens=2, at=1.0)
    world.run()
    assert world.ttft_s("short") <= 2 * BOUND_S + 0.2
    gaps = [b - a for a, b in itertools.pairwise(world.tokens["old"])]
    assert max(gaps) <= BOUND_S + 0.1
    during = [t for t in world.tokens["old"] if 1.0 <= t < 5.0]
    assert len(during) > 100, "decode keeps about half of the time: 400 steps would be all"


def test_decode_elsewhere_does_not_notice_a_long_prefill():
    world = VirtualTime(50_000, 50_000)
    world.arrive("chat", 20, max_tokens=300)
    world.arrive("long", 10_000, max_tokens=2, at=0.2)
    world.run()
    gaps = [b - a for a, b in itertools.pairwise(world.tokens["chat"])]
    assert max(gaps) < 0.02
    assert all(plan.members == (1,) for _, e, plan, _ in world.prefills("long") if e < 3)


def test_a_short_prompt_stays_on_one_instance():
    world = VirtualTime(1_000, 1_000, 1_000, 1_000)
    for n in range(8):
        world.arrive(f"s{n}", 30 + n, max_tokens=12, at=0.01 * n)
    world.run()
    for n in range(8):
        (prefill,) = world.prefills(f"s{n}")
        places = {prefill[2].members} | {
            (item.master, *item.holders)
            for plan in world.decodes(f"s{n}")
            for item in plan.items
            if item.request_id == f"s{n}"
        }
        assert {i for place in places for i in place} == {prefill[2].members[0]}
    used = {plan.members for _, _, plan in world.plans}
    assert len(used) == 4, "and the instances are used evenly"


# -- dispatch: gain and cost


def test_a_decode_group_is_interrupted_when_it_has_had_its_time():
    """Cost: 0.21 s for each token so far. Gain: the decode time still to pass / 200."""
    world = VirtualTime(50_000)
    world.arrive("first", 20, max_tokens=20)
    world.run()
    world.arrive("young", 200, max_tokens=1000)
    world.run(until=world.now + 0.225)
    world.arrive("second", 200, max_tokens=2)
    world.run(until=world.now + 0.08)
    assert not world.prefills("second"), "0.2 / 200 gain is less than 0.21 / 2 cost"
    world.run(until=world.now + 0.4)
    began_s = world.prefills("second")[0][0] - world.prefills("young")[0][0]
    assert 0.21 * 1.5 <= began_s < 0.21 * 1.5 + 0.02, "half of the 0.21 s that young took"
    reason = next(r for r in world.reasons if "second" in r and "gain" in r)
    assert "but that has had 0.5 s for each second of the last prefill" in reason


def test_decode_keeps_the_share_that_it_was_given():
    for share in (0.25, 1.0):
        world = VirtualTime(50_000, decode_share=share)
        world.arrive("chat", 20, max_tokens=2000)
        world.arrive("long", 6_000, max_tokens=1, at=0.2)
        world.run()
        chunks = world.prefills("long")
        (first, *_), (last, *_) = chunks[2], chunks[-2]
        steps = [at_s for at_s, _, plan in world.plans if isinstance(plan, DecodePlan)]
        decode_s = 0.01 * sum(first < at_s < last for at_s in steps)
        assert decode_s / (last - first) == pytest.approx(share / (1 + share), abs=0.05)


def test_the_gain_is_worth_it_when_the_batch_is_old():
    world = VirtualTime(50_000)
    world.arrive("first", 20, max_tokens=400)
    world.run()
    world.arrive("old", 20, max_tokens=1000)
    world.run(until=world.now + 1.0)
    world.arrive("second", 50, max_tokens=2)
    world.run(until=world.now + 0.2)
    assert world.ttft_s("second") < 0.09
    reason = next(r for r in world.reasons if "second" in r)
    assert "gain" in reason
    assert "but" not in reason


def test_the_tipping_point_limits_a_batch():
    world = VirtualTime(50_000)
    world.arrive("x", 10)
    for n in range(10):
        world.arrive(f"s{n}", 40, max_tokens=1)
    world.run()
    sizes = [len(plan.items) for _, _, plan in world.plans if isinstance(plan, PrefillPlan)]
    assert max(sizes) == 2, "10 ms fixed of 0.1 s: 90 tokens"


def test_the_least_time_of_a_step_counts_once_for_a_batch():
    """A prompt of 10 tokens takes 80 ms alone, as one of 70 does, but adds 10 ms to others."""
    world = VirtualTime(50_000, sib=make_sib(least_s=0.08))
    world.arrive("x", 10)
    for n in range(16):
        world.arrive(f"s{n}", 10, max_tokens=1)
    world.run()
    sizes = [len(plan.items) for _, _, plan in world.plans if isinstance(plan, PrefillPlan)]
    assert sizes == [1, 16], "170 ms, within the bound; 80 ms each would be four at a time"


# -- passing


def test_who_passes_a_blocked_head_leaves_it_room_when_its_elders_end():
    world = VirtualTime(1_000)
    world.arrive("elder", 200, max_tokens=50)
    world.arrive("head", 800, max_tokens=100)
    world.arrive("a", 50, max_tokens=30)
    world.arrive("b", 50, max_tokens=30)
    world.arrive("c", 10, max_tokens=2)
    world.run()
    first = {name: world.tokens[name][0] for name in ("elder", "head", "a", "b", "c")}
    assert first["a"] < first["head"], "80 + 900 fit"
    assert first["b"] > world.tokens["a"][-1], "160 + 900 do not, though 250 + 160 do"
    assert first["c"] < world.tokens["a"][-1], "80 + 12 + 900 do"
    head_starts_s = world.prefills("head")[0][0]
    assert head_starts_s <= world.tokens["elder"][-1] + BOUND_S


def test_a_cheap_long_prompt_passes_a_head_without_room_too():
    """It takes a quarter of the head's time at most; `even` takes more, and waits."""
    world = VirtualTime(20_000)
    world.arrive("elder", 4_000, max_tokens=10)
    world.arrive("head", 17_000, max_tokens=10)
    world.arrive("cheap", 1_000, max_tokens=10)
    world.arrive("even", 1_500, max_tokens=10)
    world.arrive("large", 4_500, max_tokens=10)
    world.run()
    first = {name: tokens[0] for name, tokens in world.tokens.items()}
    assert max(first["cheap"], first["even"]) < world.tokens["elder"][-1] < first["head"]
    assert first["large"] > first["head"]


def test_a_queue_of_documents_hides_no_short_prompt():
    world = VirtualTime(50_000, 50_000)
    for n in range(300):
        world.arrive(f"document{n}", 2_000, max_tokens=1)
    for n in range(5):
        world.arrive(f"chat{n}", 20, max_tokens=1, at=0.5 + n)
    world.run(until=8.0)
    assert all(world.ttft_s(f"chat{n}") < 2 * BOUND_S for n in range(5))


def test_nobody_passes_after_max_passes():
    world = VirtualTime(1_000, 1_000, max_passes=3)
    world.arrive("elder", 200, max_tokens=200)
    world.arrive("head", 1_700, max_tokens=10)
    for n in range(8):
        world.arrive(f"s{n}", 5, max_tokens=2)
    world.run()
    elder_end = world.tokens["elder"][-1]
    passed = [n for n in range(8) if world.tokens[f"s{n}"][0] < elder_end]
    assert passed == [0, 1, 2]


def test_a_long_prompt_is_not_starved_by_a_flood_of_short_ones():
    world = VirtualTime(50_000)
    for n in range(400):
        world.arrive(f"s{n}", 150, max_tokens=1, at=0.1 * n)
        if n == 20:
            world.arrive("long", 1_000, max_tokens=1)
    world.run()
    own_s = make_sib().prefill_s(1, [(0, 1_000)])
    started_s = world.prefills("long")[0][0] - world.arrived["long"]
    assert started_s <= 10 * max(BOUND_S, own_s) + 1.0
    assert world.ttft_s("long") < started_s + 10 * own_s


@pytest.mark.parametrize("num_instances", [1, 2])
def test_a_started_long_prompt_is_not_starved_by_cheaper_ones(num_instances):
    """More of them come than can be served; all are too long to be short."""
    world = VirtualTime(*[50_000] * num_instances)
    world.arrive("long", 4_000, max_tokens=1)
    for n in range(220):
        world.arrive(f"medium{n}", 400, max_tokens=1, at=0.1 + 0.35 * n / num_instances)
    world.run()
    own_s = make_sib().prefill_s(1, [(0, 4_000)])
    assert world.ttft_s("long") < 12 * own_s


def test_of_long_prompts_the_one_with_least_time_x_length_goes_first():
    world = VirtualTime(90_000, 90_000)
    world.arrive("x", 2_000, max_tokens=1)
    world.arrive("big", 20_000, max_tokens=1, at=0.01)
    world.arrive("small", 1_000, max_tokens=1, at=0.02)
    world.run()
    assert world.tokens["small"][0] < world.tokens["x"][0] < world.tokens["big"][0]


# -- allocation and KV


def test_decode_makes_way_for_a_long_prompt():
    world = VirtualTime(50_000, 50_000)
    for name in ("a", "b"):
        world.arrive(name, 20, max_tokens=1000)
    world.arrive("long", 5_000, max_tokens=1, at=0.5)
    world.run(until=0.6)
    (move,) = world.moves()
    assert world.prefills("long")[0][0] < 0.6
    assert world.prefills("long")[0][2].members == (move.source,)
    assert all(plan.members == (move.target,) for plan in world.decodes("a")[-3:])
    (reason,) = [r for r in world.reasons if r.startswith("move")]
    assert "tokens of 1 request from instance" in reason
    assert "the prefill of long (5,000 tokens left) gains" in reason
    story = world.scheduler.story("a" if move.source == 0 else "b")
    assert "migrated" in [entry.event for entry in story.entries]


def test_the_same_request_is_not_moved_again_at_once():
    world = VirtualTime(50_000, 50_000, 50_000, 50_000)
    chats = [(0.05 + 0.3 * n, f"chat{n}", 20, 300) for n in range(16)]
    documents = [(0.5 + n, f"long{n}", 600, 1) for n in range(20)]
    for at_s, name, prompt, max_tokens in sorted(chats + documents):
        world.arrive(name, prompt, max_tokens=max_tokens, at=at_s)
    world.run()
    stories = [world.scheduler.story(f"chat{n}").entries for n in range(16)]
    moved_s = [[entry.at_s for entry in e if entry.event == "migrated"] for e in stories]
    gaps_s = [b - a for times_s in moved_s for a, b in itertools.pairwise(times_s)]
    assert gaps_s, "or this shows nothing"
    assert min(gaps_s) >= 1.0, "without the rule, 0.005 s"


def test_decode_does_not_make_way_when_its_kv_is_large():
    sib = make_sib(move_token_s=1e-3)
    world = VirtualTime(50_000, 50_000, sib=sib)
    for name in ("a", "b"):
        world.arrive(name, 2_000, max_tokens=400)
    world.arrive("long", 3_000, max_tokens=1, at=3.0)
    world.run()
    assert world.moves() == []


def test_a_prompt_larger_than_an_instance_spreads_chunk_by_chunk():
    world = VirtualTime(1_000, 1_000, 1_000)
    world.arrive("wide", 2_500, max_tokens=20)
    world.run()
    chunks = world.prefills("wide")
    held = [item.holders for _, _, _, item in chunks]
    assert held[0] == ()
    assert world.decodes("wide")[0].members == (0, 1, 2)
    for _, _, plan, item in chunks:
        assert set(item.holders) <= set(plan.members)
        assert item.cached == tuple(c.segment for _, _, _, c in chunks[: len(item.cached)])
    assert isinstance(world.done["wide"], Finish)


def test_a_wide_group_is_drawn_together_when_room_returns():
    world = VirtualTime(2_000, 2_000, sib=make_sib(per_member_s=0.005))
    for name in ("x", "y"):
        world.arrive(name, 1_650, max_tokens=300)
    world.arrive("wide", 70, max_tokens=800, reserve=30, at=3.0)
    world.run()
    assert world.decodes("wide")[0].members == (0, 1)
    (move,) = world.moves()
    assert move.num_tokens < 200, "the smaller part moves"
    assert world.decodes("wide")[-1].members == (move.target,)
    (reason,) = [r for r in world.reasons if r.startswith("move")]
    assert "up to 256 decode steps gain" in reason
    ended_s = max(world.tokens[name][-1] for name in ("x", "y"))
    moved_s = next(start_s for start_s, _, plan in world.plans if plan is move)
    assert moved_s >= ended_s, "there was no room before"


def test_a_group_is_not_drawn_together_for_a_small_gain():
    sib = make_sib(per_member_s=1e-6, move_token_s=1e-3)
    world = VirtualTime(2_000, 2_000, sib=sib)
    for name in ("x", "y"):
        world.arrive(name, 1_650, max_tokens=300)
    world.arrive("wide", 70, max_tokens=800, reserve=30, at=3.0)
    world.run()
    assert world.decodes("wide")[-1].members == (0, 1)
    assert world.moves() == []


# -- decode


@pytest.mark.parametrize(("over_s", "joins"), [(1e-3, True), (1e-5, False)])
def test_an_idle_instance_joins_as_a_master_when_the_batch_is_bound_by_compute(over_s, joins):
    sib = make_sib(compute_bound_batch=8, over_s=over_s, token_s=1e-5, kv_token_s=0.0)
    world = VirtualTime(20_000, sib=sib)
    for n in range(40):
        world.arrive(f"s{n}", 10, max_tokens=200)
    world.run(until=2.0)
    assert world.decodes("s0")[-1].members == (0,)
    world.handle(InstanceJoined(world.now, 1, 20_000))
    world.run(until=2.5)
    plan = world.decodes("s0")[-1]
    assert plan.masters == ((0, 1) if joins else (0,))
    assert world.moves() == [], "a scale-up moves no KV"
    if joins:
        masters = [item.master for item in plan.items]
        assert masters.count(0) == masters.count(1) == 20
        assert any("joined, for 40 requests pass the 8 of one master" in r for r in world.reasons)
        before = {item.request_id: item.master for item in world.decodes("s0")[-5].items}
        assert before == {item.request_id: item.master for item in plan.items}, "masters stay"


def test_preemption_takes_the_least_work_and_is_explained():
    world = VirtualTime(300)
    world.arrive("old", 100, max_tokens=150, reserve=1)
    world.arrive("new", 60, max_tokens=150, reserve=1, at=0.2)
    world.run()
    assert len(world.tokens["old"]) == len(world.tokens["new"]) == 150
    story = world.scheduler.story("new")
    (entry,) = [entry for entry in story.entries if entry.event == "preempted"]
    assert "all 300 slots of the pool are used" in entry.text
    assert world.scheduler.snapshot().totals.num_preemptions == 1
    assert "preempted" not in [e.event for e in world.scheduler.story("old").entries]


def test_cancel_between_chunks_frees_at_once():
    world = VirtualTime(50_000)
    world.arrive("chat", 20, max_tokens=500)
    world.arrive("long", 5_000, max_tokens=2)
    world.run(until=1.2)
    while any(r.request_id == "long" and r.step_id for r in running(world)):
        world.run(until=world.ends[0][0])
    (long,) = [r for r in running(world) if r.request_id == "long"]
    assert 0 < long.kv_tokens < 5_000
    actions = world.scheduler.handle(Cancelled(world.now, "long", "client"))
    assert actions[0] == Finish("long", "cancelled")
    assert actions[1].instances == (0,)
    assert world.scheduler.snapshot().pool.used < 1_000


def running(world):
    return world.scheduler._state.running.values()


# -- stories and predictions


def test_a_story_merges_chunks_of_one_group():
    world = VirtualTime(50_000, 50_000)
    world.arrive("long", 5_000, max_tokens=2)
    world.run()
    events = [entry.event for entry in world.scheduler.story("long").entries]
    assert events == ["arrived", "prefill", "decode", "finished"]
    prefill = world.scheduler.story("long").entries[1]
    assert prefill.num_steps == len(world.prefills("long"))
    assert (prefill.num_tokens, prefill.kept) == (5_000, {0: 5_000})


def test_a_prediction_comes_true_and_changes_nothing():
    world = VirtualTime(50_000, 50_000)
    world.scheduler._sib = world.sib
    before = world.scheduler.snapshot()
    for tokens in (20, 250, 3_000):
        found = world.scheduler.predict(tokens, 10, world.now)
        assert world.scheduler.snapshot() == before
        world.arrive(f"r{tokens}", tokens, max_tokens=1)
        world.run()
        (_, _, plan, _), *_ = world.prefills(f"r{tokens}")
        assert (found.members, found.dop) == (plan.members, plan.dop)
        assert found.queue_s == 0.0
        assert found.prefill_s == pytest.approx(world.ttft_s(f"r{tokens}"), rel=0.05)
        before = world.scheduler.snapshot()


def test_a_prediction_counts_what_runs_and_waits():
    world = VirtualTime(50_000)
    world.scheduler._sib = world.sib
    world.arrive("a", 200, max_tokens=1)
    for n in range(5):
        world.arrive(f"s{n}", 200, max_tokens=1)
    found = world.scheduler.predict(200, 1, world.now)
    assert found.members == ()
    assert found.queue_s == pytest.approx(6 * 0.21, rel=0.1)
    assert "5 requests ahead" in found.reason
    assert world.scheduler.predict(60_000, 1, world.now).reason


def test_a_prediction_takes_no_step_that_is_overdue_for_done():
    world = VirtualTime(50_000)
    world.scheduler._sib = world.sib
    world.arrive("a", 200, max_tokens=1)
    own_s = world.sib.prefill_s(1, [(0, 200)])
    waits = [world.scheduler.predict(200, 1, world.now + t * own_s).queue_s for t in (0, 1, 3, 10)]
    assert waits[0] == pytest.approx(own_s)
    assert waits[1] == pytest.approx(0.1 * own_s)
    assert waits[2] == pytest.approx(0.3 * own_s), "the later it is, the less is known"
    assert waits[3] == pytest.approx(1.0 * own_s)


def test_a_prediction_without_a_measurement_is_rough():
    world = VirtualTime(50_000, sib=make_sib())
    world.scheduler._sib = world.sib
    assert not world.scheduler.predict(200, 1, 0.0).rough
    facts = ModelFacts(
        name="m",
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        intermediate_size=128,
        vocab_size=100,
    )
    world.sib.replace(default_profile(facts, "cpu"))
    assert world.scheduler.predict(200, 1, 0.0).rough
    assert not world.scheduler.predict(200_000, 1, 0.0).rough, "not served: no times"


def test_reasons_have_numbers():
    world = VirtualTime(2_000, 2_000)
    world.arrive("long", 1_500, max_tokens=30)
    for n in range(6):
        world.arrive(f"s{n}", 40, max_tokens=20, at=0.05 * n)
    world.run()
    for reason in world.reasons:
        assert any(c.isdigit() for c in reason)
        assert "\n" not in reason
        assert reason[0].islower()
    for _, _, plan in world.plans:
        if isinstance(plan, PrefillPlan):
            assert "predicted" in world.reasons[plan.step_id - 1]


@pytest.mark.parametrize("dop", [1, 3])
def test_an_unmeasured_machine_that_seems_slow_gets_no_tiny_chunks(dop):
    """They would make it slower still: each has its fixed time again."""
    sib = make_sib(token_s=0.02)
    few = next_chunk(sib, dop, cached=0, left=6000, pace=in_one_step(LIMITS))
    assert few < 100
    sib.replace(msgspec.structs.replace(sib.profile, measured=False))
    assert next_chunk(sib, dop, cached=0, left=6000, pace=in_one_step(LIMITS)) == 512 * dop
    assert next_chunk(sib, dop, cached=5700, left=300, pace=in_one_step(LIMITS)) == 300
