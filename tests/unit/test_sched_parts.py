"""Chunks in parts: a long prompt passes through the layers in several steps, and others come in
between. The SIB is that of `test_sched_elastic`: 10 ms + 1 ms a token / dop."""

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sched_kit import VirtualTime, make_sib

from loongd.sched import chunks
from loongd.sched.chunks import (
    HOST_S,
    LEAST_LOSS,
    Pace,
    alone,
    beside_part,
    first_layers,
    in_one_step,
    in_parts,
    left_s,
    next_chunk,
    next_layers,
    parts_of,
)
from loongd.sched.events import FreeSegments, InstanceJoined, InstanceLost
from loongd.sched.plan import Layers, PrefillPlan
from loongd.sched.policy import Limits
from loongd.sched.sib import Sib

BOUND_S = 0.3
LIMITS = Limits(max_prefill_wait_s=BOUND_S, num_layers=32)


@pytest.fixture
def as_long_as_possible(monkeypatch):
    """Chunks of a lone prompt, whatever shorter ones would lose."""
    monkeypatch.setattr(chunks, "LEAST_LOSS", -1.0)


# -- arithmetic


@given(
    step_s=st.floats(0.001, 9.5),
    num_layers=st.integers(1, 128),
    bound_s=st.floats(0.01, 1.0),
)
def test_parts_cover_all_layers_once_and_keep_to_the_bound(step_s, num_layers, bound_s):
    limits = Limits(max_prefill_wait_s=bound_s, num_layers=num_layers)
    layers = first_layers(step_s, limits)
    if layers is None:
        assert step_s <= bound_s or num_layers == 1
        return
    parts = [layers]
    while parts[-1].pauses:
        parts.append(next_layers(parts[-1]))
    assert len(parts) == parts_of(step_s, limits)
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == num_layers
    assert sum(part.share for part in parts) == pytest.approx(1.0)
    longest_s = max(step_s * part.share for part in parts)
    assert longest_s <= max(bound_s, step_s / num_layers) * (1 + 1e-9)


def test_a_chunk_in_parts_leaves_memory_for_steps_beside_it():
    most = in_parts(LIMITS)
    assert most.time_s == pytest.approx(32 * (BOUND_S - HOST_S))
    assert most.most_tokens + beside_part(LIMITS).most_tokens == LIMITS.max_step_tokens
    assert in_parts(Limits()) == in_one_step(Limits()), "one layer is no part"


def test_no_parts_where_memory_is_made_for_one_batch():
    small = Limits(max_num_batched_tokens=512, max_step_tokens=512, num_layers=32)
    assert in_parts(small) == in_one_step(small)


@given(cached=st.integers(0, 10**6), left=st.integers(1, 10**6), is_alone=st.booleans())
def test_no_layer_of_a_chunk_takes_longer_than_the_bound(cached, left, is_alone):
    sib = make_sib(token_s=1e-5, square_s=5e-10, fixed_s=0.001)
    pace = in_parts(LIMITS) if is_alone else in_one_step(LIMITS)
    size = next_chunk(sib, 2, cached=cached, left=left, pace=pace)
    step_s = sib.prefill_s(2, [(cached, size)])
    layers = first_layers(step_s, LIMITS) if pace.time_s > BOUND_S else None
    assert step_s * (1.0 if layers is None else layers.share) <= BOUND_S * 1.001


@given(fixed_s=st.sampled_from([0.001, 0.01, 0.05]), left=st.integers(1, 10**6))
def test_chunks_of_a_lone_prompt_are_as_short_as_they_lose_little(fixed_s, left):
    sib = make_sib(token_s=1e-5, square_s=5e-10, fixed_s=fixed_s)
    pace = alone(sib, 2, cached=0, left=left, limits=LIMITS)
    most_s = (1 + LEAST_LOSS) * sib.prefill_s(2, [(0, left)])
    if pace != in_parts(LIMITS):
        assert left_s(sib, 2, cached=0, left=left, pace=pace) <= most_s
    if pace != in_one_step(LIMITS):
        half = Pace(pace.time_s / 2, pace.most_tokens)
        shorter = half if half.time_s > 1.01 * BOUND_S else in_one_step(LIMITS)
        if pace != in_parts(LIMITS):
            assert left_s(sib, 2, cached=0, left=left, pace=shorter) > most_s


