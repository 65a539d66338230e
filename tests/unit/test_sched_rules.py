"""One example for each rule of the scheduler, as lists of actions."""

import random

import pytest

from loongd.sched.events import (
    Arrived,
    Cancelled,
    Drain,
    Emit,
    Fail,
    Finish,
    FreeSegments,
    InstanceJoined,
    InstanceLost,
    RunDecode,
    RunPrefill,
    StepDone,
    StepFailed,
    Tick,
)
from loongd.sched.plan import DecodeItem, DecodePlan, PrefillItem, PrefillPlan
from loongd.sched.policies import make_policy
from loongd.sched.policy import Limits
from loongd.sched.request import Phase, Request
from loongd.sched.scheduler import Scheduler


class Driver:
    """Feeds events and checks invariants after each."""

    def __init__(self, *slots, **limits):
        self.scheduler = Scheduler(make_policy("fcfs"), Limits(**limits))
        self.now = 0.0
        for instance, count in enumerate(slots):
            assert self.join(instance, count) == []

    def handle(self, event_type, *args):
        self.now += 1.0
        actions = self.scheduler.handle(event_type(self.now, *args))
        self.scheduler.check()
        return actions

    def join(self, instance, slots):
        return self.handle(InstanceJoined, instance, slots)

    def arrive(self, request_id, prompt, max_tokens=10, reserve=None, **more):
        self.now += 1.0
        reserve = max_tokens if reserve is None else reserve
        event = Arrived(self.now, request_id, prompt, max_tokens, reserve, **more)
        actions = self.scheduler.handle(event)
        self.scheduler.check()
        return actions

    def done(self, step_id, *request_ids, token=1, elapsed_s=0.5):
        tokens = tuple((request_id, token) for request_id in request_ids)
        return self.handle(StepDone, step_id, elapsed_s, tokens)

    def lose(self, instance):
        return self.handle(InstanceLost, instance, "killed by signal 9")

    def free(self):
        return [i.free for i in self.scheduler.snapshot().instances]


def plans(actions):
    return [a.plan for a in actions if isinstance(a, RunPrefill | RunDecode)]


def kinds(actions):
    return [type(a).__name__ for a in actions]


def test_one_request_from_arrival_to_end():
    driver = Driver(100)
    (run,) = driver.arrive("a", 5, max_tokens=3)
    assert run.plan == PrefillPlan(1, (0,), (PrefillItem("a", 0, 5, 1, ((0, 5),)),))
    emit, run = driver.done(1, "a", token=40)
    assert emit == Emit("a", 40)
    assert run.plan == DecodePlan(2, (0,), (DecodeItem("a", 5, 0, 2, (1,), (0,)),))
    emit, run = driver.done(2, "a", token=41)
    assert run.plan == DecodePlan(3, (0,), (DecodeItem("a", 6, 0, 2, (1, 2), (0,)),))
    emit, finish, free = driver.done(3, "a", token=42)
    assert (emit, finish) == (Emit("a", 42), Finish("a", "length"))
    assert (free.segments, free.instances) == ((1, 2), (0,))
    assert driver.free() == [100]


def test_stop_token_ends_once_min_tokens_are_there():
    driver = Driver(100)
    driver.arrive("a", 5, stop_token_ids=frozenset({9}), min_tokens=2)
    assert kinds(driver.done(1, "a", token=9)) == ["Emit", "RunDecode"]
    actions = driver.done(2, "a", token=9)
    assert actions[:2] == [Emit("a", 9), Finish("a", "stop")]


def test_a_stop_string_ends_a_request_as_a_stop_token_does():
    driver = Driver(100)
    driver.arrive("a", 5)
    driver.done(1, "a", token=9)
    assert Finish("a", "stop") in driver.handle(Cancelled, "a", "stop")
    driver.arrive("b", 5)
    assert Finish("b", "cancelled") in driver.handle(Cancelled, "b", "client")
    assert driver.scheduler.snapshot().totals.num_finished == {"stop": 1, "cancelled": 1}
    last = driver.scheduler.story("a").entries[-1]
    assert last.event == "finished"
    assert last.text.startswith("a ended after 1 token: stop")
    assert "cancelled (client)" in driver.scheduler.story("b").entries[-1].text


