"""Many equal decode steps at once, for virtual time.

While nothing waits and all requests are in steps, a decode group of one instance with room goes on
with the same requests and the same master: the policy would decide the same thing again, as long
as no prefill ends and it is settled about those that are half done. The simulator may then tell
the scheduler of many such steps in one call, to the same effect.

Knows: when that is certain, and what the steps change. Does not know: step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loongd.sched.instance import Step
from loongd.sched.plan import DecodePlan
from loongd.sched.policy import Policy
from loongd.sched.request import Phase, Request
from loongd.sched.starting import Starter
from loongd.sched.state import State

LEAST_FREE = 1024
"""Slots that must stay free on every instance: nobody looks for a slot meanwhile."""


class Steady:
    """Of one scheduler."""

    def __init__(self, state: State, starter: Starter, policy: Policy) -> None:
        self._state = state
        self._starter = starter
        self._policy = policy
        self._most_requests = policy.steady_requests

    def num_steps(self, step_id: int, now: float) -> int:
        """How often a running step is certain to be followed by one just like it, if nobody
        arrives and no prefill or migration ends before."""
        state = self._state
        step = state.steps[step_id]
        plan = step.plan
        if not isinstance(plan, DecodePlan) or len(plan.members) > 1 or step.follow is not None:
            return 0
        batch, (instance,) = len(step.requests), plan.members
        if len(state.waiting) or batch > self._most_requests:
            return 0
        num_here, is_prefilling = 0, False
        for request in state.running.values():
            if request.step_id is None:
                return 0
            is_prefilling = is_prefilling or request.phase is Phase.PREFILL
            num_here += instance in request.holders
        free = min(state.pool.free_by_instance().values()) - LEAST_FREE
        if num_here != batch or free < batch:
            return 0
        if is_prefilling and not self._policy.is_settled(state.view(now)):
            return 0
        most = min(r.max_tokens - r.num_generated for r in step.requests) - 1
        return max(0, min(most, free // batch))

    def repeat(self, step_id: int, elapsed_s: Sequence[float], now: float) -> DecodePlan:
        """The step and the ones just like it after it have ended, each after so many seconds; one
        more, which is returned, runs since `now`."""
        state = self._state
        step = state.steps.pop(step_id)
        num_steps, plan = len(elapsed_s), step.plan
        assert isinstance(plan, DecodePlan), plan
        following = DecodePlan(
            self._starter.next_step(),
            plan.members,
            tuple(
                replace(item, position=item.position + num_steps, cached=tuple(request.segments))
                for item, request in zip(plan.items, step.requests, strict=True)
            ),
        )
        (instance,) = plan.members
        for request in step.requests:
            self._grow(request, instance, elapsed_s, following.step_id)
        state.totals.num_generated_tokens += num_steps * len(step.requests)
        state.totals.num_decode_steps += num_steps
        view = state.instances[instance]
        for one_s in elapsed_s if view.decode_debt_s else ():
            view.decode_debt_s = max(0.0, view.decode_debt_s - one_s)
        view.step = state.steps[following.step_id] = Step(following, step.requests, now)
        return following

    def _grow(
        self, request: Request, instance: int, elapsed_s: Sequence[float], step_id: int
    ) -> None:
        num_steps, segment = len(elapsed_s), request.open_segment
        assert request.phase is Phase.DECODE, request
        assert segment is not None, request
        request.num_generated += num_steps
        request.kv_tokens += num_steps
        request.step_id = request.last_step_id = step_id
        self._state.pool.allocate(segment, instance, num_steps)
        self._state.stories.step_done(
            request.request_id,
            num_tokens=num_steps,
            elapsed_s=sum(elapsed_s),
            num_steps=num_steps,
        )