# -- a prompt alone


def parts_of_long(world):
    return [(begin, end, plan) for begin, end, plan, _ in world.prefills("long")]


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_lone_prompt_is_one_chunk_in_parts_and_loses_little():
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.arrive("long", 10_000, max_tokens=1)
    world.run()
    parts = parts_of_long(world)
    assert {plan.items[0].num_tokens for _, _, plan in parts} == {10_000}
    assert all(end - begin <= BOUND_S for begin, end, _ in parts)
    assert [plan.resumes for _, _, plan in parts][1:] == [p.step_id for _, _, p in parts[:-1]]
    assert all(plan.members == (0, 1) for _, _, plan in parts)
    alone_s = make_sib().prefill_s(2, [(0, 10_000)])
    assert world.ttft_s("long") == pytest.approx(alone_s)
    assert len(world.tokens["long"]) == 1


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_prompt_that_takes_longer_has_several_such_chunks():
    world = VirtualTime(500_000, 500_000, num_layers=4)
    world.arrive("long", 10_000, max_tokens=1)
    world.run()
    parts = parts_of_long(world)
    assert all(end - begin <= BOUND_S * (1 + 1e-9) for begin, end, _ in parts)
    starts = [plan.items[0].start for _, _, plan in parts]
    assert len(set(starts)) > 3
    assert starts == sorted(starts)


@pytest.mark.usefixtures("as_long_as_possible")
def test_the_story_and_the_totals_count_a_chunk_once():
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.arrive("long", 10_000, max_tokens=1)
    world.run()
    totals = world.scheduler.snapshot().totals
    assert totals.num_prefill_tokens == 10_000
    entries = world.scheduler.story("long").entries
    (prefill,) = [entry for entry in entries if entry.event == "prefill"]
    assert prefill.num_tokens == 10_000
    assert prefill.num_steps == len(parts_of_long(world))
    assert "in 32 parts (" in prefill.text
    assert prefill.num_chunks == 1
    assert sum(prefill.kept.values()) == 10_000


@pytest.mark.usefixtures("as_long_as_possible")
def test_the_sib_learns_from_the_whole_chunk(monkeypatch):
    """Its layers may differ."""
    world = VirtualTime(50_000, 50_000, num_layers=32)
    seen = []
    monkeypatch.setattr(world.sib, "observe_prefill", lambda *args: seen.append(args))
    world.scheduler._sib = world.sib
    world.arrive("long", 10_000, max_tokens=1)
    world.run()
    ((dop, items, elapsed_s),) = seen
    assert (dop, items) == (2, [(0, 10_000)])
    assert elapsed_s == pytest.approx(make_sib().prefill_s(2, [(0, 10_000)]))


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_reason_tells_the_layers():
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.arrive("long", 10_000, max_tokens=1)
    world.run()
    second = parts_of_long(world)[1][2]
    reason = world.reasons[second.step_id - 1]
    assert reason.startswith("layers 1 to 2 of 32 for tokens 0 to 10,000 of long on instances 0,1")


# -- others in between


@pytest.mark.usefixtures("as_long_as_possible")
def test_short_prompts_come_between_two_parts():
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.arrive("long", 10_000, max_tokens=5)
    for n in range(12):
        world.arrive(f"s{n}", 50, max_tokens=3, at=0.11 + n * 0.337)
    world.run()
    own_s = make_sib().prefill_s(1, [(0, 50)])
    assert max(world.ttft_s(f"s{n}") for n in range(12)) <= BOUND_S + 2 * own_s
    in_parts_now = [plan for _, _, plan in parts_of_long(world) if plan.layers is not None]
    assert len(in_parts_now) > 10
    assert len(world.tokens["long"]) == 5


