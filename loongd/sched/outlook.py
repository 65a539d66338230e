"""How long the policy `loongserve` is certain to do nothing but let decode groups step on.

For virtual time: the simulator asks before it lets many decode steps end at once. What is certain
holds while nobody arrives, no prefill or migration ends, and no request ends. Then lengths only
grow: instances keep their room (a reserved slot becomes a used one), waiting prompts keep their
order, and a prompt that may not interrupt a decode group now may later only because it has waited,
because the group has had its time, or because its answers have become longer.

Knows: the steps of `policies.loongserve`, in their order, and what each needs to start anything
when a decode group of one instance has ended a step. Does not know: step times.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from loongd.sched.allocate import Allocate
from loongd.sched.dispatch import Dispatch
from loongd.sched.draft import Draft
from loongd.sched.elastic import ElasticPrefill
from loongd.sched.policy import NOT_SETTLED, Settled, View
from loongd.sched.request import Request
from loongd.sched.sib import Sib

# Costs fall as answers grow; of the steps until one is no more than a gain so many are believed.
SHARE_OF_STEPS = 0.99


class Outlook:
    """From one view; steps are in flight."""

    def __init__(self, view: View, sib: Sib) -> None:
        self._view = view
        self._draft = Draft(view)
        self._allocate = Allocate(view, self._draft, sib)
        self._dispatch = Dispatch(view, self._draft, sib)
        self._someone_waits = next(iter(view.waiting), None) is not None
        if self._someone_waits:
            self._dispatch.admit()
        self._elastic = ElasticPrefill(
            view, self._draft, sib, dispatch=self._dispatch, allocate=self._allocate
        )
        self._until_s = self._find_common()

    def of(self, instance: int) -> Settled:
        """For a decode group of this one instance, with all its requests in a step."""
        if self._until_s == -inf or not self._elastic.stays(instance):
            return NOT_SETTLED
        if not self._someone_waits:
            return Settled(1 << 62, self._until_s)
        batch = self._allocate.batch(instance)
        # What admission counts for a request stays while it keeps within its reservation.
        most = min(r.growth_tokens for r in batch) - 1
        # When the step has ended, the slot that it uses is no longer reserved.
        self._draft.reserved[instance] -= len(batch)
        short = self._for_shorts(instance, batch)
        self._draft.reserved[instance] += len(batch)
        until_s = min(self._until_s, short.until_s, self._for_first(instance))
        return Settled(min(most, short.num_steps), until_s)

    def _find_common(self) -> float:
        """Until when nothing starts that does not depend on whose step ends."""
        dispatch, allocate = self._dispatch, self._allocate
        until_s = inf
        for request in allocate.unfinished:
            if request.between_chunks:
                until_s = min(until_s, max(map(allocate.paid_s, request.holders)))
            urgent_s = dispatch.urgent_s(request)
            if urgent_s > self._view.now:
                until_s = min(until_s, urgent_s)
        if not self._someone_waits:
            return until_s
        if self._draft.idle or dispatch.give_ups or dispatch.is_short_of_room:
            return -inf
        urgent_s = min(map(dispatch.urgent_s, dispatch.longs), default=inf)
        return min(until_s, urgent_s) if urgent_s > self._view.now else -inf

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
        shortest = min(r.num_generated for r in batch)
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
        return self._late_s(instance, first) if allocate.stays(instance, first, 0) else -inf

    def _late_s(self, instance: int, request: Request) -> float:
        """When a request is late, and the group there has had its time."""
        return max(self._dispatch.late_s(request), self._allocate.paid_s(instance))
