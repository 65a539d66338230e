"""Putting a prompt on a group: where its KV is kept and who masters it afterwards.

Knows: proactive scale-down (`sched.placement`) on a draft, and the words for it.
Does not know: why these requests and these instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from loongd.sched.draft import Draft
from loongd.sched.placement import place
from loongd.sched.policy import Placed
from loongd.sched.request import Request
from loongd.sched.words import name_instances


def put(draft: Draft, request: Request, members: Sequence[int]) -> Placed:
    """Keep all of a waiting request's prompt on the fewest of `members`, and count it."""
    keep = place(
        request.num_tokens,
        request.growth_tokens,
        members,
        free=draft.free,
        reserved=draft.reserved,
    )
    placed = Placed(request, keep, choose_master(draft, keep))
    draft.admit(placed)
    return placed


def choose_master(draft: Draft, keep: Sequence[tuple[int, int]]) -> int:
    """The keeper with most room left."""
    kept = dict(keep)
    return min(kept, key=lambda i: (kept[i] - draft.room(i), i))


def describe_kept(items: Iterable[Placed]) -> str:
    """Where the KV goes: `keep all on instance 2`, or `keep 100 on 1, 50 on 2`."""
    kept: dict[int, int] = {}
    for item in items:
        for instance, num_tokens in item.keep:
            kept[instance] = kept.get(instance, 0) + num_tokens
    if len(kept) == 1:
        return f"keep all on {name_instances(kept)}"
    return "keep " + ", ".join(f"{num_tokens:,} on {i}" for i, num_tokens in kept.items())
