"""Decode steps that are queued behind the one that runs: when, and what becomes of them."""

import pytest

from loongd.sched.ahead import MAX_IN_A_ROW
from loongd.sched.events import (
    Arrived,
    Cancelled,
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
)
from loongd.sched.policies import make_policy
from loongd.sched.policy import Decisions, Limits, Placed, StartDecode, StartPrefill
from loongd.sched.scheduler import Scheduler

STOP = 7


class Queue:
    """A scheduler on instances with so many slots; `runs` are its steps in order."""

    def __init__(self, *slots, policy=None):
        self.scheduler = Scheduler(policy or make_policy("fcfs"), Limits(queue_ahead=True))
        self.runs = []
        for instance, count in enumerate(slots):
            self.handle(InstanceJoined(0.0, instance, count))

    def handle(self, *events):
        actions = self.scheduler.handle(*events)
        self.scheduler.check()
        self.runs += [a.plan for a in actions if isinstance(a, RunPrefill | RunDecode)]
        return actions

    def arrive(self, request_id, prompt=4, max_tokens=100, **more):
        more.setdefault("stop_token_ids", frozenset({STOP}))
        return self.handle(Arrived(0.0, request_id, prompt, max_tokens, 1, **more))

    def done(self, *tokens, **by_request):
        """The oldest step has ended and drawn 1, or these tokens, in the plan's order."""
        plan = self.runs.pop(0)
        drawn = [by_request.get(item.request_id, 1) for item in plan.items]
        for place, token in enumerate(tokens):
            drawn[place] = token
        ids = [item.request_id for item in plan.items]
        return self.handle(StepDone(1.0, plan.step_id, 0.1, tuple(zip(ids, drawn, strict=True))))

    @property
    def queued(self):
        """(step, the one that it follows) of all steps in flight."""
        return [(plan.step_id, getattr(plan, "follows", 0)) for plan in self.runs]


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def test_a_group_always_has_its_next_step_queued():
    queue = Queue(1000)
    queue.arrive("a")
    assert queue.queued == [(1, 0)]
    queue.done()
    for step in range(2, 2 + MAX_IN_A_ROW - 1):
        follows = 0 if step == 2 else step - 1
        assert queue.queued == [(step, follows), (step + 1, step)]
        first, second = queue.runs
        assert [item.position for item in first.items] == [step + 2]
        assert [item.position for item in second.items] == [step + 3]
        assert of(queue.done(step + 100), Emit) == [Emit("a", step + 100)]
    assert queue.scheduler.snapshot().totals.num_queued_ahead == MAX_IN_A_ROW - 1


def test_the_policy_is_asked_again_after_so_many_steps():
    queue = Queue(1000)
    queue.arrive("a")
    decided = []
    for _ in range(2 * MAX_IN_A_ROW + 2):
        actions = queue.done()
        decided += [run.plan for run in of(actions, RunDecode) if not run.plan.follows]
    assert [plan.step_id for plan in decided] == [2, 2 + MAX_IN_A_ROW, 2 + 2 * MAX_IN_A_ROW]


def test_no_step_is_queued_beyond_the_last_token():
    queue = Queue(1000)
    queue.arrive("a", max_tokens=4)
    queue.done()
    assert queue.queued == [(2, 0), (3, 2)]
    queue.done()
    assert queue.queued == [(3, 2), (4, 3)]
    queue.done()
    assert queue.queued == [(4, 3)]
    assert of(queue.done(), Finish) == [Finish("a", "length")]
    assert queue.queued == []
    assert queue.scheduler.snapshot().pool.used == 0


def test_a_stop_is_noticed_one_step_late_and_the_extra_token_dropped():
    queue = Queue(1000)
    queue.handle(
        Arrived(0.0, "a", 4, 100, 1, frozenset({STOP})),
        Arrived(0.0, "b", 4, 100, 1, frozenset({STOP})),
    )
    queue.done()
    actions = queue.done(a=STOP)
    assert of(actions, Emit) == [Emit("a", STOP), Emit("b", 1)]
    assert of(actions, Finish) == [Finish("a", "stop")]
    assert not of(actions, FreeSegments), "its KV is read and written by the queued step"
    assert queue.queued == [(3, 2)], "nothing is queued behind a step with an ended request"
    actions = queue.done(a=5, b=6)
    assert of(actions, Emit) == [Emit("b", 6)]
    (freed,) = of(actions, FreeSegments)
    assert len(freed.segments) == 2
    assert [[i.request_id for i in plan.items] for plan in queue.runs] == [["b"], ["b"]]
    assert queue.scheduler.story("a").generated_tokens == 2


