"""Which requests are taken at all, and which waiting ones can never fit the pool.

Growth comes from `max_tokens` and the reservation alone, never from outputs not yet produced.
"""

from __future__ import annotations

from dataclasses import dataclass

from loongd.sched.policy import GiveUp, Limits
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


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken: `code` is an OpenAI error code, `status` an HTTP status."""

    message: str
    code: str
    status: int


def refuse(
    request: Request, limits: Limits, *, known_slots: int, num_waiting: int, draining: bool
) -> Refusal | None:
    """Why a new request cannot be taken now; None when it can.

    `known_slots` of all instances, 0 before the first has joined.
    """
    if 0 < known_slots < request.limit_tokens:
        message = (
            f"prompt of {request.prompt_tokens:,} tokens + max_tokens {request.max_tokens:,} = "
            f"{request.limit_tokens:,} tokens, but the KV pool has {known_slots:,} slots"
        )
        return Refusal(message, "context_length_exceeded", 400)
    if draining:
        return Refusal("the server is draining and takes no new requests", "draining", 503)
    most = limits.max_num_queued_reqs
    if num_waiting >= most:
        message = f"the queue is full: {most:,} requests are waiting (max_num_queued_reqs)"
        return Refusal(message, "overloaded", 503)
    return None
