"""How long a prompt at the end of the queue waits, at most, until admission has room for it.

Knows: what admission counts (the slots that running requests may come to need, and how many may
run), and that every answer ends with its `max_tokens` at the latest.
Does not know: which instance a prompt will have, or that most answers end earlier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from loongd.sched.draft import Draft
from loongd.sched.policy import View
from loongd.sched.request import Request
from loongd.sched.sib import Sib
from loongd.sched.words import plural


@dataclass(frozen=True, slots=True)
class SlotWait:
    """`free` of `total` slots are left by admission's count beside `num_running` requests and the
    `num_before` waiting ones that are admitted first.

    Args:
        needed: slots that admission counts for the prompt.
        num_ends: requests that have to end.
        num_tokens: decode steps until then, at most.
        time_s: seconds of these.
    """

    needed: int
    total: int
    free: int
    num_running: int
    num_before: int
    num_ends: int
    num_tokens: int
    time_s: float

    def describe(self) -> str:
        """What it waits for, and why."""
        what = "KV slots" if self.free < self.needed else "its turn to run"
        return (
            f"{what} ({self.needed:,} needed, {self.free:,} of {self.total:,} free by admission's "
            f"count beside {self.num_running:,} running and {self.num_before:,} waiting before it; "
            f"{plural(self.num_ends, 'request')} must end first, after at most "
            f"{plural(self.num_tokens, 'more token')})"
        )


def wait_for_slots(
    view: View,
    draft: Draft,
    sib: Sib,
    request: Request,
    before: Sequence[Request],
    num_more: int = 0,
) -> SlotWait | None:
    """An upper bound, as if all answers were as long as they may be and the queue kept its order.

    `before` are the waiting requests that are admitted first, in order, and `num_more` behind them
    are taken to be like their mean. None when there is room for all of them and for `request`.
    """
    # Who waits for a lost instance is not waited for.
    before = [other for other in before if other.committed_tokens <= draft.total_slots]
    # Slots of ended requests are free as soon as their step is.
    free = draft.total_slots - draft.committed + view.num_ending_tokens
    places = view.limits.max_num_seqs - len(view.running)
    needed, num_before = request.committed_tokens, len(before) + num_more
    needed_before = sum(other.committed_tokens for other in before)
    needed_more = needed_before * num_more // max(1, len(before))
    left_free = free - needed_before - needed_more
    if left_free >= needed and places > num_before:
        return None
    ends = _Ends(view.running.values(), free, places)
    for other in before:
        ends.admit(other)
    if ends.free >= needed_more and ends.places > num_more:
        ends.free, ends.places = ends.free - needed_more, ends.places - num_more
    elif num_more:
        at_once = max(1, min(draft.total_slots * num_more // needed_more, view.limits.max_num_seqs))
        steps_each = sum(map(_left_of, before)) / len(before)
        ends.skip(round(steps_each * num_more / at_once), num_more)
    ends.admit(request)
    return SlotWait(
        needed=needed,
        total=draft.total_slots,
        free=max(0, left_free),
        num_running=len(view.running),
        num_before=num_before,
        num_ends=ends.num_ends,
        num_tokens=ends.num_steps,
        time_s=ends.num_steps * _step_s(view, draft, sib),
    )


class _Ends:
    """Requests in the order in which they end, at the latest; `num_steps` is the time."""

    def __init__(self, running: Iterable[Request], free: int, places: int) -> None:
        self.free = free
        self.places = places
        self.num_steps = 0
        self.num_ends = 0
        self._heap = [(_left_of(r), r.order, r.committed_tokens) for r in running]
        heapify(self._heap)

    def admit(self, request: Request) -> None:
        """Let time pass until there is room for it."""
        need = request.committed_tokens
        while self._heap and (need > self.free or self.places < 1):
            end, _, given = heappop(self._heap)
            self.num_steps = max(self.num_steps, end)
            self.free, self.places = self.free + given, self.places + 1
            self.num_ends += 1
        self.free, self.places = self.free - need, self.places - 1
        heappush(self._heap, (self.num_steps + _left_of(request), request.order, need))

    def skip(self, num_steps: int, num_requests: int) -> None:
        """So many others had their turn, in so much time; then all is as it was."""
        self.num_steps += num_steps
        self.num_ends += num_requests
        self._heap = [(end + num_steps, order, given) for end, order, given in self._heap]


def _left_of(request: Request) -> int:
    """Tokens that it may yet generate."""
    return request.max_tokens - request.num_generated


def _step_s(view: View, draft: Draft, sib: Sib) -> float:
    """A decode step of the slowest group once all its answers are as long as they may be."""
    batches = [(len(c.instances), c.requests) for c in draft.components]
    batches = batches or [(1, tuple(view.running.values()))]
    return max(
        sib.decode_s(
            dop=dop,
            num_masters=1,
            batch=len(requests),
            kv_tokens=sum(request.limit_tokens for request in requests),
        )
        for dop, requests in batches
    )
