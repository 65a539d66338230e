"""Plans that contradict themselves, or what a worker holds, are refused before any slot is taken.

Knows: what must hold of a step. Does not know: how a step is carried out.
"""

from __future__ import annotations

from loongd.errors import PlanError
from loongd.wire import Extend, RunStep


def validate(step: RunStep, rank: int) -> None:
    """Raise PlanError when the plan contradicts itself or does not concern this instance."""
    members = step.members
    if rank not in members or len(set(members)) != len(members):
        raise PlanError(f"step {step.step_id}: bad members {members} for instance {rank}")
    for extend in step.batch:
        num_new = len(extend.tokens) // 4
        where = f"step {step.step_id}, request {extend.request_id}"
        if num_new == 0 or extend.start < 0:
            raise PlanError(f"{where}: {num_new} new tokens at position {extend.start}")
        if not set(extend.holders) <= set(members):
            raise PlanError(f"{where}: holders {extend.holders} outside {members}")
        if extend.holder_tokens and len(extend.holder_tokens) != len(extend.holders):
            raise PlanError(f"{where}: {extend.holder_tokens} tokens on holders {extend.holders}")
        if extend.master is not None:
            if extend.master not in members or extend.keep:
                raise PlanError(f"{where}: master {extend.master} outside {members}, or keeps")
            continue
        kept = [count for _, count in extend.keep]
        inside = {instance for instance, _ in extend.keep} <= set(members)
        if sum(kept) != num_new or min(kept, default=0) < 0 or not inside:
            raise PlanError(f"{where}: keep {extend.keep} for {num_new} tokens over {members}")


def check_held(extend: Extend, rank: int, held: int) -> None:
    """Raise PlanError when this instance holds another number of older tokens than planned."""
    planned = extend.holder_tokens[extend.holders.index(rank)]
    if planned != held:
        raise PlanError(
            f"request {extend.request_id}: {planned} older tokens planned on instance {rank}, "
            f"{held} there"
        )