# -- prefill


def test_dop_follows_length_and_kv_scales_down_to_one():
    driver = Driver(10_000, 10_000, 12_000, 10_000)
    (run,) = driver.arrive("req-1", 6000, max_tokens=256)
    assert run.plan.members == (0, 1, 2, 3)
    assert run.plan.items[0].keep == ((2, 6000),)
    assert run.reason == (
        "prefill 6,000 tokens of req-1 on instances 0,1,2,3 (DoP 4: 512 tokens per instance, "
        "4 idle); keep all on instance 2, the fewest that hold 6,000 + 256 reserved"
    )


@pytest.mark.parametrize(("prompt", "dop"), [(1, 1), (512, 1), (513, 2), (1025, 3), (9000, 4)])
def test_dop_of_a_prompt(prompt, dop):
    (plan,) = plans(Driver(20_000, 20_000, 20_000, 20_000).arrive("a", prompt))
    assert plan.dop == dop


def test_kv_that_fits_no_single_instance_is_spread_evenly_over_the_fewest():
    driver = Driver(60, 100, 80, 40)
    (plan,) = plans(driver.arrive("a", 150, max_tokens=10))
    assert plan.members == (1, 2)
    assert plan.items[0].keep == ((1, 75), (2, 75))


def test_short_prompts_share_a_step_up_to_max_num_batched_tokens():
    driver = Driver(max_num_batched_tokens=300)
    for request_id, prompt in (("a", 100), ("b", 200), ("c", 150), ("d", 60), ("e", 500)):
        assert driver.arrive(request_id, prompt) == []
    shared = [
        [item.request_id for item in plans(driver.join(instance, 4000))[0].items]
        for instance in range(3)
    ]
    assert shared == [["a", "b"], ["c", "d"], ["e"]]


def test_placement_leaves_others_the_room_they_reserved():
    driver = Driver(100, 100)
    driver.arrive("a", 10, max_tokens=60)
    driver.done(1, "a")
    assert driver.arrive("b", 105, max_tokens=5) == [], "1 is too small, 0 in a step"
    (plan,) = plans(driver.done(2, "a"))
    assert plan.items[0].keep == ((1, 74), (0, 31))
    assert [i.reserved for i in driver.scheduler.snapshot().instances] == [58, 5]


def test_short_prompts_go_where_most_slots_are_free():
    driver = Driver(100, 300, 200)
    taken = [plans(driver.arrive(name, 10))[0].members for name in "abc"]
    assert taken == [(1,), (2,), (0,)]


def test_at_most_max_num_seqs_run():
    driver = Driver(1000, 1000, 1000, max_num_seqs=2)
    assert plans(driver.arrive("a", 10))
    assert plans(driver.arrive("b", 10))
    assert driver.arrive("c", 10) == []
    actions = driver.handle(Cancelled, "a", "client")
    assert actions[0] == Finish("a", "cancelled")
    assert plans(actions)[0].items[0].request_id == "c"


def test_admission_counts_reserved_growth():
    driver = Driver(50, 50)
    driver.arrive("a", 30, max_tokens=30)
    assert driver.arrive("b", 30, max_tokens=11) == []
    assert len(driver.arrive("c", 1, max_tokens=1)) == 0, "first come, first served"
    driver.handle(Cancelled, "b", "client")
    assert plans(driver.handle(Tick)) == []
    assert driver.scheduler.snapshot().num_waiting == 0


def test_admission_lets_in_what_just_fits():
    driver = Driver(50, 50)
    driver.arrive("a", 30, max_tokens=30)
    assert len(plans(driver.arrive("b", 30, max_tokens=10))) == 1