@pytest.mark.parametrize("at", ["first", "second"])
def test_a_cancelled_request_keeps_its_slots_until_no_step_uses_them(at):
    queue = Queue(1000)
    queue.arrive("a")
    queue.done()
    if at == "second":
        queue.done()
    actions = queue.handle(Cancelled(1.0, "a", "client"))
    assert of(actions, Finish) == [Finish("a", "cancelled")]
    assert not of(queue.done(), Emit | FreeSegments)
    actions = queue.done()
    assert not of(actions, Emit)
    assert len(of(actions, FreeSegments)) == 1
    assert queue.scheduler.snapshot().pool.used == 0


def test_who_waits_keeps_steps_from_being_queued():
    queue = Queue(1000)
    queue.arrive("a")
    queue.done()
    assert not of(queue.arrive("b"), RunPrefill), "two decode steps are in flight"
    assert queue.queued == [(2, 0), (3, 2)]
    queue.done()
    assert queue.queued == [(3, 2)]
    assert len(of(queue.done(), RunPrefill)) == 1


class OneAtATime:
    """Decodes the request that has waited longest, alone."""

    def decide(self, view):
        waiting = tuple(Placed(r, ((0, r.num_tokens),), 0) for r in view.waiting)
        if waiting:
            return Decisions(prefills=(StartPrefill((0,), waiting, "all"),))
        if not view.running:
            return Decisions()
        first = min(view.running.values(), key=lambda r: r.last_step_id)
        return Decisions(decodes=(StartDecode((0,), ((first, 0),), (), "one"),))


def test_a_running_request_without_a_step_keeps_steps_from_being_queued():
    queue = Queue(1000, policy=OneAtATime())
    queue.handle(Arrived(0.0, "a", 4, 100, 1), Arrived(0.0, "b", 4, 100, 1))
    queue.done()
    turns = []
    for _ in range(6):
        (plan,) = queue.runs
        turns.append(plan.items[0].request_id)
        queue.done()
    assert turns == ["a", "b"] * 3


def test_a_request_with_penalties_is_planned_only_when_its_tokens_are_known():
    queue = Queue(1000)
    queue.arrive("a", needs_history=True)
    queue.arrive("b")
    for _ in range(10):
        queue.done()
    assert queue.scheduler.snapshot().totals.num_queued_ahead == 0


def test_a_full_instance_gets_no_step_queued():
    queue = Queue(7)
    queue.handle(Arrived(0.0, "a", 4, 3, 1), Arrived(0.0, "b", 1, 3, 1))
    queue.done()
    assert [len(plan.items) for plan in queue.runs] == [2], "no slot is left for another two"


@pytest.mark.parametrize("later", ["fails", "runs"])
def test_when_a_step_fails_the_queued_one_is_waited_for(later):
    queue = Queue(1000)
    queue.arrive("a")
    queue.done()
    first, second = queue.runs
    queue.runs.clear()
    actions = queue.handle(StepFailed(1.0, first.step_id, "out of memory"))
    assert [fail.code for fail in of(actions, Fail)] == ["step_failed"]
    assert not of(actions, FreeSegments)
    if later == "fails":
        event = StepFailed(1.0, second.step_id, "nothing to follow")
    else:
        event = StepDone(1.0, second.step_id, 0.1, (("a", 1),))
    actions = queue.handle(event)
    assert not of(actions, Fail | Emit)
    assert len(of(actions, FreeSegments)) == 1
    assert queue.scheduler.snapshot().pool.used == 0


def test_when_the_queued_step_fails_its_requests_fail():
    queue = Queue(1000)
    queue.arrive("a")
    queue.done()
    queue.done(5)
    step = queue.runs.pop(0)
    actions = queue.handle(StepFailed(1.0, step.step_id, "out of memory"))
    assert [fail.request_id for fail in of(actions, Fail)] == ["a"]


def test_a_lost_instance_loses_both_steps():
    queue = Queue(1000)
    queue.arrive("a")
    queue.done()
    first, second = queue.runs
    queue.runs.clear()
    queue.handle(InstanceLost(1.0, 0, "killed"))
    assert queue.scheduler.num_waiting == 1
    for plan in (first, second):
        assert queue.handle(StepDone(1.0, plan.step_id, 0.1, (("a", 1),))) == []
    queue.handle(InstanceJoined(2.0, 0, 1000))
    assert [plan.items[0].num_tokens for plan in queue.runs] == [5]


def test_nothing_is_queued_unless_asked():
    scheduler = Scheduler(make_policy("fcfs"), Limits())
    scheduler.handle(InstanceJoined(0.0, 0, 1000))
    scheduler.handle(Arrived(0.0, "a", 4, 100, 1))
    actions = scheduler.handle(StepDone(0.0, 1, 0.1, (("a", 1),)))
    assert len(of(actions, RunDecode)) == 1
