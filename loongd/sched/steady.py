"""Many equal decode steps at once, for virtual time.

While nothing waits or prefills, a decode group with room goes on with the same requests, and with
masters that its policy tells: the policy would decide the same thing again. Otherwise the policy
says how long it is certain to (`Policy.settled`). The simulator may then tell the scheduler of
many such steps in one call, to the same effect, except that a story has one entry for all of them.

Knows: when that is certain, and what the steps change. Does not know: step times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

from loongd.sched.instance import Step
from loongd.sched.plan import DecodeItem, DecodePlan
from loongd.sched.policy import ALWAYS_SETTLED, Policy, Settled
from loongd.sched.request import Phase, Request
from loongd.sched.starting import Starter
from loongd.sched.state import State

LEAST_FREE = 64
"""Slots that must stay free on each member of a group: none of its requests looks for one."""


class Steady:
    """Of one scheduler."""

    def __init__(self, state: State, starter: Starter, policy: Policy) -> None:
        self._state = state
        self._starter = starter
        self._policy = policy
        self._most_requests = policy.steady_requests
        self._most_members = 1 << 62 if policy.steady_groups else 1

    @property
    def is_plain(self) -> bool:
        """Nobody waits, prefills or moves, and every decode group has room for the longest
        answers: then none depends on another."""
        state = self._state
        if len(state.waiting) or state.tally.prefilling:
            return False
        return all(step.is_decode and self._has_room(step) for step in state.steps.values())

    def _has_room(self, step: Step) -> bool:
        most = sum([r.max_tokens - r.num_generated for r in step.requests])
        return most <= self._free(step)

    def _free(self, step: Step) -> int:
        """Slots that the requests of a step may take on any of its members."""
        return min([self._state.pool.free_slots(i) for i in step.members]) - LEAST_FREE

    def outlook(self, now: float) -> dict[int, Settled]:
        """For each decode step that runs: how often, and until when, it is certain to be followed
        by one just like it, if nobody arrives, no prefill or migration ends, and, unless
        `is_plain`, no request ends and no step that is left out here."""
        state, tally = self._state, self._state.tally
        tally.settle(state.instances)
        steps = [step for step in state.steps.values() if self._is_whole(step)]
        if not steps or state.ending or not self._rest_is_busy():
            return {}
        found = [ALWAYS_SETTLED] * len(steps)
        if not self.is_plain or max([len(step.members) for step in steps]) > self._most_members:
            found = self._policy.settled(state.view(now), [step.members for step in steps])
        settled: dict[int, Settled] = {}
        for step, one in zip(steps, found, strict=True):
            if one.num_steps < 1:
                continue
            most = min([r.max_tokens - r.num_generated for r in step.requests]) - 1
            num_steps = min(one.num_steps, most, self._free(step) // len(step.requests))
            if num_steps > 0:
                settled[step.step_id] = Settled(num_steps, one.until_s)
        return settled

    def _is_whole(self, step: Step) -> bool:
        """A decode step in which all requests of its group take part; they are few."""
        batch = len(step.requests)
        if batch > self._most_requests or not step.is_decode or step.follow is not None:
            return False
        members, group_of = step.members, self._state.tally.component_of
        if len(members) == 1:
            group = group_of.get(members[0])
            return group is not None and group.instances == members and len(group.requests) == batch
        groups = {id(group): group for i in members if (group := group_of.get(i)) is not None}
        if not all(set(group.instances) <= set(members) for group in groups.values()):
            return False
        return sum([len(group.requests) for group in groups.values()]) == batch

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
        following_id = self._starter.next_step()
        if len(plan.members) == 1:
            items = self._extend_one(step, plan, num_steps, following_id)
        else:
            items = self._extend(step, plan, num_steps, following_id)
        following = DecodePlan(following_id, plan.members, items)
        state.tally.grew(plan.members)
        state.stories.steps_done(step.requests, repeat(num_steps), sum(elapsed_s), num_steps)
        state.totals.num_generated_tokens += num_steps * len(step.requests)
        state.totals.num_decode_steps += num_steps
        state.steps[following_id] = begun = Step(following, step.requests, now)
        for instance in plan.members:
            view = state.instances[instance]
            for one_s in elapsed_s if view.decode_debt_s else ():
                view.decode_debt_s = max(0.0, view.decode_debt_s - one_s)
            view.step = begun
        return following

    def _extend_one(
        self, step: Step, plan: DecodePlan, num_steps: int, following_id: int
    ) -> tuple[DecodeItem, ...]:
        """So many more tokens of each request, all kept by the one member."""
        (master,), pool = plan.members, self._state.pool
        items: list[DecodeItem] = []
        for item, request in zip(plan.items, step.requests, strict=True):
            self._grow(request, num_steps, following_id)
            pool.allocate(item.segment, master, num_steps)
            position = item.position + num_steps
            items.append(
                DecodeItem(
                    item.request_id, position, master, item.segment, request.segments, item.holders
                )
            )
        return tuple(items)

    def _extend(
        self, step: Step, plan: DecodePlan, num_steps: int, following_id: int
    ) -> tuple[DecodeItem, ...]:
        """So many more tokens of each request, kept by the masters that the policy tells."""
        state = self._state
        *before, last = self._policy.masters(plan, state.pool.free_by_instance(), num_steps)
        earlier = Counter(before)
        items: list[DecodeItem] = []
        for number, (item, request) in enumerate(zip(plan.items, step.requests, strict=True)):
            self._grow(request, num_steps, following_id)
            for masters, count in earlier.items():
                state.pool.allocate(item.segment, masters[number], count)
            state.pool.allocate(item.segment, last[number], 1)
            holders = tuple(sorted({*request.holders, *(masters[number] for masters in earlier)}))
            if last[number] != request.master or last[number] not in holders:
                state.tally.touch(request)
            request.master = last[number]
            request.holders = tuple(sorted({*holders, last[number]}))
            position = item.position + num_steps
            items.append(
                DecodeItem(
                    item.request_id,
                    position,
                    last[number],
                    item.segment,
                    request.segments,
                    holders,
                )
            )
        for instance in {i for item in items for i in item.holders}:
            state.instances[instance].owes_decode = False
        return tuple(items)

    def _grow(self, request: Request, num_steps: int, step_id: int) -> None:
        assert request.phase is Phase.DECODE, request
        request.generate(num_steps)
        request.kv_tokens += num_steps
        request.step_id = request.last_step_id = step_id
