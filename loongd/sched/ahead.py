"""No bubbles: which decode groups get their next step while the present one still runs.

A group whose next step is queued on its workers goes on without a pause. The drawn tokens stay with
the workers; that a request has ended is noticed one step late, and what that step draws for it is
dropped.

Knows: when the step after the present one is certain, so that nothing has to be decided.
Does not know: policies. A group has at most one step queued, so whoever comes meanwhile waits for
two decode steps at most; anything that wants an instance, or may want one, keeps steps from being
queued anywhere, and the policy has its say again.
"""

from __future__ import annotations

from collections import Counter

from loongd.sched.instance import Step
from loongd.sched.plan import DecodePlan
from loongd.sched.request import Phase, Request
from loongd.sched.state import State

# After so many steps without a decision the policy is asked again: masters, members and
# migrations are chosen only for groups that are idle. Costs one pause in so many steps.
MAX_IN_A_ROW = 16


def can_follow(state: State) -> list[Step]:
    """Steps in flight that a further step of the same group can be queued behind now."""
    if not state.limits.queue_ahead or len(state.waiting):
        return []
    # A running request in no step is one that a step or a slot is wanted for.
    if not state.all_in_steps:
        return []
    return [step for step in state.steps.values() if _is_certain(state, step)]


def _is_certain(state: State, step: Step) -> bool:
    """The same requests will go on, with the same masters, and no slot need be found."""
    if not isinstance(step.plan, DecodePlan) or step.follow is not None:
        return False
    if step.num_before + 1 >= MAX_IN_A_ROW or not all(map(_goes_on, step.requests)):
        return False
    wanted = Counter(item.master for item in step.plan.items)
    return all(state.pool.free_slots(i) >= num_slots for i, num_slots in wanted.items())


def _goes_on(request: Request) -> bool:
    """The request wants another token after the one that is being drawn, as far as is known."""
    is_last = request.num_generated + 1 >= request.max_tokens
    return request.phase is Phase.DECODE and not is_last and not request.needs_history
