"""When a prompt's turn comes behind others: their prefills, and the decode steps in between.

Short prompts ahead run in batches, as `Dispatch.take` cuts them, each on the instance that is free
first; long ones have an equal share of all instances. Behind each prefill come whole decode steps,
one at least, by some policies as many as decode's share of the time; while there are answers to go
on with. How long these will be nobody knows: as many tokens are expected as dispatch expects.

Knows: how prefills and decode steps take turns on an instance. Does not know: who is ahead, slots,
or what arrives later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from math import ceil, inf

from loongd.sched.dispatch import Dispatch
from loongd.sched.draft import Draft
from loongd.sched.instance import InstanceView, Step
from loongd.sched.plan import DecodePlan, PrefillPlan
from loongd.sched.policy import View
from loongd.sched.request import Phase, Request
from loongd.sched.sib import Sib

# A step is never taken to be nearer to its end than this share of its time so far or predicted.
OVERDUE_SHARE = 0.1
# So much of a step more than owed is rounding.
_ROUNDING = 1e-6


@dataclass(slots=True)
class _Lane:
    """One instance: the last step on it ends after `ends_s`, and decode is owed `owed_s` then, at
    least `least_steps`. Interrupting its `num_answers` costs `cost` a second, and gains by
    `decode_s`, as `Dispatch.weigh` has it."""

    ends_s: float
    owed_s: float
    decode_s: float
    least_steps: int = 0
    num_answers: int = 0
    cost: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """Seconds from now: when it would begin if nobody were ahead, when it does, and how long it
    takes then; and how many of those ahead are in the same step."""

    first_s: float
    begins_s: float
    time_s: float
    num_beside: int = 0


class Turns:
    """From one view; `before` are the waiting requests that go first."""

    def __init__(
        self,
        view: View,
        draft: Draft,
        sib: Sib,
        dispatch: Dispatch,
        before: Sequence[Request],
        *,
        pays_decode: bool = True,
    ) -> None:
        """`pays_decode`: see `Policy`."""
        self._view = view
        self._draft = draft
        self._sib = sib
        self._dispatch = dispatch
        self._before = before
        self._share = view.limits.decode_share if pays_decode else 0.0
        self._expected_s = dispatch.avg_decode_s()
        self._set_step()
        self._lanes = [self._lane(view.instances[i]) for i in view.free]

    def of_short(self, request: Request, num_more: int = 0) -> Turn:
        """The batch of a short request; `num_more` ahead are not looked at, and taken to be like
        the others."""
        *ahead, own = self._dispatch.batches([*self._before, request])
        heap = [(lane.ends_s + self._gap_s(lane), at) for at, lane in enumerate(self._lanes)]
        heapify(heap)
        first_s = heap[0][0]
        for batch in ahead:
            at = heap[0][1]
            lane = self._lanes[at]
            self._fill(lane, batch, sum(self._begin(lane, batch)))
            heapreplace(heap, (lane.ends_s + self._gap_s(lane), at))
        begins_s, time_s = self._begin(self._lanes[heap[0][1]], own)
        first_s = min(first_s, begins_s)
        begins_s += (begins_s - first_s) * num_more / max(1, len(self._before))
        return Turn(first_s, begins_s, time_s, len(own) - 1)

    def of_long(self, started: Iterable[float], own_s: float, num_more: int = 0) -> Turn:
        """A long request that takes `own_s` alone. `started` are seconds, of one instance, of
        unfinished prefills that go first."""
        lanes = self._lanes
        is_answering = any(lane.num_answers for lane in lanes)
        first_s = min(lane.ends_s + self._gap_s(lane) for lane in lanes)
        started_s = before_s = 0.0
        for alone_s in started:
            time_s = alone_s / len(lanes)
            if time_s > 0.0:
                started_s += time_s + self._paced_s(time_s, inside=is_answering, behind=True)
                is_answering = True
        for batch in self._dispatch.batches(self._before):
            time_s = self._time_s(batch) / len(lanes)
            before_s += time_s + self._paced_s(time_s, inside=is_answering, behind=True)
            is_answering = True
        before_s *= 1.0 + num_more / max(1, len(self._before))
        own_s += self._paced_s(own_s, inside=is_answering, behind=False)
        return Turn(first_s, first_s + started_s + before_s, own_s)

    # ---- inside --------------------------------------------------------------------------------

    def _set_step(self) -> None:
        """How long a decode step will be, and decoding altogether behind a prefill."""
        running, before, num_lanes = self._view.running.values(), self._before, len(self._view.free)
        costs = self._sib.prefill_coefficients(1)
        owed_s = self._share * sum([costs.added_s(request.left_tokens) for request in before])
        # half of those before have been prefilled in the mean, and answers end meanwhile
        share = min(0.5, self._expected_s / owed_s) if owed_s > 0.0 else 0.5
        batch = len(running) + share * len(before)
        kv_tokens = sum([r.num_tokens for r in running]) + share * sum(
            [r.num_tokens for r in before]
        )
        self._decode_step_s = self._sib.decode_s(
            dop=1,
            num_masters=1,
            batch=ceil(batch / num_lanes),
            kv_tokens=ceil(kv_tokens / num_lanes),
        )
        # the first token is the prefill's
        lefts = [r.max_tokens - r.num_generated - (r.phase is not Phase.DECODE) for r in running]
        longest = max([*lefts, *(r.max_tokens - r.num_generated - 1 for r in before)], default=0)
        self._most_s = min(self._expected_s, longest * self._decode_step_s)

    def _lane(self, instance: InstanceView) -> _Lane:
        component = self._draft.component_of.get(instance.instance)
        batch = component.requests if component else ()
        now, step = self._view.now, instance.step
        exec_s = min([now - (r.first_token_s or now) for r in batch], default=0.0)
        decode_s = max(0.0, self._expected_s - exec_s)
        more = step is not None and step.is_decode
        cost = sum([1.0 / (r.num_generated + more or 1) for r in batch])
        debt_s = instance.decode_debt_s if self._share else 0.0
        lane = _Lane(0.0, debt_s, decode_s, 0, len(batch), cost)
        if step is None:
            return lane
        time_s = step_s(self._sib, step)
        lane.ends_s = left_of(time_s, now - step.started_s)
        match step.plan:
            case PrefillPlan(items=items) as plan:
                lane.owed_s, lane.least_steps = self._share * time_s, 1
                if not plan.pauses:
                    self._add_answers(lane, sum([item.samples for item in items]))
            case DecodePlan():
                lane.owed_s = max(0.0, lane.owed_s - time_s)
        return lane

    def _time_s(self, batch: Sequence[Request]) -> float:
        return self._sib.prefill_s(1, [(0, request.left_tokens) for request in batch])

    def _begin(self, lane: _Lane, batch: Sequence[Request]) -> tuple[float, float]:
        """When a batch begins there, and how long it takes."""
        time_s = self._time_s(batch)
        gap_s = self._gap_s(lane)
        if gap_s > 0.0 and self._dispatch.is_short(batch[0]):
            gap_s = min(gap_s, self._until_it_gains_s(lane, batch, time_s))
        paced_s = self._paced_s(time_s, inside=lane.num_answers > 0, behind=False)
        return lane.ends_s + gap_s, time_s + paced_s

    def _until_it_gains_s(self, lane: _Lane, batch: Sequence[Request], time_s: float) -> float:
        """Decode steps until the batch may interrupt the answers there: each is a token longer
        after each, which costs less."""
        gain = lane.decode_s * sum([1.0 / request.num_tokens for request in batch])
        if gain <= 0.0:
            return inf
        num_steps = lane.num_answers * (time_s / gain - 1.0 / lane.cost)
        return max(lane.least_steps, ceil(num_steps)) * self._decode_step_s

    def _fill(self, lane: _Lane, batch: Sequence[Request], ends_s: float) -> None:
        """The batch runs there until then, and its answers follow."""
        lane.owed_s, lane.least_steps = self._share * self._time_s(batch), 1
        lane.ends_s = ends_s
        self._add_answers(lane, len(batch))

    def _add_answers(self, lane: _Lane, count: int) -> None:
        lane.num_answers += count
        lane.cost += count
        lane.decode_s = self._expected_s

    def _gap_s(self, lane: _Lane) -> float:
        """Decode steps until all is paid there."""
        return self._steps_s(lane.owed_s, lane.least_steps) if lane.num_answers else 0.0

    def _paced_s(self, time_s: float, *, inside: bool, behind: bool) -> float:
        """Decode steps between the chunks or parts of a prefill, and behind it."""
        num_parts = max(1, ceil(time_s / self._view.limits.max_prefill_wait_s - _ROUNDING))
        num_gaps = (num_parts - 1) * inside + behind
        if not num_gaps:
            return 0.0
        return min(num_gaps * self._steps_s(self._share * time_s / num_parts, 1), self._most_s)

    def _steps_s(self, owed_s: float, least: int) -> float:
        """So much decode time in whole steps."""
        if not self._decode_step_s:
            return 0.0
        num_steps = max(least, ceil(owed_s / self._decode_step_s - _ROUNDING))
        return min(num_steps * self._decode_step_s, self._most_s)


def step_s(sib: Sib, step: Step) -> float:
    """Predicted seconds of a running step."""
    match step.plan:
        case PrefillPlan(items=prefills) as plan:
            lengths = [(item.start, item.num_tokens) for item in prefills]
            return sib.prefill_s(plan.dop, lengths) * plan.share
        case DecodePlan(items=decodes) as plan:
            return sib.decode_s(
                dop=plan.dop,
                num_masters=len(plan.masters),
                batch=len(decodes),
                kv_tokens=sum(item.position + 1 for item in decodes),
            )
        case plan:
            return sib.migrate_s(plan.num_tokens)


def left_of(time_s: float, spent_s: float) -> float:
    """Seconds until a step ends that has run for `spent_s`; an overdue one does not end at once."""
    return max(time_s - spent_s, OVERDUE_SHARE * max(time_s, spent_s))
