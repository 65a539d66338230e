"""All state of the scheduler, and what must always be true of it.

Knows: where each request, step and slot is. Does not know: events, actions, decisions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from loongd.sched.instance import InstanceView, Step
from loongd.sched.plan import MigratePlan
from loongd.sched.policy import Hold, Limits, View
from loongd.sched.pool import SlotPool
from loongd.sched.request import Phase, Request
from loongd.sched.story import StoryBook
from loongd.sched.tally import Tally
from loongd.sched.waiting import WaitingQueue


@dataclass(slots=True, eq=False)
class Totals:
    """Counts since the start; `decode_s` is what `num_decoded` finished requests spent there."""

    num_arrived: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)
    num_failed: Counter[str] = field(default_factory=Counter)
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_queued_ahead: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_lost: int = 0
    num_scale_downs: int = 0
    num_scale_ups: int = 0
    num_migrations: int = 0
    num_migrated_tokens: int = 0
    decode_s: float = 0.0
    num_decoded: int = 0


class State:
    """Changed by `sched.scheduler` and, where steps start, `sched.starting`.

    Attributes:
        running: requests in prefill or decode, in the order in which they began to run.
        tally: what these count for; told of every change to one of them.
        ending: ended requests whose step, or its follow-up, still runs: their slots are used.
        steps: steps in flight by id; a queued one is in the step that it follows.
        hold: what the policy holds for the head of the queue.
        known_slots: slots of all instances, lost ones included: they are expected back.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.instances: dict[int, InstanceView] = {}
        self.pool = SlotPool()
        self.waiting = WaitingQueue()
        self.running: dict[str, Request] = {}
        self.tally = Tally()
        self.ending: dict[str, Request] = {}
        self.steps: dict[int, Step] = {}
        self.hold: Hold | None = None
        self.draining = False
        self.stories = StoryBook()
        self.totals = Totals()

    @property
    def known_slots(self) -> int:
        return sum(instance.slots for instance in self.instances.values())

    def find(self, request_id: str) -> Request | None:
        """A request that waits or runs; None when unknown or ended."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    @property
    def all_in_steps(self) -> bool:
        """Every running request takes part in a step; ending ones always do."""
        in_steps = sum(len(step.requests) for step in self.steps.values())
        return in_steps == len(self.running) + len(self.ending)

    def view(self, now: float) -> View:
        """What a policy may see."""
        pool = self.pool
        totals = self.totals
        self.tally.settle(self.instances)
        return View(
            limits=self.limits,
            instances=self.instances,
            free=pool.free_by_instance(),
            running=self.running,
            tally=self.tally,
            waiting=self.waiting,
            shorter=self.waiting.shorter,
            num_ending_tokens=sum([r.kv_tokens + r.num_migrating for r in self.ending.values()]),
            hold=self.hold,
            now=now,
            avg_decode_s=totals.decode_s / totals.num_decoded if totals.num_decoded else None,
            tokens_on=self._tokens_on,
        )

    def _tokens_on(self, request: Request, instance: int) -> int:
        """Slots of a running request on one instance."""
        if request.holders == (instance,):
            return request.kv_tokens + request.num_migrating
        return sum(self.pool.tokens_on(segment, instance) for segment in request.segments)

    def end_step(self, step_id: int, now: float) -> Step | None:
        """Free the members of a step, or let them go on with the one queued behind it.

        None when it is unknown (dropped before).
        """
        step = self.steps.pop(step_id, None)
        if step is None:
            return None
        follow = step.follow
        if follow is not None:
            follow.started_s = now
            self.steps[follow.step_id] = follow
        for instance in step.members:
            self.instances[instance].step = follow
        for request in step.requests:
            request.step_id = None if follow is None else follow.step_id
        return step

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self.pool.check()
        alive = sum(instance.slots for instance in self.instances.values() if instance.alive)
        assert self.pool.total == alive, f"pool has {self.pool.total} slots, instances {alive}"
        self._check_requests()
        self.tally.check(self.running, self.instances)
        self._check_segments()
        self._check_steps()
        if not self.running and not self.ending:
            assert self.pool.used == 0, f"{self.pool.used} slots used, nothing runs"

    def _check_requests(self) -> None:
        waiting = {r.request_id: r for r in self.waiting}
        assert len(waiting) == len(self.waiting), "a request waits twice"
        assert waiting.keys().isdisjoint(self.running), "a request waits and runs"
        assert self.stories.live == waiting.keys() | self.running.keys(), "stories differ"
        for request in waiting.values():
            assert request.phase is Phase.WAITING, f"{request.request_id} waits: {request.phase}"
            assert (request.segments, request.kv_tokens) == ((), 0), request
        run_orders = [r.run_order for r in self.running.values()]
        assert run_orders == sorted(set(run_orders)), "running requests are out of order"
        for request in self.running.values():
            assert request.phase in (Phase.PREFILL, Phase.DECODE), request
            assert request.left_tokens >= 0, request
            reach = request.prompt_tokens + request.reserve_tokens
            assert request.num_tokens == request.prompt_tokens + request.num_generated, request
            assert request.committed_tokens == max(reach, request.num_tokens + 1), request
            assert request.growth_tokens == max(0, reach - request.num_tokens), request
            assert not request.between_chunks or request.is_unfinished, request
            assert request.part is None or request.phase is Phase.PREFILL, request
            if request.phase is Phase.DECODE and not request.broken:
                assert request.kv_tokens == request.num_tokens - 1 + self._grown(request), request
            assert request.wanted is None or self.instances[request.wanted].alive, request
        for request in self.ending.values():
            assert request.phase is Phase.ENDED, request
            assert request.step_id in self.steps, request

    def _check_segments(self) -> None:
        owned: set[int] = set()
        for request in (*self.running.values(), *self.ending.values()):
            assert owned.isdisjoint(request.segments), f"{request.request_id}: shared segment"
            owned.update(request.segments)
            counts = [self.pool.counts(segment) for segment in request.segments]
            num_slots = sum(sum(c.values()) for c in counts)
            kept = request.kv_tokens + request.num_migrating
            assert num_slots == kept, f"{num_slots} slots for {request}"
            assert not request.num_migrating or self._migrates(request), request
            assert set(request.holders) == {i for c in counts for i in c}, request
        assert owned == self.pool.segments, "segments without a request"

    def _grown(self, request: Request) -> int:
        """Slots that a decoding request has for tokens of steps that have not ended."""
        if request.step_id is None or self._migrates(request):
            return 0
        return 1 if self.steps[request.step_id].follow is None else 2

    def _migrates(self, request: Request) -> bool:
        step = self.steps[request.step_id] if request.step_id is not None else None
        return step is not None and isinstance(step.plan, MigratePlan)

    def _check_steps(self) -> None:
        busy = [i for step in self.steps.values() for i in step.members]
        assert len(busy) == len(set(busy)), f"groups share instances: {busy}"
        for instance, view in self.instances.items():
            assert (view.step is not None) == (instance in busy), f"instance {instance}"
            assert view.alive or view.step is None, f"lost instance {instance} runs a step"
            assert view.step is None or self.steps[view.step.step_id] is view.step
        for step in self.steps.values():
            for request in step.requests:
                assert request.step_id == step.step_id, request
                assert request.part is None or request.part is step.plan, request
                migrates = isinstance(step.plan, MigratePlan)
                assert migrates or set(request.holders) <= set(step.members), request
            if step.follow is not None:
                assert step.follow.step_id not in self.steps, step
                assert step.follow.follow is None, "two steps are queued behind one"
                assert step.follow.members == step.members, step
                assert step.follow.requests == step.requests, step
        in_steps = sum(len(step.requests) for step in self.steps.values())
        live = (*self.running.values(), *self.ending.values())
        assert in_steps == sum(r.step_id is not None for r in live), "a step without request"
