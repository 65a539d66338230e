"""Placement: which instances of a group keep a prompt's KV (proactive scale-down).

LoongServe section 4.2: during the prefill ring every token's KV passes by every member, so any
member may keep any run of tokens at no cost. Decode wants few holders, so the fewest that have
room are chosen, and room that other requests count on is left to them as long as possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def place(
    num_tokens: int,
    growth_tokens: int,
    members: Sequence[int],
    *,
    free: Mapping[int, int],
    reserved: Mapping[int, int],
) -> tuple[tuple[int, int], ...]:
    """Runs `(instance, tokens)` in position order that sum to `num_tokens`.

    Args:
        growth_tokens: room wanted beside the prompt, for its own decode.
        free: free slots of each member; they must hold the prompt together.
        reserved: of these, slots that requests already there count on.
    """
    if len(members) == 1:
        assert free[members[0]] >= num_tokens, f"{num_tokens} tokens do not fit {dict(free)}"
        return ((members[0], num_tokens),)
    room = {i: max(0, free[i] - reserved[i]) for i in members}
    for wanted in (num_tokens + growth_tokens, num_tokens):
        if sum(room.values()) >= wanted:
            return _fill(num_tokens, _fewest(wanted, room), room)
    slots = {i: free[i] for i in members}
    return _fill(num_tokens, _fewest(num_tokens, slots), slots)


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


def _fill(
    num_tokens: int, chosen: Sequence[int], room: Mapping[int, int]
) -> tuple[tuple[int, int], ...]:
    runs: list[tuple[int, int]] = []
    left = num_tokens
    for instance in chosen:
        if left == 0:
            break
        runs.append((instance, min(left, room[instance])))
        left -= runs[-1][1]
    return tuple(runs)
