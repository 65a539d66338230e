"""Reasons have the numbers that made the decision: one test for each kind of action.

With `make_sib`, a decode step takes 10 ms and 1 us for each token that it reads, a prefill 10 ms
and 1 ms a token, divided by the DoP, and 2 ms for each further member.
"""

import re

from sched_kit import VirtualTime, make_sib

from loongd.sched.events import Arrived, InstanceJoined, RunDecode, StepDone
from loongd.sched.plan import DecodePlan, PrefillPlan
from loongd.sched.policies import make_policy
from loongd.sched.policies.static import FixedGroups
from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler


def only(world, pattern):
    """The first reason that matches."""
    found = [reason for reason in world.reasons if re.search(pattern, reason)]
    assert found, world.reasons
    return found[0]


def seconds(text):
    """`0.0102 s` as a number."""
    return float(text.removesuffix(" s"))


def fixed_world(*slots, together=True, chunked=False, **limits):
    """Virtual time with a policy of fixed parallelism."""
    world = VirtualTime(policy="fcfs", **limits)
    policy = FixedGroups(together=together, chunked=chunked, sib=make_sib())
    world.scheduler = Scheduler(policy, Limits(**limits))
    for instance, num_slots in enumerate(slots):
        world.handle(InstanceJoined(0.0, instance, num_slots))
    return world


def test_a_decode_step_has_its_predicted_time():
    world = VirtualTime(5_000)
    world.arrive("a", 998, max_tokens=3)
    world.run()
    first = only(world, "^decode")
    assert first == "decode 1 request on instance 0, predicted 0.0110 s; masters 0 (1)"
    (entry,) = [e for e in world.scheduler.story("a").entries if e.event == "decode"]
    assert entry.text == first


def test_a_queued_step_has_its_predicted_time():
    sib = make_sib()
    scheduler = Scheduler(make_policy("loongserve", sib), Limits(queue_ahead=True), sib)
    scheduler.handle(InstanceJoined(0.0, 0, 5_000))
    (run,) = scheduler.handle(Arrived(0.0, "a", 98, 50, 50))
    actions = scheduler.handle(StepDone(0.1, run.plan.step_id, 0.108, (("a", 1),)))
    first, queued = [action for action in actions if isinstance(action, RunDecode)]
    assert "predicted 0.0101 s" in first.reason
    assert queued.reason == (
        "decode 1 request on instance 0 once more, predicted 0.0101 s, queued behind step 2, for "
        "nothing else wants the group"
    )


def test_all_steps_have_a_predicted_time_whatever_the_policy():
    for policy in ("loongserve", "fcfs", "fixed"):
        if policy == "fixed":
            world = fixed_world(2_000, 2_000, chunked=True, max_num_batched_tokens=1_000)
        else:
            world = VirtualTime(2_000, 2_000, policy=policy, max_step_tokens=1_000)
        world.arrive("long", 2_500, max_tokens=30)
        for n in range(6):
            world.arrive(f"s{n}", 40, max_tokens=20, at=0.05 * n)
        world.run()
        for (start_s, end_s, plan), reason in zip(world.plans, world.reasons, strict=True):
            if isinstance(plan, PrefillPlan | DecodePlan):
                (told,) = re.findall(r"predicted (\d+\.\d+) s", reason)
                unit_s = 0.1 ** len(told.partition(".")[2])
                assert abs(float(told) - (end_s - start_s)) <= 0.51 * unit_s, (policy, reason)


def test_fixed_groups_say_times_places_and_slots():
    world = fixed_world(1_000, 1_000)
    world.arrive("a", 98, max_tokens=30)
    world.arrive("b", 200, max_tokens=2, at=0.01)
    world.arrive("c", 100, max_tokens=2, at=0.02)
    world.run()
    # (10 + 98) / 2 + 2 ms, and 10 + 98 ms on one.
    assert world.reasons[0] == (
        "prefill 98 tokens of a on instances 0,1, the fixed group (DoP 2), predicted 0.061 s "
        "(0.108 s with one instance less); keep 49 on 0, 49 on 1; up to 128 of its 2,000 slots "
        "will be needed"
    )
    assert re.fullmatch(
        r"decode 1 request on instances 0,1, the fixed group, predicted 0\.0\d+ s; masters 0 "
        r"\(1\); a prefill there has just ended, and decode has its turn",
        only(world, "^decode"),
    )
    assert "prefill 300 tokens of 2 requests (b first)" in only(world, "2 requests")


def test_a_chunk_of_a_fixed_group_says_which_tokens():
    world = fixed_world(1_000, chunked=True, max_num_batched_tokens=60)
    world.arrive("a", 98, max_tokens=3)
    world.run()
    assert "prefill tokens 0 to 60 of 98 of a on instance 0" in world.reasons[0]
    assert "prefill tokens 60 to 98 of 98 of a on instance 0" in world.reasons[1]


def test_a_preemption_in_a_fixed_group_says_what_is_lost():
    world = fixed_world(60)
    world.arrive("old", 20, max_tokens=32, reserve=1)
    world.arrive("new", 12, max_tokens=30, reserve=1, at=0.02)
    world.run()
    (entry,) = [e for e in world.scheduler.story("new").entries if e.event == "preempted"]
    told = re.fullmatch(
        r"preempt new: no free slot among 60; the youngest of 2 requests, it arrived \d+\.\d+ s "
        r"ago and loses (\d+) tokens, predicted (\d+\.\d+) s to prefill again",
        entry.text,
    )
    assert told, entry.text
    assert abs(float(told[2]) - (0.010 + 0.001 * int(told[1]))) < 0.001


