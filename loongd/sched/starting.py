"""Turns decisions into plans: charges slots, opens segments, numbers steps.

The numbers of steps and segments only grow, so a late report of a dropped step, or a late free,
can never be taken for a newer one.
"""

from __future__ import annotations

from loongd.sched.events import RunDecode, RunPrefill
from loongd.sched.instance import Step
from loongd.sched.plan import DecodeItem, DecodePlan, PrefillItem, PrefillPlan
from loongd.sched.policy import Placed, StartDecode, StartPrefill
from loongd.sched.request import Phase, Request
from loongd.sched.state import State
from loongd.sched.story import StoryEntry


class Starter:
    """Starts steps on a state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._num_steps = 0
        self._num_segments = 0

    def prefill(self, start: StartPrefill, now: float) -> RunPrefill:
        """Charge each prompt where it is kept, and put its members to work."""
        state = self._state
        step_id = self._next_step()
        items = tuple(self._place(placed, step_id) for placed in start.items)
        plan = PrefillPlan(step_id, start.members, items)
        self._begin(Step(plan, tuple(placed.request for placed in start.items), now))
        for instance in start.members:
            state.instances[instance].owes_decode = True
        state.totals.num_prefill_steps += 1
        keepers = {i for item in items for i, _ in item.keep}
        state.totals.num_scale_downs += len(keepers) < len(start.members)
        for item in items:
            entry = StoryEntry(
                now, "prefill", start.reason, group=start.members, kept=dict(item.keep)
            )
            state.stories.add(item.request_id, entry)
        return RunPrefill(plan, start.reason)

    def decode(self, start: StartDecode, now: float) -> RunDecode:
        """Charge one slot on each request's master, and put the members to work."""
        state = self._state
        step_id = self._next_step()
        for request, _ in start.items:
            for instance in request.holders:
                state.instances[instance].owes_decode = False
        items = tuple(self._extend(request, master, step_id) for request, master in start.items)
        plan = DecodePlan(step_id, start.members, items)
        self._begin(Step(plan, tuple(request for request, _ in start.items), now))
        state.totals.num_decode_steps += 1
        state.totals.num_scale_ups += len(start.joined) > 0
        masters = plan.masters
        for item in items:
            entry = StoryEntry(now, "decode", start.reason, group=start.members, masters=masters)
            state.stories.begin_decode(item.request_id, entry)
        return RunDecode(plan, start.reason)

    def _next_step(self) -> int:
        self._num_steps += 1
        return self._num_steps

    def _next_segment(self) -> int:
        self._num_segments += 1
        return self._num_segments

    def _begin(self, step: Step) -> None:
        state = self._state
        state.steps[step.step_id] = step
        for instance in step.members:
            assert state.instances[instance].idle, f"instance {instance} is not idle"
            state.instances[instance].step = step

    def _place(self, placed: Placed, step_id: int) -> PrefillItem:
        request = placed.request
        self._state.waiting.remove(request.request_id)
        self._state.running[request.request_id] = request
        request.move(Phase.PREFILL)
        segment = self._next_segment()
        for instance, num_tokens in placed.keep:
            self._state.pool.allocate(segment, instance, num_tokens)
        request.segments = [segment]
        request.holders = tuple(sorted(instance for instance, _ in placed.keep))
        request.master = placed.master
        request.step_id = request.last_step_id = step_id
        return PrefillItem(request.request_id, 0, request.num_tokens, segment, placed.keep)

    def _extend(self, request: Request, master: int, step_id: int) -> DecodeItem:
        cached, holders = tuple(request.segments), request.holders
        segment = request.open_segment
        if segment is None:
            segment = request.open_segment = self._next_segment()
            request.segments.append(segment)
        self._state.pool.allocate(segment, master, 1)
        if master not in holders:
            request.holders = tuple(sorted((*holders, master)))
        request.master, request.wanted = master, None
        request.step_id = request.last_step_id = step_id
        position = request.num_tokens - 1
        return DecodeItem(request.request_id, position, master, segment, cached, holders)
