"""What members of a step send each other about older tokens: queries, or keys in rounds.

Knows: which of a request's holders send keys (`worker.passing`), and how these are cut into the
rounds of `KeyRound`; both sides of every message come from the plan.
Does not know: rings, layers, tensors of K, V and Q.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from loongd.kernels.attention import PoolSlots
from loongd.worker.layout import Ints, JointPart, KeyRound, PoolPart, Rows
from loongd.worker.passing import Piece, piece_tokens, pieces
from loongd.worker.shares import Item, Shares, join

_NOWHERE = np.empty(0, np.int64)


def queries_out(shares: Shares) -> tuple[tuple[int, Rows, int], ...]:
    """`StepLayout.queries_out`."""
    out = []
    for _, holder in shares.others():
        items = _exchanged(shares, shares.me, holder, keys=False)
        count = sum(item.rows[1] - item.rows[0] for item in items)
        if count:
            out.append((holder, shares.rows([item.rows for item in items]), count))
    return tuple(out)


def queries_in(shares: Shares) -> tuple[tuple[int, int, PoolPart], ...]:
    """`StepLayout.queries_in`."""
    parts = []
    for index, owner in shares.others():
        items = _exchanged(shares, index, shares.rank, keys=False)
        if not items:
            continue
        counts = tuple(shares.count(item, index) for item in items)
        part = PoolPart(
            q_rows=slice(0, sum(counts)),
            slots=PoolSlots(tuple(item.cached_slots for item in items), shares.device),
            spans=shares.spans(
                counts,
                tuple(len(item.cached_slots) for item in items),
                shares.places(items, index),
                [item.cached_positions for item in items],
            ),
        )
        parts.append((owner, sum(counts), part))
    return tuple(parts)


def joint(
    shares: Shares, local: PoolPart | None, incoming: Sequence[tuple[int, int, PoolPart]]
) -> JointPart | None:
    """`StepLayout.joint`. Not where there are windows: these look at few older tokens."""
    if local is None or not incoming or shares.windowed:
        return None
    parts = [local, *(part for _, _, part in incoming)]
    slots = [of_span for part in parts for of_span in part.slots.per_span]
    count = sum(sum(part.spans.q_lens) for part in parts)
    # a request's own older tokens are one list of slots, wherever they are looked at
    one_request = all(of_span is slots[0] for of_span in slots)
    if not one_request or count <= shares.row_bytes.joint_rows:
        return None
    spans = shares.spans((count,), local.spans.k_lens, [], [])
    part = PoolPart(slice(0, count), local.slots, spans)
    return JointPart(local.q_rows, local.spans.q_lens[0], part)


def stays(shares: Shares, item: Item) -> bool:
    """Whether own older tokens of the request leave in no round: own queries take them at once."""
    return not item.striped or shares.rank not in item.key_holders


def key_rounds(shares: Shares) -> tuple[KeyRound, ...]:
    """`StepLayout.rounds`."""
    senders = set().union(*(item.key_holders for item in shares.items))
    if not senders:
        return ()
    most_held = max(
        sum(_held(item, sender) for item in shares.items if sender in item.key_holders)
        for sender in senders
    )
    most = piece_tokens(len(senders), most_held, shares.row_bytes)
    leaving = [i for i in shares.items if not stays(shares, i) and i.rows[0] < i.rows[1]]
    own = pieces([len(item.cached_slots) for item in leaving], most)
    out = _leaving(shares, most)
    coming = {
        holder: (items, pieces([_held(item, holder) for item in items], most))
        for _, holder in shares.others()
        if (items := _exchanged(shares, shares.me, holder, keys=True))
    }
    lens = [len(own), *(len(cut) for _, cut in out), *(len(cut) for _, cut in coming.values())]
    return tuple(
        KeyRound(
            keys_out=tuple((owners, cut[number]) for owners, cut in out if number < len(cut)),
            local=_over_own(shares, leaving, own[number]) if number < len(own) else None,
            keys_in=tuple(
                (holder, *_over_arriving(shares, items, cut[number]))
                for holder, (items, cut) in coming.items()
                if number < len(cut)
            ),
        )
        for number in range(max(lens))
    )


def _exchanged(shares: Shares, owner: int, holder: int, *, keys: bool) -> list[Item]:
    """Requests for which this owner (member index) and holder exchange queries, or keys."""
    return [
        item
        for item in shares.items
        if holder in item.extend.holders
        and shares.count(item, owner)
        and (holder in item.key_holders) == keys
    ]


def _held(item: Item, holder: int) -> int:
    return item.extend.holder_tokens[item.extend.holders.index(holder)]


def _leaving(shares: Shares, most: int) -> list[tuple[tuple[int, ...], list[Rows]]]:
    """Own slots by piece, for the owners that get the same."""
    alike: dict[tuple[int, ...], tuple[list[int], list[Item]]] = {}
    for index, owner in shares.others():
        items = _exchanged(shares, index, shares.rank, keys=True)
        alike.setdefault(tuple(map(id, items)), ([], items))[0].append(owner)
    out = []
    for owners, items in alike.values():
        cut = pieces([len(item.cached_slots) for item in items], most)
        slots = [join(_slots(items, piece)) for piece in cut]
        out.append((tuple(owners), [shares.listed(part) for part in slots]))
    return out


def _slots(items: Sequence[Item], piece: Piece) -> list[Ints]:
    return [items[number].cached_slots[first:end] for number, first, end in piece]


def _over_own(shares: Shares, items: Sequence[Item], piece: Piece) -> PoolPart:
    slots = _slots(items, piece)
    chosen = [items[number] for number, _, _ in piece]
    return shares.over([(i, s, _NOWHERE) for i, s in zip(chosen, slots, strict=True)])


def _over_arriving(shares: Shares, items: Sequence[Item], piece: Piece) -> tuple[int, PoolPart]:
    """Tokens of the piece, and own queries over them."""
    ends = list(itertools.accumulate((end - first for _, first, end in piece), initial=0))
    rows = [np.arange(lo, hi) for lo, hi in itertools.pairwise(ends)]
    parts = [(items[n], at, _NOWHERE) for (n, _, _), at in zip(piece, rows, strict=True)]
    return ends[-1], shares.over(parts)