@pytest.mark.usefixtures("as_long_as_possible")
def test_decode_has_its_share_between_two_parts():
    world = VirtualTime(50_000, num_layers=32)
    world.arrive("chat", 20, max_tokens=200)
    world.arrive("long", 5_000, max_tokens=1, at=1.0)
    world.run()
    assert any(plan.layers is not None for _, _, plan in parts_of_long(world))
    gaps = [b - a for a, b in itertools.pairwise(world.tokens["chat"])]
    assert max(gaps) < 2 * BOUND_S
    during = [at for at in world.tokens["chat"] if 1.0 < at < world.tokens["long"][0]]
    assert len(during) > 50


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_second_long_prompt_runs_beside_a_paused_one_on_all_its_instances():
    """It is shorter, so it goes first; it has no parts, for memory is made for one such chunk."""
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.arrive("long", 10_000, max_tokens=1)
    world.arrive("other", 1_500, max_tokens=1, at=0.5)
    world.run()
    others = [plan for _, _, plan, _ in world.prefills("other")]
    assert all(plan.layers is None for plan in others)
    assert others[0].members == (0, 1)
    assert world.done["other"].finish_reason == "length"
    assert world.ttft_s("other") < 1.5
    before = [plan for _, _, plan in parts_of_long(world)]
    assert {plan.members for plan in before} == {(0, 1)}


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_prompt_much_longer_than_the_rest_waits_until_the_chunk_is_over():
    """It would keep the paused chunk's instances for long, and its memory and slots."""
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.arrive("long", 10_000, max_tokens=1)
    world.arrive("other", 9_000, max_tokens=1, at=3.0)
    world.run()
    chunk_end_s = parts_of_long(world)[-1][1]
    assert world.prefills("other")[0][0] >= chunk_end_s
    assert world.ttft_s("long") < 1.1 * make_sib().prefill_s(2, [(0, 10_000)])


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_second_long_prompt_leaves_a_paused_one_its_memory():
    """Tokens behind a long prefix are slow, so that few of them are a long chunk."""
    limits = {"max_step_tokens": 700, "max_num_batched_tokens": 175, "num_layers": 32}
    world = VirtualTime(400_000, sib=make_sib(square_s=1e-8), **limits)
    world.arrive("long", 200_000, max_tokens=1)
    while world.request("long").part is None or world.request("long").kv_tokens < 100_000:
        world.step()
    world.arrive("other", 500, max_tokens=1)
    world.run()
    for began_s, _, plan, item in world.prefills("other"):
        before = [part for _, end_s, part in parts_of_long(world) if end_s <= began_s][-1]
        assert before.pauses, "it goes first"
        assert plan.layers is None
        assert item.num_tokens + before.items[0].num_tokens <= 700


@pytest.mark.usefixtures("as_long_as_possible")
@pytest.mark.parametrize(
    ("num_instances", "rate", "lengths", "num_tokens"),
    [(2, 2, [30_000], 200_000), (2, 5, [30_000], 200_000), (4, 4, [30_000, 60_000], 400_000)],
)
def test_a_stream_of_shorter_documents_does_not_starve_a_paused_one(
    num_instances, rate, lengths, num_tokens
):
    """Each would go before it for good by its length; none waits for long either."""
    sib = make_sib(token_s=1e-5, square_s=1e-10, fixed_s=0.01, decode_s=0.02)
    world = VirtualTime(*[3 * num_tokens] * num_instances, sib=sib, num_layers=32)
    world.arrive("long", num_tokens, max_tokens=1)
    draw, at_s, number = random.Random(3), 0.05, 0
    while not world.tokens["long"] and at_s < 60.0:
        world.arrive(f"d{number}", draw.choice(lengths), max_tokens=5, at=at_s)
        number, at_s = number + 1, at_s + draw.expovariate(rate)
    assert any(plan.layers is not None for _, _, plan in parts_of_long(world))
    alone_s = sib.prefill_s(num_instances, [(0, num_tokens)])
    assert world.ttft_s("long") < 4 * alone_s
    world.run()
    assert len(world.done) == number + 1


