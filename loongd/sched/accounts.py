"""What is noted of a step that has ended: who has had how much time, and how long it really took.

Knows: turns between prefill and decode on an instance, and what the SIB learns from. Does not
know: requests.
"""

from __future__ import annotations

from loongd.sched.instance import Step
from loongd.sched.plan import DecodePlan, PrefillPlan
from loongd.sched.sib import Sib
from loongd.sched.state import State


def account(step: Step, elapsed_s: float, state: State, sib: Sib | None) -> None:
    """Charge a step to the instances that ran it, and let the SIB learn from it.

    Decode is owed its share of the time that a prefill took.
    """
    views = [state.instances[instance] for instance in step.members]
    owed_s = state.limits.decode_share * elapsed_s
    match step.plan:
        case PrefillPlan(items=prefills):
            for view in views:
                view.decode_debt_s = max(view.decode_debt_s, owed_s)
            for request in step.requests:
                request.chunk_s += elapsed_s
            # of a chunk in parts all together: layers may differ
            if sib is not None and not step.plan.pauses:
                lengths = [(item.start, item.num_tokens) for item in prefills]
                sib.observe_prefill(step.plan.dop, lengths, step.requests[0].chunk_s)
        case DecodePlan(items=decodes):
            for view in views:
                view.decode_debt_s = max(0.0, view.decode_debt_s - elapsed_s)
            if sib is not None:
                sib.observe_decode(
                    dop=step.plan.dop,
                    num_masters=len(step.plan.masters),
                    batch=len(decodes),
                    kv_tokens=sum([item.position for item in decodes]) + len(decodes),
                    elapsed_s=elapsed_s,
                )
