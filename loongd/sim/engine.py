"""Drives the real `Scheduler` in virtual time: events from a trace, step times from a cost model.

Modelled: each step takes what the cost model says (optionally with noise); a group's members are
busy for that time; KV slots as the scheduler counts them; a client sees a token the moment its step
ends. A request stops by a stop token after its traced output, so the scheduler knows `max_tokens`
and a reservation, never the output length (except in oracle mode).
Not modelled: tokenising, HTTP, the scheduler's own time (`overhead_s` adds a constant to every
step), sampling, interference between groups that run at the same time, failures.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import inf, nextafter
from operator import sub
from random import Random

from loongd.sched.events import (
    Action,
    Arrived,
    Emit,
    Event,
    Fail,
    Finish,
    InstanceJoined,
    Migrate,
    RunDecode,
    RunPrefill,
    StepDone,
    Tick,
)
from loongd.sched.plan import DecodePlan, MigratePlan, PrefillPlan
from loongd.sched.policy import NOT_SETTLED, Settled
from loongd.sched.scheduler import Scheduler
from loongd.sched.steady import Steady
from loongd.sim.costs import Costs, decode_steps_s
from loongd.sim.outcome import Outcome, Run, StepRecord
from loongd.sim.trace import TracedRequest

# Token ids that the simulated sampler draws.
STOP, WORD = 2, 5
STOPS = frozenset({STOP})
# A policy may wait for time to pass, but not for ever.
MAX_IDLE_TICKS = 1000
# Sums of times are rounded in another order when they are foretold.
MARGIN_S = 1e-6


@dataclass(frozen=True, slots=True)
class Options:
    """How a trace is run.

    Args:
        max_tokens: what each client asks for at most (more if its output is longer).
        reserve_tokens: growth that admission counts on, at most `max_tokens`.
        oracle: tell the scheduler each true output length instead, as LoongServe's own benchmarks
            do.
        noise: standard deviation of the natural logarithm of a factor on each step time.
        seed: of the noise.
        overhead_s: added to every step.
        tick_s: virtual time between `Tick` events; 0 sends none.
        check: check all invariants of the scheduler after each event (slow).
        record_steps: keep a record of each step (memory).
        leap: tell the scheduler of many equal decode steps at once where it would decide nothing
            else (`sched.steady`); the same run, but numbers of steps differ, stories have fewer
            entries, and the order of steps that end at the very same time may be another. Not
            with noise, checks or records.
    """

    max_tokens: int = 1024
    reserve_tokens: int = 1024
    oracle: bool = False
    noise: float = 0.0
    seed: int = 0
    overhead_s: float = 0.0
    tick_s: float = 0.0
    check: bool = False
    record_steps: bool = False
    leap: bool = True


class StalledError(Exception):
    """Requests are left, but nothing runs and nothing is to come."""


class Simulation:
    """One run of one trace on a fresh scheduler."""

    def __init__(self, scheduler: Scheduler, costs: Costs, options: Options) -> None:
        self._scheduler = scheduler
        self._costs = costs
        self._options = options
        self._random = Random(options.seed)
        self._now = 0.0
        self._running: list[tuple[float, int, StepDone]] = []
        self._outcomes: dict[str, Outcome] = {}
        self._busy_s = {"prefill": 0.0, "decode": 0.0, "migrate": 0.0}
        self._steps: list[StepRecord] = []
        self._num_events = 0
        self._num_open = 0
        self._last_end_s = 0.0
        plain = not (options.noise or options.check or options.record_steps)
        self._steady = scheduler.steady() if options.leap and plain else None
        self._decodes: dict[int, tuple[DecodePlan, list[Outcome]]] = {}
        self._others: dict[int, float] = {}
        # What is certain of running decode steps, by id; None after any event.
        self._certain: dict[int, Settled] | None = None
        self._is_plain = False

    def run(self, trace: Sequence[TracedRequest], slots: Sequence[int]) -> Run:
        """Run `trace` to its end on instances with these KV slots.

        Raises StalledError when the scheduler leaves requests waiting with all instances idle.
        """
        for instance, num_slots in enumerate(slots):
            self._handle(InstanceJoined(0.0, instance, num_slots))
        self._num_open = len(trace)
        self._loop(trace)
        return Run(
            outcomes=list(self._outcomes.values()),
            num_instances=len(slots),
            end_s=self._now,
            num_events=self._num_events,
            busy_s=self._busy_s,
            steps=self._steps,
            totals=self._scheduler.snapshot().totals,
        )

    def _loop(self, trace: Sequence[TracedRequest]) -> None:
        """Events in order of time; of simultaneous ones, ends of steps come first."""
        num_arrived = num_idle_ticks = 0
        tick_s = self._options.tick_s or inf
        next_tick_s = tick_s
        while self._num_open:
            arrival_s = trace[num_arrived].arrival_s if num_arrived < len(trace) else inf
            step_s = self._running[0][0] if self._running else inf
            at_s = min(arrival_s, step_s, next_tick_s)
            num_idle_ticks = num_idle_ticks + 1 if arrival_s == step_s == inf else 0
            if at_s == inf or num_idle_ticks > MAX_IDLE_TICKS:
                message = f"{self._num_open:,} requests wait at {self._now:.3f} s, and nothing runs"
                raise StalledError(message)
            self._now = at_s
            if at_s == step_s:
                if not self._leap(min(arrival_s, next_tick_s)):
                    _, step_id, done = heappop(self._running)
                    self._decodes.pop(step_id, None)
                    self._others.pop(step_id, None)
                    self._handle(done)
            elif at_s == arrival_s:
                self._arrive(trace[num_arrived], num_arrived)
                num_arrived += 1
            else:
                next_tick_s += tick_s
                self._handle(Tick(at_s))

    def _arrive(self, traced: TracedRequest, number: int) -> None:
        options = self._options
        request_id = f"r{number}"
        self._outcomes[request_id] = Outcome(
            request_id, self._now, traced.input_tokens, traced.output_tokens
        )
        max_tokens = max(options.max_tokens, traced.output_tokens)
        reserve_tokens = min(options.reserve_tokens, max_tokens)
        if options.oracle:
            max_tokens = reserve_tokens = traced.output_tokens
        self._handle(
            Arrived(self._now, request_id, traced.input_tokens, max_tokens, reserve_tokens, STOPS)
        )

    def _handle(self, event: Event) -> None:
        self._num_events += 1
        self._certain = None
        for action in self._scheduler.handle(event):
            if type(action) is Emit:  # most are
                self._emit(self._outcomes[action.request_id])
            else:
                self._act(action)
        if self._options.check:
            self._scheduler.check()

    def _act(self, action: Action) -> None:
        match action:
            case RunDecode(plan=plan):
                self._decode(plan, action.reason)
            case RunPrefill(plan=plan):
                self._prefill(plan, action.reason)
            case Migrate(plan=plan):
                self._migrate(plan, action.reason)
            case Finish(request_id=request_id):
                self._end(request_id, None)
            case Fail(request_id=request_id, message=message):
                self._end(request_id, message)
            case _:
                pass

    # -- tokens

    def _emit(self, outcome: Outcome) -> None:
        now = self._now
        outcome.num_tokens += 1
        if outcome.last_token_s is None:
            outcome.first_token_s = now
        else:
            outcome.longest_gap_s = max(outcome.longest_gap_s, now - outcome.last_token_s)
        outcome.last_token_s = now

    def _end(self, request_id: str, failure: str | None) -> None:
        outcome = self._outcomes[request_id]
        outcome.end_s, outcome.failure = self._now, failure
        self._num_open -= 1

    # -- steps

    def _decode(self, plan: DecodePlan, reason: str) -> None:
        items = plan.items
        duration_s = self._costs.decode_s(
            dop=len(plan.members),
            num_masters=len({item.master for item in items}),
            batch=len(items),
            kv_tokens=sum([item.position for item in items]) + len(items),
        )
        outcomes = [self._outcomes[item.request_id] for item in items]
        self._decodes[plan.step_id] = plan, outcomes
        self._start(plan, "decode", duration_s, _draw(outcomes))
        if self._options.record_steps:
            self._record(plan, "decode", [(i.request_id, 1) for i in items], reason)

    def _prefill(self, plan: PrefillPlan, reason: str) -> None:
        items = plan.items
        duration_s = plan.share * self._costs.prefill_s(
            len(plan.members), [(item.start, item.num_tokens) for item in items]
        )
        drawing = () if plan.pauses else [item for item in items if item.samples]
        outcomes = [self._outcomes[item.request_id] for item in drawing]
        self._start(plan, "prefill", duration_s, _draw(outcomes))
        if self._options.record_steps:
            self._record(plan, "prefill", [(i.request_id, i.num_tokens) for i in items], reason)

    def _leap(self, until_s: float) -> bool:
        """Take the step that ends next and those like it after it, up to `until_s`, at once.

        False when that is not certain, or one step alone beside a prefill, for which it is dear
        to know.
        """
        end_s, step_id, done = self._running[0]
        decode = self._decodes.get(step_id)
        if self._steady is None or decode is None:
            return False
        if self._others:
            # At the same time the other comes first.
            until_s = min(until_s, nextafter(min(self._others.values()), -inf))
        if self._certain is None:
            if self._others and end_s + done.elapsed_s > until_s:
                return False
            self._certain = self._outlook(self._steady)
        certain = self._certain.get(step_id)
        if certain is None:
            return False
        until_s = min(until_s, certain.until_s - MARGIN_S, self._horizon(step_id))
        if certain.num_steps < 1 or end_s > until_s:
            return False
        heappop(self._running)
        self._repeat(*decode, done, certain, until_s)
        return True

    def _outlook(self, steady: Steady) -> dict[int, Settled]:
        """What the scheduler is certain of, except that requests end."""
        self._is_plain = steady.is_plain
        outlook = steady.outlook(self._now)
        for step_id, settled in outlook.items():
            _, outcomes = self._decodes[step_id]
            left = min([o.output_tokens - o.num_tokens for o in outcomes])
            if left <= settled.num_steps:
                outlook[step_id] = Settled(left - 1, settled.until_s)
        return outlook

    def _horizon(self, step_id: int) -> float:
        """Before when no other decode group ends a step that may be followed by anything else,
        unless that is no matter. No step takes less time than the one like it before it."""
        assert self._certain is not None
        if self._is_plain:
            return inf
        horizon_s = inf
        for end_s, other_id, done in self._running:
            if other_id == step_id or other_id in self._others:
                continue
            certain = self._certain.get(other_id, NOT_SETTLED)
            last_s = end_s + certain.num_steps * done.elapsed_s
            horizon_s = min(horizon_s, max(end_s, min(last_s, certain.until_s)) - MARGIN_S)
        return horizon_s

    def _repeat(
        self,
        plan: DecodePlan,
        outcomes: list[Outcome],
        done: StepDone,
        certain: Settled,
        until_s: float,
    ) -> None:
        assert self._steady is not None
        assert self._certain is not None
        batch = len(outcomes)
        kv_tokens = sum([item.position for item in plan.items]) + batch
        # At most so many fit, for no step takes less time than the one before it; and one follows.
        most = min((until_s - done.now) / done.elapsed_s + 2.0, certain.num_steps)
        times_s = decode_steps_s(self._costs, plan, kv_tokens + batch, int(most))
        if self._options.overhead_s:
            times_s = [step_s + self._options.overhead_s for step_s in times_s]
        ends_s = list(accumulate(times_s, initial=done.now))
        num_steps = min(bisect_right(ends_s, until_s), certain.num_steps)
        assert num_steps < len(ends_s), f"{len(times_s)} steps end before {until_s}"
        following_s, following_end_s = times_s[num_steps - 1], ends_s[num_steps]
        del times_s[num_steps - 1 :], ends_s[num_steps:]
        now = ends_s[-1]
        gap_s = max(map(sub, ends_s[1:], ends_s), default=0.0)
        for outcome in outcomes:
            assert outcome.last_token_s is not None
            outcome.num_tokens += num_steps
            first_gap_s = done.now - outcome.last_token_s
            outcome.longest_gap_s = max(outcome.longest_gap_s, first_gap_s, gap_s)
            outcome.last_token_s = now
        self._num_events += num_steps
        self._busy_s["decode"] += sum(times_s) * len(plan.members)
        del self._decodes[plan.step_id]
        following = self._steady.repeat(plan.step_id, [done.elapsed_s, *times_s], now)
        self._decodes[following.step_id] = following, outcomes
        self._certain[following.step_id] = Settled(certain.num_steps - num_steps, certain.until_s)
        self._launch(following, "decode", following_end_s, following_s, _draw(outcomes))

    def _migrate(self, plan: MigratePlan, reason: str) -> None:
        self._start(plan, "migrate", self._costs.migrate_s(plan.num_tokens), ())
        if self._options.record_steps:
            self._record(plan, "migrate", [("", plan.num_tokens)], reason)

    def _start(
        self,
        plan: PrefillPlan | DecodePlan | MigratePlan,
        kind: str,
        duration_s: float,
        tokens: tuple[tuple[str, int], ...],
    ) -> None:
        options = self._options
        if options.noise:
            duration_s *= self._random.lognormvariate(0.0, options.noise)
        duration_s += options.overhead_s
        self._launch(plan, kind, self._now + duration_s, duration_s, tokens)

    def _launch(
        self,
        plan: PrefillPlan | DecodePlan | MigratePlan,
        kind: str,
        end_s: float,
        duration_s: float,
        tokens: tuple[tuple[str, int], ...],
    ) -> None:
        self._busy_s[kind] += duration_s * len(plan.members)
        done = StepDone(end_s, plan.step_id, duration_s, tokens)
        heappush(self._running, (end_s, plan.step_id, done))
        self._last_end_s = end_s
        if not isinstance(plan, DecodePlan):
            self._others[plan.step_id] = end_s

    def _record(
        self,
        plan: PrefillPlan | DecodePlan | MigratePlan,
        kind: str,
        items: list[tuple[str, int]],
        reason: str,
    ) -> None:
        self._steps.append(
            StepRecord(kind, self._now, self._last_end_s, plan.members, tuple(items), reason)
        )


def _draw(outcomes: Sequence[Outcome]) -> tuple[tuple[str, int], ...]:
    """The tokens that these requests get next."""
    return tuple(
        [(o.request_id, STOP if o.num_tokens + 1 >= o.output_tokens else WORD) for o in outcomes]
    )
