"""Putting a prompt, or a part of it, on a group: where its KV is kept and who masters it later.

Knows: proactive scale-down (`sched.placement`) on a draft, which instances a prompt between two
chunks needs, and the words for it. Does not know: why these requests and these instances.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from loongd.sched.chunks import fit_chunk
from loongd.sched.draft import Draft
from loongd.sched.placement import place
from loongd.sched.policy import Placed
from loongd.sched.request import Phase, Request
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


def put_chunk(
    draft: Draft, request: Request, keepers: Sequence[int], *, dop: int, most: int
) -> Placed:
    """Keep the next part of a prompt on the fewest of `keepers`, and count it.

    The part is what is left, or an aligned chunk of a group of `dop`: at most `most` tokens, and
    what the keepers, which must have a free slot, have room for.
    """
    is_new = request.phase is Phase.WAITING
    if not is_new:
        draft.forget_reservation(request)
    room = sum(max(0, draft.room(i)) for i in keepers) or sum(draft.free[i] for i in keepers)
    chunk = fit_chunk(min(most, room), dop, left=request.left_tokens)
    # one keeper keeps all, whatever it holds
    holders = request.holders if len(keepers) > 1 else ()
    keep = place(
        chunk,
        request.growth_tokens,
        keepers,
        free=draft.free,
        reserved=draft.reserved,
        later_tokens=request.left_tokens - chunk,
        held={i: draft.view.tokens_on(request, i) for i in holders},
    )
    placed = Placed(request, keep, choose_master(draft, keep))
    if is_new:
        draft.admit(placed)
    else:
        draft.keep(placed)
    return placed


def find_keepers(
    draft: Draft, request: Request, wanted: int, *, rank: Callable[[int], Any]
) -> list[int] | None:
    """The holders of a prompt between two chunks, and others while `wanted` tokens lack room.

    One more at a time, least `rank` first; slots that others count on only when no keeper has
    any other. None when the whole pool has no free slot for it.
    """
    draft.forget_reservation(request)
    keepers = list(request.holders)
    for space in (draft.room, draft.free.__getitem__):
        others = sorted((i for i in draft.free if i not in keepers and space(i) > 0), key=rank)
        while others and sum(max(0, space(i)) for i in keepers) < wanted:
            keepers.append(others.pop(0))
        if any(space(i) > 0 for i in keepers):
            break
    draft.restore_reservation(request)
    return keepers if any(draft.free[i] > 0 for i in keepers) else None


def fit_keepers(
    draft: Draft, request: Request, keepers: Sequence[int], group: Sequence[int]
) -> list[int]:
    """The keepers of a prompt between two chunks, and where they have no room for the rest of it,
    all of the group that computes the next one: what has no room on one is better spread evenly
    (`sched.placement`) than kept by one until that is full."""
    draft.forget_reservation(request)
    room = sum(max(0, draft.room(i)) for i in keepers)
    draft.restore_reservation(request)
    others = [i for i in group if i not in keepers and draft.room(i) > 0]
    return [*keepers, *others] if room < request.left_tokens else list(keepers)


def choose_master(draft: Draft, keep: Sequence[tuple[int, int]]) -> int:
    """The keeper with most room left."""
    if len(keep) == 1:
        return keep[0][0]
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


def describe_part(placed: Placed) -> str:
    """Which tokens of the prompt: `1,200 tokens`, or `tokens 0 to 1,024 of 1,200`."""
    request, start, count = placed.request, placed.request.kv_tokens, placed.num_tokens
    if count == request.num_tokens:
        return f"{count:,} tokens"
    return f"tokens {start:,} to {start + count:,} of {request.num_tokens:,}"
