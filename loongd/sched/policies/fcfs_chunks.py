"""Prompts too long for one step of their group: their next parts, first come, first served.

A group computes at most `max_step_tokens` for each of its instances in a step, so a longer prompt
takes several. Its KV stays where it is; those instances are in every later group. They are kept
for it, but decode steps that are owed there come first.
"""

from __future__ import annotations

from loongd.sched.draft import Draft
from loongd.sched.policy import StartPrefill, View
from loongd.sched.prefilling import (
    describe_kept,
    describe_part,
    find_keepers,
    fit_keepers,
    put_chunk,
)
from loongd.sched.request import Phase, Request
from loongd.sched.sib import Sib
from loongd.sched.words import describe_prefill, name_instances


class NextChunks:
    """One round. `starved` is a prefill for which the whole pool has no free slot."""

    def __init__(self, view: View, draft: Draft, sib: Sib | None = None) -> None:
        self.starved: Request | None = None
        self._draft = draft
        self._sib = sib
        self._limits = view.limits
        unfinished = (r for r in view.running.values() if r.phase is Phase.PREFILL)
        self._unfinished = sorted(
            (r for r in unfinished if r.between_chunks), key=lambda r: r.order
        )

    def run(self) -> list[StartPrefill]:
        """The chunks that start now; instances that others wait for are held."""
        started = [self._go_on(request) for request in self._unfinished]
        return [start for start in started if start is not None]

    def _go_on(self, request: Request) -> StartPrefill | None:
        draft = self._draft
        wanted = min(request.left_tokens, self._limits.max_step_tokens * len(request.holders))
        keepers = find_keepers(
            draft, request, wanted, rank=lambda i: (i not in draft.idle, -draft.room(i), i)
        )
        if keepers is None:
            self.starved = self.starved or request
            return None
        if not draft.held.isdisjoint(keepers):
            return None
        if not all(map(draft.is_prefills_turn, keepers)):
            draft.held |= set(keepers)
            return None
        return self._start(request, keepers)

    def _start(self, request: Request, keepers: list[int]) -> StartPrefill:
        draft, limits = self._draft, self._limits
        wanted = -(-request.left_tokens // limits.prefill_tokens_per_instance)
        others = (i for i in draft.idle - draft.held if i not in keepers)
        open_to = sorted(filter(draft.is_prefills_turn, others), key=lambda i: (-draft.room(i), i))
        group = keepers + open_to[: max(0, wanted - len(keepers))]
        most = limits.max_step_tokens * len(group)
        keepers = fit_keepers(draft, request, keepers, group)
        cached = request.kv_tokens
        placed = put_chunk(draft, request, keepers, dop=len(group), most=most)
        time = describe_prefill(self._sib, len(group), [(cached, placed.num_tokens)])
        draft.idle -= set(group)
        members = tuple(sorted(group))
        reason = (
            f"prefill {describe_part(placed)} of {request.request_id} on {name_instances(members)} "
            f"(DoP {len(members)}){time}: at most {limits.max_step_tokens:,} tokens an instance "
            f"and step; {describe_kept([placed])}"
        )
        return StartPrefill(members, (placed,), reason)
