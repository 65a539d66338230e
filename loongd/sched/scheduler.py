"""The one door to scheduling state: events in, actions out.

Knows: what each event means for requests, steps and slots. Does not know: which step to start (the
policy), the clock, workers, token ids of prompts.
"""

from __future__ import annotations

from itertools import repeat

from loongd.sched.accounts import account
from loongd.sched.admission import refuse
from loongd.sched.ahead import can_follow
from loongd.sched.events import (
    Action,
    Arrived,
    Cancelled,
    Drain,
    Emit,
    Event,
    Fail,
    Finish,
    FreeSegments,
    InstanceJoined,
    InstanceLost,
    StepDone,
    StepFailed,
    Tick,
)
from loongd.sched.instance import InstanceView, Step
from loongd.sched.plan import DecodePlan, MigratePlan, PrefillPlan
from loongd.sched.policy import Decisions, Limits, Policy, Preempt
from loongd.sched.predict import Prediction, predict
from loongd.sched.queued import tell, waited_for
from loongd.sched.request import Phase, Request
from loongd.sched.sib import Sib
from loongd.sched.snapshot import Snapshot, take_snapshot
from loongd.sched.starting import Starter
from loongd.sched.state import State
from loongd.sched.steady import Steady
from loongd.sched.story import Story, StoryEntry
from loongd.sched.words import plural

# A request whose running step was lost this often is taken to kill workers, and is failed.
MAX_LOSSES = 3


