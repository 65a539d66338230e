"""How long the policy `loongserve` is certain to do nothing but let decode groups step on.

For virtual time: the simulator asks before it lets many decode steps end at once. What is certain
holds while nobody arrives, no prefill or migration ends, and no request ends. Then lengths only
grow: instances keep their room (a reserved slot becomes a used one), waiting prompts keep their
order, and a prompt that may not interrupt a decode group now may later only because it has waited,
because the group has had its time, because its KV may move again, or because its answers have
become longer.

Knows: the steps of `policies.loongserve`, in their order, and what each needs to start anything
when a decode group has ended a step. Does not know: step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from loongd.sched.allocate import Allocate
from loongd.sched.dispatch import AloneTimes, Dispatch
from loongd.sched.draft import Draft
from loongd.sched.elastic import ElasticPrefill
from loongd.sched.policy import NOT_SETTLED, Hold, Settled, View
from loongd.sched.request import Request
from loongd.sched.sib import Sib

# Costs fall as answers grow; of the steps until one is no more than a gain so many are believed.
SHARE_OF_STEPS = 0.99


class Outlook:
    """From one view; steps are in flight."""

    def __init__(self, view: View, sib: Sib, alone: AloneTimes) -> None:
        self._view = view
        self._draft = Draft(view)
        self._allocate = Allocate(view, self._draft, sib)
        self._someone_waits = next(iter(view.waiting), None) is not None
        self._until_s = -inf
        if self._can_move():
            return
        self._dispatch = Dispatch(view, self._draft, sib, alone)
        if self._someone_waits:
            self._dispatch.admit()
        self._elastic = ElasticPrefill(
            view, self._draft, sib, dispatch=self._dispatch, allocate=self._allocate
        )
        if view.hold is None or self._is_still_held(view.hold):
            self._until_s = self._find_common()

    def of(self, members: Sequence[int]) -> Settled:
        """For a decode group of these instances, with all its requests in a step."""
        if self._until_s == -inf or not self._draft.held.isdisjoint(members):
            return NOT_SETTLED
        if len(members) > 1 and self._allocate.is_quiet:
            return NOT_SETTLED  # it may be drawn together
        batch, reserved = self._allocate.batch(members[0]), self._draft.reserved
        # When the step has ended, the slots that it uses are no longer reserved.
        masters = [r.master for r in batch if r.master is not None and r.growth_tokens]
        for master in masters:
            reserved[master] -= 1
        settled = self._of(members, batch)
        for master in masters:
            reserved[master] += 1
        return settled

    def _of(self, members: Sequence[int], batch: Sequence[Request]) -> Settled:
        until_s = min(self._until_s, *map(self._elastic.stays_s, members))
        if until_s == -inf:
            return NOT_SETTLED
        if not self._someone_waits:
            return Settled(1 << 62, until_s)
        # What admission counts for a request stays while it keeps within its reservation.
        num_steps = min([r.growth_tokens for r in batch]) - 1
        for instance in members:
            until_s = min(until_s, self._for_first(instance))
            if num_steps < 1 or until_s == -inf:
                return NOT_SETTLED
            short = self._for_shorts(instance, batch)
            num_steps, until_s = min(num_steps, short.num_steps), min(until_s, short.until_s)
        return Settled(num_steps, until_s)

    # ---- what does not depend on whose step ends -----------------------------------------------

    def _can_move(self) -> bool:
        """An instance is idle whose KV could move."""
        allocate, draft = self._allocate, self._draft
        return not draft.idle.isdisjoint(draft.component_of.keys() - allocate.pinned)

    def _is_still_held(self, hold: Hold) -> bool:
        """The urgent prompt for which a busy instance is held goes on waiting for it; any other
        hold is given up as soon as an instance is idle."""
        held, draft = hold.instances[0], self._draft
        if draft.idle or draft.free.get(held, 0) < 1 or not self._elastic.is_held_for(hold):
            return False
        draft.held.add(held)
        return True

    def _find_common(self) -> float:
        """Until when nothing starts, whoever's step ends."""
        dispatch, allocate, now = self._dispatch, self._allocate, self._view.now
        until_s = min(map(self._ranks_until_s, allocate.unfinished), default=inf)
        for request in allocate.unfinished:
            if request.between_chunks:
                until_s = min(until_s, max(map(allocate.paid_s, request.needed)))
        if not self._someone_waits or until_s <= now:
            return until_s
        # A step that has ended has given its slots back until the next one starts.
        most = max([len(c.requests) for c in self._draft.components], default=0)
        if dispatch.give_ups or dispatch.would_be_short(most):
            return -inf
        is_behind = self._elastic.is_first_behind
        if self._draft.idle and (dispatch.shorts or not is_behind or self._elastic.starts_beside):
            return -inf
        for urgent_s in map(dispatch.urgent_s, dispatch.longs):
            if urgent_s > now:
                until_s = min(until_s, urgent_s)
            elif not (is_behind or self._draft.held):
                return -inf  # an instance is found or held for the first
        return until_s

    def _ranks_until_s(self, request: Request) -> float:
        """Until when an unfinished prefill goes neither before nor behind others by time alone."""
        turns = (self._dispatch.urgent_s(request), self._dispatch.due_s(request))
        return min([at_s for at_s in turns if at_s > self._view.now], default=inf)

    # ---- prompts that wait ---------------------------------------------------------------------

    def _for_shorts(self, instance: int, batch: Sequence[Request]) -> Settled:
        """Short prompts do not interrupt the group."""
        dispatch = self._dispatch
        if not dispatch.shorts:
            return Settled(1 << 62, inf)
        if instance in self._allocate.pinned:
            return NOT_SETTLED
        taken = dispatch.take(dispatch.shorts, [instance])
        if not taken:
            return Settled(1 << 62, inf)
        # The gain falls as time passes; the cost at most as fast as the shortest answer grows.
        gain, cost = dispatch.weigh(taken, batch)
        shortest = min([r.num_generated for r in batch])
        if gain > cost or shortest == 0:
            return NOT_SETTLED
        num_steps = 1 << 62
        if gain > 0.0:
            num_steps = int(SHARE_OF_STEPS * shortest * (cost / gain - 1.0))
        return Settled(num_steps, self._allocate.paid_s(instance))

    def _for_first(self, instance: int) -> float:
        """Until when the best long prompt that waits does not start there."""
        first, allocate = self._elastic.first, self._allocate
        if first is None:
            return inf
        if instance in allocate.pinned:
            return inf if self._draft.free.keys() - allocate.pinned else -inf
        stays_s = allocate.stays_s(instance, first, 0)
        return min(stays_s, self._late_s(instance, first)) if stays_s > -inf else -inf

    def _late_s(self, instance: int, request: Request) -> float:
        """When a request is late, and the group there has had its time."""
        return max(self._dispatch.late_s(request), self._allocate.paid_s(instance))
