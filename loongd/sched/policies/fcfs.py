"""First come, first served, with elastic groups.

Each round prefill is offered the idle instances first, except where a decode step is owed; decode
takes the rest. So under load the two alternate on every instance and neither starves. A prompt is
computed at once, or in parts where it has more tokens than a step of its group may (`fcfs_chunks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loongd.sched.draft import Draft
from loongd.sched.plan import DecodePlan
from loongd.sched.policies.fcfs_chunks import NextChunks
from loongd.sched.policies.fcfs_dispatch import Dispatch
from loongd.sched.policy import (
    ALWAYS_SETTLED,
    NOT_SETTLED,
    Decisions,
    Settled,
    View,
    same_masters,
)
from loongd.sched.scaling import Scaling
from loongd.sched.sib import Sib


class FirstComeFirstServed:
    """Stateless; see `fcfs_dispatch` for prefill and `sched.scaling` for decode."""

    steady_requests = 1 << 62
    steady_groups = True
    pays_decode = False

    def __init__(self, sib: Sib | None = None) -> None:
        """`sib` decides nothing; it tells times in reasons."""
        self._sib = sib

    def settled(self, view: View, groups: Sequence[Sequence[int]]) -> list[Settled]:
        """Always, unless a prompt waits or is between two parts."""
        is_open = any(r.between_chunks for r in view.tally.unfinished.values())
        is_open = is_open or next(iter(view.waiting), None) is not None
        return [NOT_SETTLED if is_open else ALWAYS_SETTLED] * len(groups)

    def masters(
        self, plan: DecodePlan, free: Mapping[int, int], num_steps: int
    ) -> Sequence[tuple[int, ...]]:
        """Each request keeps its own."""
        return same_masters(plan, num_steps)

    def decide(self, view: View) -> Decisions:
        """Everything that can start, starts."""
        draft = Draft(view)
        chunks = NextChunks(view, draft, self._sib)
        started = chunks.run()
        dispatch = Dispatch(view, draft, self._sib)
        prefills = [*started, *dispatch.run()]
        scaling = Scaling(view, draft, foretells=self._sib, starved=chunks.starved)
        decodes = scaling.run()
        return Decisions(
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            preempt=scaling.preempt,
            give_ups=tuple(dispatch.give_ups),
            hold=draft.hold,
            wanted=tuple(scaling.wanted),
        )