class Scheduler:
    """Deterministic: the same events give the same actions.

    `sib`, which may be the policy's own, learns from every step that ends and makes predictions.
    """

    def __init__(self, policy: Policy, limits: Limits, sib: Sib | None = None) -> None:
        self._policy = policy
        self._sib = sib
        self._state = State(limits)
        self.story_ids = self._state.stories.ids
        self._starter = Starter(self._state, sib)
        self._actions: list[Action] = []

    def handle(self, *events: Event) -> list[Action]:
        """What is to be done now, in this order; at most one step for each instance, and one more
        that is queued behind it (`sched.ahead`).

        Events that happen together are told together, in order: nothing is planned in between
        (when all workers restart, no step is to start on the ones that die next).
        """
        self._actions = []
        for event in events:
            self._take(event)
        now = events[-1].now
        self._plan(now)
        self._actions.extend(self._starter.follow(step, now) for step in can_follow(self._state))
        return self._actions

    def _take(self, event: Event) -> None:
        match event:
            case Arrived():
                self._on_arrived(event)
            case StepDone():
                self._on_step_done(event)
            case StepFailed():
                self._on_step_failed(event)
            case Cancelled():
                self._on_cancelled(event)
            case InstanceJoined():
                self._on_joined(event)
            case InstanceLost():
                self._on_lost(event)
            case Drain(on=on):
                self._state.draining = on
            case Tick():
                pass

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken."""
        self._state.check()

    def story(self, request_id: str) -> Story | None:
        """What happened to a request; None when unknown or long ended."""
        return tell(self._state, request_id)

    def steady(self) -> Steady:
        """Many equal decode steps at once, for virtual time; needs a scheduler without a SIB."""
        assert self._sib is None, "the SIB learns from each step"
        return Steady(self._state, self._starter, self._policy)

    def predict(
        self, prompt_tokens: int, max_tokens: int, now: float, reserve_tokens: int | None = None
    ) -> Prediction | None:
        """What would become of a prompt that came now; changes nothing. None without a SIB."""
        if self._sib is None:
            return None
        view = self._state.view(now)
        return predict(self._policy, self._sib, view, prompt_tokens, max_tokens, reserve_tokens)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._state.waiting)

    @property
    def draining(self) -> bool:
        """New requests are refused."""
        return self._state.draining

    def snapshot(self) -> Snapshot:
        """Instances, groups, pool, queue and totals as they are now."""
        return take_snapshot(self._state)

    # -- events

    def _on_arrived(self, event: Arrived) -> None:
        state = self._state
        state.totals.num_arrived += 1
        request = Request(
            request_id=event.request_id,
            order=state.totals.num_arrived,
            prompt_tokens=event.prompt_tokens,
            max_tokens=event.max_tokens,
            reserve_tokens=min(event.reserve_tokens, event.max_tokens),
            stop_token_ids=event.stop_token_ids,
            min_tokens=event.min_tokens,
            needs_history=event.needs_history,
            arrived_s=event.now,
        )
        known = state.find(event.request_id) or state.ending.get(event.request_id)
        assert known is None, f"{event.request_id} exists already"
        text = (
            f"{request.request_id} arrived: {request.prompt_tokens:,} prompt tokens, up to "
            f"{request.max_tokens:,} more ({request.reserve_tokens:,} reserved); "
            f"{len(state.waiting):,} waiting, {len(state.running):,} running"
        )
        state.stories.begin(request, StoryEntry(event.now, "arrived", text))
        no = refuse(
            request,
            state.limits,
            known_slots=state.known_slots,
            num_waiting=len(state.waiting),
            draining=state.draining,
        )
        if no is None:
            state.waiting.add(request)
        else:
            self._fail(request, no.message, code=no.code, status=no.status, now=event.now)

    def _on_step_done(self, event: StepDone) -> None:
        step = self._state.end_step(event.step_id, event.now)
        if step is None:
            return
        account(step, event.elapsed_s, self._state, self._sib)
        match step.plan:
            case PrefillPlan():
                self._on_prefilled(step, step.plan, event)
            case DecodePlan():
                self._on_decoded(step, event)
            case MigratePlan():
                self._on_migrated(step, step.plan, event)

    def _on_prefilled(self, step: Step, plan: PrefillPlan, event: StepDone) -> None:
        tokens, state, counts = dict(event.tokens), self._state, plan.finished_tokens
        state.stories.steps_done(step.requests, counts, event.elapsed_s)
        for request, item, count in zip(step.requests, plan.items, counts, strict=True):
            if request.phase is Phase.ENDED:
                self._release(request)
                continue
            state.totals.num_prefill_tokens += count
            if item.samples and not plan.pauses:
                self._on_drawn(request, tokens.get(request.request_id), event.now)

    def _on_decoded(self, step: Step, event: StepDone) -> None:
        """`_on_drawn` for each, written out for those that go on: it is nearly all of them."""
        state, emit, num_tokens = self._state, self._actions.append, 0
        state.stories.steps_done(step.requests, repeat(1), event.elapsed_s)
        state.tally.grew(step.members)
        tokens = dict(event.tokens)
        for request in step.requests:
            token = tokens.get(request.request_id)
            if request.phase is Phase.ENDED:
                self._release(request)
            elif token is None or request.is_last(token):
                self._on_drawn(request, token, event.now)
            else:
                request.generate(1)
                num_tokens += 1
                emit(Emit(request.request_id, token))
        state.totals.num_generated_tokens += num_tokens

    def _on_migrated(self, step: Step, plan: MigratePlan, event: StepDone) -> None:
        """The source has given up what the target now holds."""
        pool, tally = self._state.pool, self._state.tally
        for segment, num_slots in plan.moves:
            pool.release(segment, plan.source, num_slots)
        self._state.stories.steps_done(step.requests, repeat(0), event.elapsed_s)
        for request in step.requests:
            request.num_migrating = 0
            holders = {i for segment in request.segments for i in pool.holders(segment)}
            request.holders = tuple(sorted(holders))
            if request.master == plan.source:
                request.master = plan.target
            tally.touch(request)
            if request.phase is Phase.ENDED:
                self._release(request)
            elif request.broken:
                self._on_kv_lost(request, request.broken, event.now)

    def _on_drawn(self, request: Request, token: int | None, now: float) -> None:
        if token is None:
            why = "no logit is finite and allowed by its parameters"
            message = f"no token can be drawn for {request.request_id}: {why}"
            self._fail(request, message, code="step_failed", status=500, now=now)
            return
        if request.phase is Phase.PREFILL:
            request.move(Phase.DECODE)
            self._state.tally.touch(request)
        if request.first_token_s is None:
            request.first_token_s = now
        request.generate(1)
        self._state.totals.num_generated_tokens += 1
        self._actions.append(Emit(request.request_id, token))
        if (finish_reason := request.stops_at(token)) is not None:
            self._finish(request, finish_reason, now)

    def _on_step_failed(self, event: StepFailed) -> None:
        step = self._state.end_step(event.step_id, event.now)
        if step is None:
            return
        for request in step.requests:
            if request.phase is Phase.ENDED:
                self._release(request)
            else:
                message = f"step {step.step_id} failed: {event.message}"
                self._fail(request, message, code="step_failed", status=500, now=event.now)

    def _on_cancelled(self, event: Cancelled) -> None:
        if request := self._state.find(event.request_id):
            reason = "stop" if event.cause == "stop" else "cancelled"
            self._finish(request, reason, event.now, cause=event.cause)

    def _on_joined(self, event: InstanceJoined) -> None:
        known = self._state.instances.get(event.instance)
        if known is not None and known.alive:
            self._on_lost(InstanceLost(event.now, event.instance, "joined anew"))
        self._state.instances[event.instance] = InstanceView(event.instance, event.slots)
        self._state.pool.add_instance(event.instance, event.slots)

    def _on_lost(self, event: InstanceLost) -> None:
        state = self._state
        lost = state.instances.get(event.instance)
        if lost is None or not lost.alive:
            return
        lost.alive = False
        step = lost.step
        if step is not None:
            step.follow = None
            state.end_step(step.step_id, event.now)
        in_step = step.requests if step else ()
        for request in in_step:
            if request.phase is Phase.ENDED:
                self._release(request)
            else:
                request.num_losses += 1
        why = f"instance {event.instance} was lost ({event.message})"
        for request in [*state.running.values(), *state.ending.values()]:
            if request in in_step or event.instance in request.needed:
                if request.step_id is None:
                    self._on_kv_lost(request, why, event.now)
                else:
                    self._break(request, event.instance, why)
            elif request.wanted == event.instance:
                request.wanted = None
                state.tally.touch(request)
        state.pool.remove_instance(event.instance)

    def _break(self, request: Request, instance: int, why: str) -> None:
        """A migration of its other KV runs on; the request gives all up when that has ended."""
        for segment in request.segments:
            request.kv_tokens -= self._state.pool.lose(segment, instance)
        request.holders = tuple(i for i in request.holders if i != instance)
        request.master = None if request.master == instance else request.master
        request.broken = why
        self._state.tally.touch(request)

    def _on_kv_lost(self, request: Request, why: str, now: float) -> None:
        if request.num_losses >= MAX_LOSSES:
            message = f"{why}; {request.num_losses} steps of {request.request_id} have ended so"
            self._fail(request, message, code="worker_lost", status=500, now=now)
            return
        self._state.totals.num_lost += 1
        text = f"{why}; {request.request_id} waits to prefill {request.num_tokens:,} tokens again"
        self._requeue(request, StoryEntry(now, "lost", text))

    # -- ends of steps and requests

    def _finish(self, request: Request, reason: str, now: float, *, cause: str = "") -> None:
        self._state.totals.num_finished[reason] += 1
        self._actions.append(Finish(request.request_id, reason))
        text = f"{request.request_id} ended after {plural(request.num_generated, 'token')}: "
        text += reason if cause in ("", reason) else f"{reason} ({cause})"
        text += waited_for(self._state, request)
        event = "cancelled" if reason == "cancelled" else "finished"
        if event == "finished" and request.first_token_s is not None:
            self._state.totals.decode_s += now - request.first_token_s
            self._state.totals.num_decoded += 1
        self._end(request, StoryEntry(now, event, text))

    def _fail(self, request: Request, message: str, *, code: str, status: int, now: float) -> None:
        self._state.totals.num_failed[code] += 1
        self._actions.append(Fail(request.request_id, message, code, status))
        self._end(request, StoryEntry(now, "failed", message))

    def _end(self, request: Request, entry: StoryEntry) -> None:
        """Take a request out; its slots are freed now, or when its step ends."""
        state = self._state
        if state.waiting.remove(request.request_id) is None:
            state.running.pop(request.request_id, None)
            state.tally.touch(request)
        request.move(Phase.ENDED)
        state.stories.end(request.request_id, entry)
        if request.step_id is not None:
            state.ending[request.request_id] = request
        else:
            self._free(request, entry.text)

    def _release(self, request: Request) -> None:
        """A step of a request that has ended is over; its slots are freed after the last one."""
        if request.step_id is None:
            del self._state.ending[request.request_id]
            self._free(request, f"{request.request_id} ended while a step of it ran")

    def _requeue(self, request: Request, entry: StoryEntry) -> None:
        """Drop the KV of a running request; it waits at the front to prefill again."""
        self._free(request, entry.text)
        request.wait_again(entry.at_s)
        del self._state.running[request.request_id]
        self._state.tally.touch(request)
        self._state.waiting.requeue(request)
        self._state.stories.add(request.request_id, entry)

    def _free(self, request: Request, reason: str) -> None:
        holders = set(request.needed)
        segments = request.forget_kv()
        for segment in segments:
            holders.update(self._state.pool.free_segment(segment))
        alive = tuple(i for i in sorted(holders) if self._state.instances[i].alive)
        if alive:
            what = f"{plural(len(segments), 'segment')} of {request.request_id}"
            self._actions.append(FreeSegments(segments, alive, f"free {what}: {reason}"))

    # -- plans

    def _plan(self, now: float) -> None:
        """Ask the policy, and again after each preemption, for that changes what is possible."""
        state = self._state
        while any(i.step is None and i.alive for i in state.instances.values()):
            decisions = self._policy.decide(state.view(now))
            self._carry_out(decisions, now)
            if decisions.preempt is None:
                return
            self._preempt(decisions.preempt, now)

    def _carry_out(self, decisions: Decisions, now: float) -> None:
        self._state.hold = decisions.hold
        for request, instance in decisions.wanted:
            request.wanted = instance
            self._state.tally.touch(request)
        for give_up in decisions.give_ups:
            code = "context_length_exceeded"
            self._fail(give_up.request, give_up.message, code=code, status=400, now=now)
        self._actions.extend(self._starter.migrate(start, now) for start in decisions.migrations)
        self._actions.extend(self._starter.prefill(start, now) for start in decisions.prefills)
        self._actions.extend(self._starter.go_on(start, now) for start in decisions.parts)
        self._actions.extend(self._starter.decode(start, now) for start in decisions.decodes)

    def _preempt(self, preempt: Preempt, now: float) -> None:
        request = preempt.request
        request.num_preemptions += 1
        self._state.totals.num_preemptions += 1
        self._requeue(request, StoryEntry(now, "preempted", preempt.reason))
