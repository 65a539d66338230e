"""Placement: which instances of a group keep a prompt's KV (proactive scale-down).

LoongServe section 4.2: during the prefill ring every token's KV passes by every member, so any
member may keep any run of tokens at no cost. Decode wants few holders, so the fewest that have
room are chosen, and room that other requests count on is left to them as long as possible. What
has no room on one instance is spread evenly over those that it needs: each attends to what it
holds, and a chunk, or a token, waits for the one that holds most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType


def place(
    num_tokens: int,
    growth_tokens: int,
    members: Sequence[int],
    *,
    free: Mapping[int, int],
    reserved: Mapping[int, int],
    later_tokens: int = 0,
    held: Mapping[int, int] = MappingProxyType({}),
) -> tuple[tuple[int, int], ...]:
    """Runs `(instance, tokens)` in position order that sum to `num_tokens`.

    Args:
        growth_tokens: room wanted beside the prompt, for its own decode.
        free: free slots of each member; they must hold the tokens together.
        reserved: of these, slots that requests already there count on.
        later_tokens: the rest of the prompt, which later chunks will keep.
        held: earlier tokens of the prompt on members.
    """
    if len(members) == 1:
        assert free[members[0]] >= num_tokens, f"{num_tokens} tokens do not fit {dict(free)}"
        return ((members[0], num_tokens),)
    room = {i: max(0, free[i] - reserved[i]) for i in members}
    rest = num_tokens + later_tokens
    for wanted in (rest + growth_tokens, rest):
        if sum(room.values()) >= wanted:
            return _level(num_tokens, _fewest(wanted, room), room, held)
    if sum(room.values()) >= num_tokens:  # the prompt needs all of them, and more
        return _level(num_tokens, _fewest(sum(room.values()), room), room, held)
    slots = {i: free[i] for i in members}
    return _level(num_tokens, _fewest(num_tokens, slots), slots, held)


def _fewest(wanted: int, room: Mapping[int, int]) -> list[int]:
    """The fewest instances whose room sums to `wanted`, most room first."""
    chosen: list[int] = []
    total = 0
    for instance in sorted(room, key=lambda i: (-room[i], i)):
        if total >= wanted:
            break
        chosen.append(instance)
        total += room[instance]
    assert total >= wanted, f"{wanted} tokens do not fit {dict(room)}"
    return chosen


def _level(
    num_tokens: int, chosen: Sequence[int], room: Mapping[int, int], held: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    """Shares that leave all chosen ones with as equal parts of the prompt as their room allows.

    The least level up to which filling the chosen takes all tokens; the last tokens, fewer than
    there are instances, go to the first that have room.
    """
    base = {i: held.get(i, 0) for i in chosen}

    def filled(level: int) -> dict[int, int]:
        return {i: min(room[i], max(0, level - base[i])) for i in chosen}

    low, high = 0, num_tokens + max(base.values())
    while low < high:
        middle = (low + high) // 2
        if sum(filled(middle).values()) < num_tokens:
            low = middle + 1
        else:
            high = middle
    shares = filled(low)
    over = sum(shares.values()) - num_tokens
    for instance in reversed(chosen):
        back = min(over, shares[instance] - filled(low - 1)[instance]) if low else 0
        shares[instance] -= back
        over -= back
    return tuple((instance, share) for instance, share in shares.items() if share)