def test_what_can_never_fit_is_refused_with_the_numbers():
    driver = Driver(50, 50)
    assert driver.arrive("a", 90, max_tokens=11, reserve=1) == [
        Fail(
            "a",
            "prompt of 90 tokens + max_tokens 11 = 101 tokens, but the KV pool has 100 slots",
            "context_length_exceeded",
            400,
        )
    ]
    assert plans(driver.arrive("b", 90, max_tokens=10, reserve=1))


def test_a_full_queue_and_a_draining_server_refuse():
    driver = Driver(max_num_queued_reqs=1)
    assert driver.arrive("a", 5) == []
    (fail,) = driver.arrive("b", 5)
    assert (fail.status, fail.code) == (503, "overloaded")
    driver.handle(Drain, True)
    (fail,) = driver.arrive("c", 5)
    assert (fail.status, fail.code) == (503, "draining")
    assert len(plans(driver.join(0, 100))) == 1, "accepted requests go on"
    driver.handle(Drain, False)
    assert driver.arrive("d", 5) == []


def test_prefill_and_decode_alternate_under_load():
    driver = Driver(10_000, max_num_batched_tokens=400)
    for n in range(5):
        driver.arrive(f"r{n}", 400, max_tokens=100)
    order = []
    step_id, running = 1, ["r0"]
    for _ in range(9):
        (plan,) = plans(driver.done(step_id, *running))
        order.append("prefill" if isinstance(plan, PrefillPlan) else "decode")
        step_id, running = plan.step_id, [item.request_id for item in plan.items]
    assert order == ["decode", "prefill"] * 4 + ["decode"]


def test_a_waiting_prefill_gets_its_turn_after_one_decode_step():
    driver = Driver(1000)
    driver.arrive("a", 10)
    assert driver.arrive("b", 10) == []
    assert kinds(driver.done(1, "a")) == ["Emit", "RunDecode"]
    assert kinds(driver.done(2, "a")) == ["Emit", "RunPrefill"]
    (plan,) = plans(driver.done(3, "b"))
    assert [item.request_id for item in plan.items] == ["a", "b"]


def test_a_long_head_waits_one_decode_step_for_its_dop_and_holds_what_is_free():
    driver = Driver(1000, 1000, prefill_tokens_per_instance=100)
    driver.arrive("a", 50)
    driver.arrive("b", 50)
    driver.done(1, "a")
    driver.done(2, "b")
    assert driver.arrive("long", 150) == []
    assert kinds(driver.done(3, "a")) == ["Emit"], "instance 0 is held"
    assert driver.scheduler.snapshot().held == (0, 1)
    assert driver.arrive("short", 5) == [], "and nobody may pass there"
    (plan,) = plans(driver.done(4, "b"))
    assert (plan.members, plan.items[0].request_id) == ((0, 1), "long")


def test_the_head_waits_for_busy_slots_while_others_pass_elsewhere():
    driver = Driver(100, 200, 210)
    driver.arrive("x", 150, max_tokens=1)
    driver.arrive("y", 10, max_tokens=1)
    assert driver.free() == [100, 190, 60]
    assert plans(driver.arrive("z", 10, max_tokens=1))[0].members == (0,)
    assert driver.arrive("head", 195, max_tokens=10) == []
    driver.done(3, "z")
    held = driver.scheduler.snapshot().held
    assert held == (0, 1), "idle instance 0 and busy instance 1 hold 195 tokens"
    assert driver.arrive("passer", 10, max_tokens=1) == []
    head, passer = plans(driver.done(1, "x"))
    assert (head.items[0].request_id, head.members) == ("head", (2,)), "sooner than held"
    assert (passer.items[0].request_id, passer.members) == ("passer", (0,))