def test_short_prompts_beside_a_paused_chunk_leave_it_its_memory():
    """One that fits the bound may be longer than what memory is kept for."""
    sib = make_sib(token_s=1e-5, square_s=1e-10)
    limits = {"max_step_tokens": 16_384, "max_num_batched_tokens": 4_096, "num_layers": 32}
    world = VirtualTime(400_000, sib=sib, **limits)
    world.arrive("long", 200_000, max_tokens=2)
    while world.request("long").part is None or world.request("long").kv_tokens < 120_000:
        world.step()
    world.arrive("short", 15_000, max_tokens=2)
    world.run()
    (began_s, _, _, item), *_ = world.prefills("short")
    before = [plan for _, end_s, plan in parts_of_long(world) if end_s <= began_s][-1]
    assert item.num_tokens == 15_000
    assert not before.pauses, "it waited for the end of the chunk"


def test_chunks_above_the_bound_have_parts_whoever_waits():
    """Nobody knows yet how fast the machine is, so chunks must not be tiny; with two prompts."""
    profile = msgspec.structs.replace(make_sib(token_s=0.01).profile, measured=False)
    world = VirtualTime(50_000, 50_000, sib=Sib(profile), num_layers=32)
    world.arrive("a", 3_000, max_tokens=1)
    world.arrive("b", 3_100, max_tokens=1, at=0.1)
    world.run()
    chunks = [(end_s - begin_s, plan) for begin_s, end_s, plan in world.plans if plan_is_long(plan)]
    assert chunks
    assert all(took_s <= BOUND_S * (1 + 1e-9) for took_s, plan in chunks if plan.layers is not None)
    assert sum(plan.layers is not None for _, plan in chunks) > len(chunks) / 2


def plan_is_long(plan):
    return isinstance(plan, PrefillPlan) and plan.items[0].num_tokens >= 512


@pytest.mark.usefixtures("as_long_as_possible")
def test_no_parts_beside_another_long_prompt():
    """Instances may be dealt out anew after each chunk, as soon as the other waits for them."""
    world = VirtualTime(50_000, num_layers=4)
    world.arrive("a", 4_000, max_tokens=1)
    world.arrive("b", 4_100, max_tokens=1, at=0.02)
    world.run()
    (_, _, first, _), *others = world.prefills("a")
    assert first.layers is not None, "it was alone"
    later = [plan for _, _, plan, item in others if item.start]
    assert later
    assert all(plan.layers is None for plan in later)
    assert any(plan.layers is not None for _, _, plan, _ in world.prefills("b")), "alone again"


def test_no_parts_where_an_instance_is_left_out():
    """It may join for the next chunk."""
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.arrive("chat", 30, max_tokens=2_000)
    world.arrive("long", 4_000, max_tokens=1, at=0.2)
    world.run(until=2.0)
    assert all(plan.layers is None for _, _, plan in parts_of_long(world))


# -- what becomes of a paused chunk


def paused_world():
    """`long` is between two parts of its chunk, for `s` has its turn on instance 0 or 1."""
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.arrive("long", 10_000, max_tokens=5)
    world.arrive("s", 200, max_tokens=300, at=0.1)
    while world.request("long").step_id is not None:
        world.step()
    assert world.request("long").part is not None
    return world


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_cancelled_one_is_given_up_wherever_it_holds_memory():
    world = paused_world()
    assert world.request("long").holders == (0,)
    actions = world.cancel("long")
    (freed,) = [action for action in actions if isinstance(action, FreeSegments)]
    assert freed.instances == (0, 1), "instance 1 has no KV of it, but its hidden states"
    world.run()
    assert len(world.tokens["s"]) == 300