def test_a_scale_up_for_slots_names_masters_slots_and_what_it_costs():
    world = VirtualTime(40, 60)
    world.arrive("a", 50, max_tokens=30, reserve=1)
    world.run()
    assert only(world, "joined") == (
        "decode 1 request on instances 0,1, predicted 0.0120 s (0.0101 s on 1 instance, had it "
        "room); masters 0 (1); instance 0 joined, for instance 1 ran out of slots: a goes from "
        "master 1 to 0, where 40 of 40 are free"
    )


def test_a_scale_up_for_speed_says_what_it_gains():
    world = VirtualTime(20_000, sib=make_sib(compute_bound_batch=8, over_s=0.01))
    for n in range(12):
        world.arrive(f"s{n}", 10, max_tokens=200)
    world.run(until=1.5)
    world.handle(InstanceJoined(world.now, 1, 20_000))
    world.run(until=2.0)
    reason = only(world, "joined")
    gain = re.search(r"predicted ([\d.]+ s) instead of ([\d.]+ s)", reason)
    assert gain, reason
    assert seconds(gain[1]) < 0.9 * seconds(gain[2])
    assert "had it room" not in reason


def test_a_preemption_says_what_it_costs_and_why_this_one():
    """`new` has 12 + 5 tokens when the 60 slots are used, `old` 43: 10 ms and 17 x 1 ms."""
    world = VirtualTime(60)
    world.arrive("old", 20, max_tokens=32, reserve=1)
    world.arrive("new", 12, max_tokens=30, reserve=1, at=0.2)
    world.run()
    (entry,) = [e for e in world.scheduler.story("new").entries if e.event == "preempted"]
    lost = (
        "preempt new: all 60 slots of the pool are used and new needs one; of 2 requests it loses "
        "the least work, 17 tokens, predicted 0.027 s to prefill again, and arrived "
    )
    assert entry.text == f"{lost}{entry.at_s - 0.2:.3f} s ago; old would lose 43"


def test_a_long_prefill_says_what_one_instance_less_would_take():
    world = VirtualTime(5_000, 5_000)
    world.arrive("long", 200, max_tokens=1)
    world.arrive("document", 2_000, max_tokens=1, at=1.0)
    world.run()
    reason = only(world, "of document .*DoP 2")
    (told,) = re.findall(
        r"([\d.]+ s) for all that is left \(([\d.]+ s) with one instance less\)", reason
    )
    two_s, one_s = map(seconds, told)
    assert 1.012 <= two_s < 1.012 * 1.06, "1 s and the fixed 12 ms of each chunk"
    assert 2.010 <= one_s < 2.010 * 1.06
    assert "one instance less" not in only(world, r"DoP 1\)")


def test_a_group_that_chunks_make_slower_says_why_it_was_chosen():
    """Each member costs 0.5 s a chunk: 2,000 tokens take 1.51 s on two, in chunks of 800 more than
    on one. The group is chosen by whole steps, or because the slots of one are not enough."""
    for slots, but in (
        (5_000, r", but in one step 1\.510 s against 2\.010 s\)"),
        (1_300, r", had it the slots\)"),
    ):
        world = VirtualTime(slots, slots, sib=make_sib(per_member_s=0.5), max_step_tokens=400)
        world.arrive("document", 2_000, max_tokens=1)
        world.run()
        reason = only(world, "of document .*DoP 2")
        (told,) = re.findall(rf"([\d.]+ s) for all that is left \(([\d.]+ s) with .*{but}", reason)
        two_s, one_s = map(seconds, told)
        assert two_s > one_s


def test_a_prompt_that_was_passed_says_for_how_long():
    """It needs 1.01 s alone, so nobody passes it once it has waited for 10.1 s."""
    world = VirtualTime(50_000)
    for n in range(200):
        world.arrive(f"s{n}", 150, max_tokens=1, at=0.1 * n)
        if n == 20:
            world.arrive("long", 1_000, max_tokens=1)
    world.run()
    reason = only(world, "tokens 0 to .* of long")
    (waited,) = re.findall(r"it has waited for ([\d.]+ s) and is not passed after 10.100 s", reason)
    began_s = world.prefills("long")[0][0]
    assert abs(seconds(waited) - (began_s - world.arrived["long"])) < 0.001


def test_a_long_prompt_that_interrupts_says_whom_and_at_what_cost():
    world = VirtualTime(50_000)
    world.arrive("chat", 20, max_tokens=500)
    world.arrive("long", 5_000, max_tokens=1, at=1.0)
    world.run()
    reason = only(world, "tokens 0 to .* of long")
    interrupted = re.search(
        r"1 decoding request there must wait, which costs ([\d.e-]+) s/", reason
    )
    assert interrupted, reason
    tokens = len([t for t in world.tokens["chat"] if t <= world.prefills("long")[0][0]])
    assert abs(float(interrupted[1]) * tokens - 1.0) < 0.01, "1 / tokens so far"


def test_a_short_prompt_between_chunks_says_who_waits_for_it():
    world = VirtualTime(50_000)
    world.arrive("long", 5_000, max_tokens=2)
    world.arrive("short", 50, max_tokens=2, at=1.0)
    world.run()
    reason = only(world, "of short")
    told = re.search(
        r"\(long with ([\d,]+) tokens left\), after short has waited for (\S+ s)", reason
    )
    assert told, reason
    start_s = world.prefills("short")[0][0]
    done = sum(i.num_tokens for s, _, _, i in world.prefills("long") if s < start_s)
    assert int(told[1].replace(",", "")) == 5_000 - done
    assert abs(seconds(told[2]) - (start_s - 1.0)) < 0.001
    assert world.reasons[0].count("predicted") == 1
