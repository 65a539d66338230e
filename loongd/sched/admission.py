"""Whether a waiting request fits the pool, counting what all others may still grow to.

Growth comes from `max_tokens` and the reservation alone, never from outputs not yet produced.
"""

from __future__ import annotations

from loongd.sched.policy import GiveUp
from loongd.sched.request import Request


def never_fits(request: Request, known_slots: int) -> GiveUp | None:
    """The end of a request that no pool of `known_slots` can ever hold; None if one can."""
    least = request.num_tokens + 1 if request.num_generated else request.limit_tokens
    if max(least, request.committed_tokens) <= known_slots:
        return None
    return GiveUp(
        request,
        f"{request.request_id} needs {least:,} KV slots ({request.prompt_tokens:,} "
        f"prompt, {request.num_generated:,} generated so far, max_tokens "
        f"{request.max_tokens:,}), but the pool has only {known_slots:,} now",
    )