@pytest.mark.usefixtures("as_long_as_possible")
def test_one_that_loses_an_instance_without_its_kv_begins_again():
    world = paused_world()
    actions = world.handle(InstanceLost(world.now, 1, "killed"))
    assert any(isinstance(action, FreeSegments) for action in actions)
    assert world.request("long").kv_tokens in (0, 10_000)
    world.ends = [end for end in world.ends if end[2].step_id in world.scheduler._state.steps]
    world.run()
    assert world.scheduler.snapshot().totals.num_lost >= 1
    assert len(world.tokens["long"]) == 5


@pytest.mark.usefixtures("as_long_as_possible")
def test_progress_counts_layers():
    world = paused_world()
    request = world.request("long")
    part = request.part.layers
    assert request.kv_tokens == 10_000
    assert request.left_tokens == 0
    assert request.done_tokens == 10_000 * part.end // 32
    assert request.undone_tokens == 10_000 - request.done_tokens
    assert request.is_unfinished
    assert request.needed == (0, 1)


def test_layers_know_their_share():
    assert Layers(0, 8, 32).share == 0.25
    assert Layers(0, 8, 32).pauses
    assert not Layers(24, 32, 32).pauses


@pytest.mark.usefixtures("as_long_as_possible")
@pytest.mark.parametrize("num_tokens", [100, 600])
def test_a_prompt_that_goes_before_a_paused_one_is_not_told_to_wait_for_it(num_tokens):
    """A short one, and one that is not but passes the chunk."""
    world = paused_world()
    world.scheduler._sib = world.sib
    found = world.scheduler.predict(num_tokens, 4, world.now)
    assert found.queue_s < 0.5
    world.arrive("next", num_tokens, max_tokens=4)
    world.run()
    assert world.ttft_s("next") == pytest.approx(found.queue_s + found.prefill_s, abs=0.5)


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_part_that_runs_is_waited_for_and_not_its_chunk():
    world = VirtualTime(50_000, 50_000, num_layers=32)
    world.scheduler._sib = world.sib
    world.arrive("long", 10_000, max_tokens=5)
    part_s = make_sib().prefill_s(2, [(0, 10_000)]) / 32
    assert world.scheduler.predict(100, 4, 0.05).queue_s == pytest.approx(part_s - 0.05)


@pytest.mark.usefixtures("as_long_as_possible")
def test_a_prompt_that_waits_for_the_chunk_is_told_to():
    world = paused_world()
    world.scheduler._sib = world.sib
    left_of_chunk_s = make_sib().prefill_s(2, [(0, 10_000)]) * 29 / 32
    found = world.scheduler.predict(9_000, 4, world.now)
    asked_s = world.now
    world.arrive("next", 9_000, max_tokens=4)
    world.run()
    waited_s = world.prefills("next")[0][0] - asked_s
    assert waited_s > 1.5 * left_of_chunk_s, "decode has its turn between the parts"
    assert found.queue_s == pytest.approx(waited_s, rel=0.1)


@pytest.mark.usefixtures("as_long_as_possible")
def test_the_snapshot_shows_what_is_paused():
    world = paused_world()
    snapshot = world.scheduler.snapshot()
    (paused,) = [group for group in snapshot.groups if group.kind == "paused"]
    part = world.request("long").part.layers
    assert (paused.members, paused.num_tokens) == ((0, 1), 10_000)
    assert paused.layers == f"{part.end} of 32"
    assert "paused" in [instance.doing for instance in snapshot.instances]
    world.run()
    assert not world.scheduler.snapshot().groups


def test_the_wait_of_one_that_begins_again_counts_from_its_loss():
    world = VirtualTime(50_000, num_layers=32)
    world.arrive("long", 2_000, max_tokens=5)
    world.run(until=1.0)
    world.now = 1.5
    world.handle(InstanceLost(world.now, 0, "with 1: killed"))
    assert world.scheduler.snapshot().num_waiting_tokens == 2_000
    world.ends.clear()
    world.now = 2.0
    world.handle(InstanceJoined(world.now, 0, 50_000))
    story = world.scheduler.story("long")
    assert "it has waited for 0.500 s" in story.entries[-1].text
    assert "instance 0 was lost (with 1: killed)" in story.entries[-2].text
