"""First come, first served, with elastic groups: the default policy.

Each round prefill is offered the idle instances first, except where a decode step is owed; decode
takes the rest. So under load the two alternate on every instance and neither starves.
"""

from __future__ import annotations

from loongd.sched.draft import Draft
from loongd.sched.policies.fcfs_dispatch import Dispatch
from loongd.sched.policy import Decisions, View
from loongd.sched.scaling import Scaling


class FirstComeFirstServed:
    """Stateless; see `fcfs_dispatch` for prefill and `sched.scaling` for decode."""

    def decide(self, view: View) -> Decisions:
        """Everything that can start, starts."""
        draft = Draft(view)
        dispatch = Dispatch(view, draft)
        prefills = dispatch.run()
        scaling = Scaling(view, draft)
        decodes = scaling.run()
        return Decisions(
            prefills=tuple(prefills),
            decodes=tuple(decodes),
            preempt=scaling.preempt,
            give_ups=tuple(dispatch.give_ups),
            hold=draft.hold,
            wanted=tuple(scaling.wanted),
        )