@pytest.mark.parametrize(("max_tokens", "passes"), [(150, True), (160, False)])
def test_who_passes_the_head_leaves_it_the_slots_it_was_admitted_for(max_tokens, passes):
    driver = Driver(100, 200, 210, 50)
    for request_id, prompt in (("x", 150), ("y", 10), ("z", 10), ("w", 10)):
        driver.arrive(request_id, prompt, max_tokens=1)
    driver.arrive("head", 195, max_tokens=10)
    driver.done(3, "z")
    driver.done(4, "w")
    assert driver.scheduler.snapshot().held == (0, 1)
    actions = driver.arrive("passer", 40, max_tokens=max_tokens)
    assert [plan.members for plan in plans(actions)] == ([(3,)] if passes else [])


# -- decode


def test_requests_that_share_an_instance_step_together():
    driver = Driver(100, 60)
    driver.arrive("wide", 120, max_tokens=5)
    (plan,) = plans(driver.done(1, "wide"))
    assert plan.members == (0, 1)
    assert plan.items[0].holders == (0, 1)
    assert driver.arrive("b", 3, max_tokens=5) == []
    (prefill,) = plans(driver.done(2, "wide"))
    assert prefill.items[0].request_id == "b"
    (plan,) = plans(driver.done(3, "b"))
    assert [item.request_id for item in plan.items] == ["wide", "b"]


def test_master_is_sticky_and_scale_up_joins_an_idle_instance():
    driver = Driver(10, 12)
    (plan,) = plans(driver.arrive("a", 10, max_tokens=5, reserve=1))
    assert plan.items[0].keep == ((1, 10),)
    step_id, masters, members, reasons = 1, [], [], []
    for _ in range(4):
        run = driver.done(step_id, "a")[-1]
        step_id = run.plan.step_id
        masters.append(run.plan.items[0].master)
        members.append(run.plan.members)
        reasons.append(run.reason)
    assert masters == [1, 1, 0, 0]
    assert members == [(1,), (1,), (0, 1), (0, 1)]
    assert "instance 0 joined, for instance 1 ran out of slots" in reasons[2]
    assert driver.scheduler.snapshot().totals.num_scale_ups == 1


def test_a_decode_without_slots_waits_for_a_busy_instance():
    driver = Driver(11, 20)
    driver.arrive("busy", 8, max_tokens=4, reserve=1)
    (plan,) = plans(driver.arrive("a", 9, max_tokens=8, reserve=1))
    assert plan.members == (0,)
    driver.done(2, "a")
    driver.done(3, "a")
    actions = driver.done(4, "a")
    assert kinds(actions) == ["Emit"], "instance 0 is full, 1 prefills"
    (plan,) = plans(driver.done(1, "busy"))
    assert plan.members == (0, 1)
    assert [(i.request_id, i.master) for i in plan.items] == [("busy", 1), ("a", 1)]


def test_a_decode_stops_waiting_for_an_instance_that_is_lost():
    driver = Driver(11, 20, 5)
    driver.arrive("busy", 8, max_tokens=4, reserve=1)
    driver.arrive("a", 9, max_tokens=8, reserve=1)
    driver.arrive("small", 4, max_tokens=1, reserve=1)
    for step_id in (2, 4):
        driver.done(step_id, "a")
    assert kinds(driver.done(5, "a")) == ["Emit"], "all instances with free slots are busy"
    assert kinds(driver.lose(1)) == [], "instance 2 still runs"
    actions = driver.done(3, "small")
    assert kinds(actions) == ["Emit", "Finish", "FreeSegments", "RunDecode"]
    assert actions[3].plan.members == (0, 2)


@pytest.mark.parametrize("seed", range(5))
def test_neither_long_prompts_nor_wide_decodes_starve_under_a_flood(seed):
    driver = Driver(200, 200, 200, 200, prefill_tokens_per_instance=100)
    draw = random.Random(seed)
    steps = {}
    num_steps = {"long": 0, "wide": 0}
    for n in range(1000):
        actions = driver.arrive(f"r{n}", 5 + n % 60, max_tokens=1 + n % 7)
        if n in (20, 40):
            actions += driver.arrive("wide" if n == 20 else "long", 350, max_tokens=20)
        steps |= {p.step_id: [item.request_id for item in p.items] for p in plans(actions)}
        step_id = draw.choice(sorted(steps))
        requests = steps.pop(step_id)
        actions = driver.done(step_id, *requests)
        steps |= {p.step_id: [item.request_id for item in p.items] for p in plans(actions)}
        for name in num_steps.keys() & set(requests):
            num_steps[name] += 1
        if num_steps == {"long": 20, "wide": 20}:
            break
    assert n < 250
    assert driver.scheduler.snapshot().num_waiting > 5, "there was no flood"


