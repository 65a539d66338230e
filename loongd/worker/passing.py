"""Whether the keys of older tokens travel to the queries, or the queries to the keys.

Knows: numbers of tokens, and what rows cost. Does not know: slots, tensors, who talks when.

With n new tokens dealt to P members, a holder of C older tokens whose queries come to it (pass-Q)
computes n * C pairs, alone. When its keys travel (pass-KV), every member computes n / P * C, and
the holder sends its keys P - 1 times. Members compute while keys travel, so a layer takes the
longer of the two. Every member works the choice out from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from loongd.wire import Extend
from loongd.worker.layout import FLOPS_PER_BYTE, ROUND_TOKENS, RowBytes

Piece = list[tuple[int, int, int]]
"""(number, first, end) of the tokens of each of several requests."""

_WORTH_IT = (4, 5)
"""Keys travel when that takes at most such a part of the time: below, merges and copies eat it."""
_MANY_ROUNDS = 12


def key_holders(extend: Extend, dop: int, row: RowBytes) -> frozenset[int]:
    """The holders of the request's older tokens that send keys to the other members.

    Those whose keys are fewer bytes than an owner's queries, and for a striped request as many of
    those with most tokens as make the step's attention shortest.
    """
    held, num_new = extend.holder_tokens, len(extend.tokens) // 4
    if dop == 1 or not held:
        return frozenset()
    owners = 1 if extend.master is not None else dop
    query_bytes = -(-num_new // owners) * row.query
    pairs = zip(held, extend.holders, strict=True)
    fewer = frozenset(holder for tokens, holder in pairs if tokens * row.key < query_bytes)
    if extend.master is not None:
        return fewer
    order = sorted(zip(held, extend.holders, strict=True), key=lambda one: -one[0])
    fastest = _fastest(num_new, dop, [tokens for tokens, _ in order], row)
    return fewer | {holder for _, holder in order[:fastest]}


def _fastest(num_new: int, dop: int, held: Sequence[int], row: RowBytes) -> int:
    """Of how many of the first holders (`held` tokens each, most first) keys should travel.

    The fewest that make attention shortest, none when that is not worth it.
    """
    share = -(-num_new // dop)
    times, travelling = [], 0
    for number in range(len(held) + 1):
        at_home = held[number] if number < len(held) else 0
        pairs = share * travelling + num_new * at_home
        # a holder sends its keys to each other member, a member takes in the keys of all others
        most_in = travelling - held[-1] if number == dop else travelling
        tokens = max((dop - 1) * held[0], most_in) if number else 0
        times.append(max(pairs * row.pair_flops, tokens * row.key * FLOPS_PER_BYTE))
        travelling += at_home
    part, whole = _WORTH_IT
    least = min(times)
    return times.index(least) if least * whole <= times[0] * part and least < times[0] else 0


def pieces(lens: Sequence[int], most_tokens: int) -> list[Piece]:
    """Requests' tokens, packed back to back, cut into pieces of `most_tokens` (the last: fewer)."""
    cut: list[Piece] = []
    room = 0
    for number, length in enumerate(lens):
        first = 0
        while first < length:
            if room == 0:
                cut.append([])
                room = most_tokens
            end = min(first + room, length)
            cut[-1].append((number, first, end))
            room -= end - first
            first = end
    return cut


def piece_tokens(num_holders: int, most_held: int, row: RowBytes) -> int:
    """Tokens of one holder's keys in a round.

    A power of two of holders share a round, so that a member takes in, and gathers to send,
    `round_tokens` at most altogether, and pieces stay whole for the libraries. Rather than more
    than `_MANY_ROUNDS` they are larger, for each costs some 0.3 ms a layer: 1,536 tokens of 8B over
    700,000 on one of two H200 took 0.84 s in 22 rounds, where half of them alone take 0.61 s.

    Args:
        num_holders: holders that send keys.
        most_held: tokens whose keys the largest of them sends.
    """
    parts = 1 << (num_holders - 1).bit_length()
    tokens = min(ROUND_TOKENS, row.round_tokens)
    while tokens < row.round_tokens and most_held * parts > _MANY_ROUNDS * tokens:
        tokens *= 2
    return max(tokens // parts, 1)
