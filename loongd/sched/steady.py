"""Many equal decode steps at once, for virtual time.

While nothing waits or prefills, a decode group of one instance with room goes on with the same
requests and the same master: the policy would decide the same thing again. Otherwise the policy
says how long it is certain to (`Policy.settled`). The simulator may then tell the scheduler of
many such steps in one call, to the same effect.

Knows: when that is certain, and what the steps change. Does not know: step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from loongd.sched.instance import Step
from loongd.sched.plan import DecodeItem, DecodePlan
from loongd.sched.policy import ALWAYS_SETTLED, Policy, Settled
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

    @property
    def is_plain(self) -> bool:
        """Nobody waits, prefills or moves: then no decode group depends on another."""
        state = self._state
        moves = any(not step.is_decode for step in state.steps.values())
        return not (len(state.waiting) or state.tally.prefilling or moves)

    def outlook(self, now: float) -> dict[int, Settled]:
        """For each decode step that runs: how often, and until when, it is certain to be followed
        by one just like it, if nobody arrives, no prefill or migration ends, and, unless
        `is_plain`, no request ends and no step that is left out here."""
        state, tally = self._state, self._state.tally
        tally.settle(state.instances)
        free = min(state.pool.free_by_instance().values()) - LEAST_FREE
        steps = [step for step in state.steps.values() if self._is_alone(step)]
        if not steps or free < 1 or state.ending or not self._rest_is_busy():
            return {}
        found = [ALWAYS_SETTLED] * len(steps)
        if not self.is_plain:
            found = self._policy.settled(state.view(now), [step.members[0] for step in steps])
        settled: dict[int, Settled] = {}
        for step, one in zip(steps, found, strict=True):
            most = min(r.max_tokens - r.num_generated for r in step.requests) - 1
            num_steps = min(one.num_steps, most, free // len(step.requests))
            if num_steps > 0:
                settled[step.step_id] = Settled(num_steps, one.until_s)
        return settled

    def _is_alone(self, step: Step) -> bool:
        """A decode group of one instance takes part with all its requests, and they are few."""
        batch = len(step.requests)
        if not step.is_decode or len(step.members) > 1 or step.follow is not None:
            return False
        group = self._state.tally.component_of.get(step.members[0])
        if group is None or group.instances != step.members:
            return False
        return len(group.requests) == batch <= self._most_requests

    def _rest_is_busy(self) -> bool:
        """Whoever is in no step is between two parts of a prefill, or decodes on an instance
        where a prefill or migration runs, and so cannot be in one before that ends."""
        state = self._state
        in_steps = sum(len(step.requests) for step in state.steps.values())
        num_idle = len(state.running) + len(state.ending) - in_steps
        num_idle -= sum([r.step_id is None for r in state.tally.unfinished.values()])
        if num_idle:
            for component in state.tally.components:
                steps = [state.instances[i].step for i in component.instances]
                if any(step is not None and not step.is_decode for step in steps):
                    num_idle -= sum([r.step_id is None for r in component.requests])
        return num_idle == 0

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
                DecodeItem(
                    item.request_id,
                    item.position + num_steps,
                    item.master,
                    item.segment,
                    request.segments,
                    item.holders,
                )
                for item, request in zip(plan.items, step.requests, strict=True)
            ),
        )
        (instance,) = plan.members
        for request in step.requests:
            self._grow(request, instance, num_steps, following.step_id)
        state.tally.grew(plan.members)
        state.stories.steps_done(step.requests, repeat(num_steps), sum(elapsed_s), num_steps)
        state.totals.num_generated_tokens += num_steps * len(step.requests)
        state.totals.num_decode_steps += num_steps
        view = state.instances[instance]
        for one_s in elapsed_s if view.decode_debt_s else ():
            view.decode_debt_s = max(0.0, view.decode_debt_s - one_s)
        view.step = state.steps[following.step_id] = Step(following, step.requests, now)
        return following

    def _grow(self, request: Request, instance: int, num_steps: int, step_id: int) -> None:
        segment = request.open_segment
        assert request.phase is Phase.DECODE, request
        assert segment is not None, request
        request.generate(num_steps)
        request.kv_tokens += num_steps
        request.step_id = request.last_step_id = step_id
        self._state.pool.allocate(segment, instance, num_steps)