def test_masters_are_spread_when_the_batch_is_bound_by_compute():
    driver = Driver(2000, 2000, max_num_seqs=512)
    driver.arrive("a", 10, max_tokens=300)
    driver.arrive("b", 10, max_tokens=300)
    driver.arrive("wide", 2500, max_tokens=100)
    for n in range(199):
        driver.arrive(f"r{n}", 2, max_tokens=100, reserve=1)
    running = [1, 2]
    steps = {1: ["a"], 2: ["b"]}
    while True:
        step_id = running.pop(0)
        for plan in plans(driver.done(step_id, *steps[step_id])):
            running.append(plan.step_id)
            steps[plan.step_id] = [item.request_id for item in plan.items]
        if len(steps[running[-1]]) > 128:
            break
    masters = [item.master for item in plan.items]
    assert len(plan.masters) == 2
    assert abs(masters.count(0) - masters.count(1)) <= 1
    again = plans(driver.done(plan.step_id, *steps[plan.step_id]))[0]
    assert isinstance(again, PrefillPlan), "the rest of the queue had to wait its turn"


def test_full_pool_preempts_the_least_work_which_comes_back_first():
    driver = Driver(20, prefill_tokens_per_instance=512)
    driver.arrive("old", 10, max_tokens=9, reserve=1)
    driver.arrive("new", 6, max_tokens=9, reserve=1)
    driver.done(1, "old")
    driver.done(2, "old")
    (plan,) = plans(driver.done(3, "new"))
    assert [item.request_id for item in plan.items] == ["old", "new"]
    (plan,) = plans(driver.done(plan.step_id, "old", "new"))
    assert [item.request_id for item in plan.items] == ["old"], "one slot was left"
    assert driver.free() == [0]
    assert driver.arrive("later", 1, max_tokens=1) == []
    actions = driver.done(plan.step_id, "old")
    assert kinds(actions) == ["Emit", "FreeSegments", "RunDecode"]
    assert actions[1].reason.startswith("free 2 segments of new: preempt new: all 20 slots")
    assert [item.request_id for item in actions[2].plan.items] == ["old"]
    events = [entry.event for entry in driver.scheduler.story("new").entries]
    assert events == ["arrived", "prefill", "decode", "preempted"]
    while not any(isinstance(action, Finish) for action in actions):
        (plan,) = plans(actions)
        actions = driver.done(plan.step_id, "old")
    (plan,) = plans(actions)
    assert [(i.request_id, i.num_tokens) for i in plan.items] == [("new", 8), ("later", 1)]
    assert driver.scheduler.snapshot().totals.num_preemptions == 1


def test_unrelated_groups_step_at_their_own_pace():
    driver = Driver(100, 100)
    driver.arrive("a", 10)
    driver.arrive("b", 10)
    driver.done(1, "a")
    (plan,) = plans(driver.done(3, "a"))
    assert plan.members == (0,)
    groups = driver.scheduler.snapshot().groups
    assert [(g.kind, g.members) for g in groups] == [("prefill", (1,)), ("decode", (0,))]


# -- ends and losses


def test_cancel_waiting_idle_running_and_unknown():
    driver = Driver(100, max_num_seqs=1)
    driver.arrive("a", 10)
    driver.arrive("b", 10)
    assert driver.handle(Cancelled, "b", "client") == [Finish("b", "cancelled")]
    assert driver.handle(Cancelled, "a", "client") == [Finish("a", "cancelled")]
    assert driver.handle(Cancelled, "a", "client") == []
    assert driver.handle(Cancelled, "nobody", "client") == []
    assert driver.free() == [90]
    (free,) = driver.done(1, "a")
    assert isinstance(free, FreeSegments)
    assert driver.free() == [100]


def test_failed_step_fails_its_requests_only():
    driver = Driver(100, 100)
    driver.arrive("a", 10)
    driver.arrive("b", 10)
    fail, free = driver.handle(StepFailed, 1, "out of memory")
    assert fail == Fail("a", "step 1 failed: out of memory", "step_failed", 500)
    assert free.instances == (0,)
    assert driver.scheduler.snapshot().num_running == 1


def test_all_members_of_a_failed_step_are_free_at_the_first_report():
    driver = Driver(100, 100, 100)
    driver.arrive("wide", 150)
    assert driver.free() != [100, 100, 100]
    fail, free = driver.handle(StepFailed, 1, "no room")
    assert fail == Fail("wide", "step 1 failed: no room", "step_failed", 500)
    assert isinstance(free, FreeSegments)
    assert driver.handle(StepFailed, 1, "no room") == []
    assert driver.free() == [100, 100, 100]
    driver.arrive("b", 250)
    assert len(driver.scheduler.snapshot().groups) == 1


def test_lost_instance_sends_its_requests_back_to_prefill_all_they_have():
    driver = Driver(100, 100, 100)
    driver.arrive("wide", 150, max_tokens=20)
    driver.done(1, "wide")
    actions = driver.lose(0)
    assert kinds(actions) == ["FreeSegments", "RunPrefill"]
    assert actions[0].instances == (1,)
    (plan,) = plans(actions)
    assert plan.items[0].request_id == "wide"
    assert plan.items[0].num_tokens == 151
    assert driver.done(2, "wide") == [], "the dropped step reports late"
    assert "lost" in [entry.event for entry in driver.scheduler.story("wide").entries]


def test_a_request_too_large_for_the_survivors_waits_for_the_lost_one():
    driver = Driver(100, 100)
    driver.arrive("wide", 150, max_tokens=20)
    driver.lose(1)
    assert driver.scheduler.snapshot().num_waiting == 1
    assert plans(driver.arrive("small", 5, max_tokens=1)), "others go on"
    driver.done(2, "small")
    assert plans(driver.join(1, 100))[0].items[0].request_id == "wide"


def test_a_pool_that_shrank_for_good_fails_what_can_never_fit():
    driver = Driver(100, 100)
    driver.arrive("wide", 150, max_tokens=20)
    driver.lose(1)
    (fail,) = driver.join(1, 10)
    assert (fail.request_id, fail.code) == ("wide", "context_length_exceeded")
    assert "170 KV slots" in fail.message
    assert "only 110" in fail.message


def test_all_lost_then_back():
    driver = Driver(100)
    driver.arrive("a", 10)
    driver.arrive("b", 10)
    assert driver.lose(0) == []
    assert driver.arrive("c", 10) == []
    (plan,) = plans(driver.join(0, 100))
    assert [item.request_id for item in plan.items] == ["a", "b", "c"]


def test_a_request_whose_steps_kill_workers_is_failed():
    driver = Driver(100, 100)
    driver.arrive("poison", 10)
    driver.lose(0)
    driver.lose(1)
    driver.join(0, 100)
    (fail,) = driver.lose(0)
    assert (fail.code, fail.status) == ("worker_lost", 500)
    assert "killed by signal 9" in fail.message


def test_losing_kv_while_no_step_runs_does_not_count():
    driver = Driver(100, 100)
    driver.arrive("wide", 150, max_tokens=40)
    for _ in range(4):
        step_id = driver.scheduler.snapshot().groups[0].step_id
        driver.done(step_id, "wide")
        (group,) = driver.scheduler.snapshot().groups
        assert group.kind == "decode"
        driver.arrive("short", 5, max_tokens=1)
        (plan, *_) = plans(driver.done(group.step_id, "wide"))
        assert plan.items[0].request_id == "short"
        idle = 1 - plan.members[0]
        driver.lose(idle)
        assert driver.scheduler.snapshot().num_waiting == 1
        driver.join(idle, 100)
        driver.done(plan.step_id, "short")
    assert driver.scheduler.snapshot().num_running == 1


# -- story and snapshot


def test_story_merges_equal_decode_steps():
    driver = Driver(100)
    driver.arrive("a", 5, max_tokens=4)
    for step_id in range(1, 5):
        driver.done(step_id, "a", elapsed_s=0.25)
    story = driver.scheduler.story("a")
    assert (story.prompt_tokens, story.generated_tokens) == (5, 4)
    arrived, prefill, decode, finished = story.entries
    assert arrived.text.startswith("a arrived: 5 prompt tokens, up to 4 more")
    assert (prefill.dop, prefill.kept, prefill.num_tokens) == (1, {0: 5}, 5)
    assert prefill.duration_s == 0.25
    assert (decode.num_steps, decode.num_tokens, decode.duration_s) == (3, 3, 0.75)
    assert (decode.group, decode.masters) == ((0,), (0,))
    assert finished.text == "a ended after 4 tokens: length"
    assert driver.scheduler.story("nobody") is None


def test_stories_of_ended_requests_are_bounded():
    driver = Driver(100)
    driver.handle(Drain, True)
    for n in range(1002):
        driver.arrive(f"r{n}", 5)
    assert driver.scheduler.story("r1") is None
    assert driver.scheduler.story("r2") is not None


def test_snapshot_adds_up():
    driver = Driver(100, 50)
    driver.arrive("a", 30, max_tokens=10)
    snapshot = driver.scheduler.snapshot()
    pool = snapshot.pool
    assert (pool.total, pool.used, pool.free, pool.reserved) == (150, 30, 120, 10)
    assert [(i.doing, i.free, i.reserved) for i in snapshot.instances] == [
        ("prefill", 70, 10),
        ("idle", 50, 0),
    ]
    driver.lose(1)
    assert driver.scheduler.snapshot().instances[1].doing == "lost"


def test_a_request_only_moves_along_legal_transitions():
    request = Request("a", 1, prompt_tokens=5, max_tokens=2, reserve_tokens=1)
    with pytest.raises(AssertionError, match=r"WAITING -> Phase\.DECODE"):
        request.move(Phase.DECODE)
    request.move(Phase.PREFILL)
    request.move(Phase.WAITING)
    request.move(Phase.ENDED)
    with pytest.raises(AssertionError, match="ENDED"):
        request.move(Phase.WAITING)


def test_unknown_policies_are_named():
    with pytest.raises(ValueError, match="policy 'x' is unknown; known: loongserve, fcfs"):
        make_policy("x")


def test_a_restart_of_all_workers_is_one_loss_and_plans_only_when_all_are_back():
    driver = Driver(*[3000] * 4, prefill_tokens_per_instance=100)
    (run,) = driver.arrive("r", 1000)
    assert run.plan.members == (0, 1, 2, 3)
    for _ in range(2):
        lost = [InstanceLost(driver.now, i, "killed") for i in range(4)]
        actions = driver.scheduler.handle(*lost)
        driver.scheduler.check()
        assert not [a for a in actions if isinstance(a, RunPrefill | Fail)]
        joined = [InstanceJoined(driver.now, i, 3000) for i in range(4)]
        (run,) = driver.scheduler.handle(*joined)
        driver.scheduler.check()
        assert run.plan.members == (0, 1, 2, 3)
    actions = driver.scheduler.handle(*[InstanceLost(driver.now, i, "killed") for i in range(4)])
    (failed,) = [action for action in actions if isinstance(action, Fail)]
    assert (failed.code, failed.status) == ("worker_lost", 500)
