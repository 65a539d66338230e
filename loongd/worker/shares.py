"""A step's requests as one member sees them: its share of each, and how rows are told.

Knows: which new tokens each member computes, in which order they are packed, and which of a
request's holders send keys. Does not know: rings, what is exchanged when, tensors of K, V and Q.

With P members, member index r computes new token i of a striped request when i mod P = r, and
holds the packed rows of its stripes (all striped requests first, then the requests it is master
of).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from loongd.kernels.attention import PoolSlots, Spans
from loongd.wire import Extend, RunStep, unpack_tokens
from loongd.worker.layout import Ints, PoolPart, RowBytes, Rows
from loongd.worker.passing import key_holders


@dataclass(slots=True)
class Item:
    """One request of the step, with this member's share worked out."""

    extend: Extend
    num_new: int
    tokens: Ints
    key_holders: frozenset[int]
    """Holders that send keys of its older tokens to the other members."""
    rows: tuple[int, int] = (0, 0)
    cached_slots: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    cached_positions: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    runs: list[tuple[int, int, Ints]] = field(default_factory=list)
    """Kept runs of new tokens: (first, end, slots)."""

    @property
    def striped(self) -> bool:
        return self.extend.master is None


class Shares:
    """All requests of a step, from the side of instance `rank`, which is member index `me`."""

    def __init__(
        self,
        step: RunStep,
        rank: int,
        device: torch.device,
        *,
        row_bytes: RowBytes,
        windowed: bool,
    ) -> None:
        """`windowed` steps send queries always: only a holder knows its tokens' positions."""
        self.members = tuple(step.members)
        self.dop = len(self.members)
        self.me = self.members.index(rank)
        self.rank = rank
        self.device = device
        self.windowed = windowed
        self.row_bytes = row_bytes
        found = [
            Item(
                extend,
                len(extend.tokens) // 4,
                np.array(unpack_tokens(extend.tokens), np.int64),
                frozenset() if windowed else key_holders(extend, self.dop, row_bytes),
            )
            for extend in step.batch
        ]
        self.striped = [item for item in found if item.striped]
        self.items = self.striped + [item for item in found if not item.striped]
        row = 0
        for item in self.items:
            item.rows = (row, row + self.count(item, self.me))
            row = item.rows[1]

    # ---- shares --------------------------------------------------------------------------------

    def count(self, item: Item, member: int) -> int:
        """New tokens of the request that the member index computes."""
        if item.striped:
            return len(range(member, item.num_new, self.dop))
        return item.num_new if self.members[member] == item.extend.master else 0

    def mine(self, item: Item, values: Ints) -> Ints:
        """This member's part of one value a new token, for a request that it has rows of."""
        return values[self.me :: self.dop] if item.striped else values

    def positions(self, item: Item, member: int) -> Ints:
        """Of the new tokens that the member index computes, when it computes any."""
        positions = item.extend.start + np.arange(item.num_new, dtype=np.int64)
        return positions[member :: self.dop] if item.striped else positions

    def places(self, items: Sequence[Item], member: int) -> list[Ints]:
        """`positions` of each request, for `spans`: none where nobody asks for them."""
        return [self.positions(item, member) for item in items] if self.windowed else []

    def owns_last(self, item: Item) -> bool:
        """Whether a token is drawn after the last new one, for a request that this member has
        rows of, and by it."""
        if item.extend.sampling is None:
            return False
        return not item.striped or (item.num_new - 1) % self.dop == self.me

    def others(self) -> list[tuple[int, int]]:
        """(member index, member) of all members but this one, in group order."""
        return [(i, m) for i, m in enumerate(self.members) if m != self.rank]

    # ---- how rows are told ---------------------------------------------------------------------

    def rows(self, ranges: Sequence[tuple[int, int]]) -> Rows:
        """Of packed rows, ranges in ascending order."""
        full = [(lo, hi) for lo, hi in ranges if lo < hi]
        if not full:
            return slice(0, 0)
        if all(a[1] == b[0] for a, b in itertools.pairwise(full)):
            return slice(full[0][0], full[-1][1])
        return self.tensor(join(np.arange(lo, hi) for lo, hi in full))

    def listed(self, rows: Ints) -> Rows:
        """Of any rows or slots, in this order, at least one."""
        consecutive = int(rows[-1]) - int(rows[0]) + 1 == len(rows) and bool(
            np.all(np.diff(rows) == 1)
        )
        return slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else self.tensor(rows)

    def spans(
        self,
        q_lens: tuple[int, ...],
        k_lens: tuple[int, ...],
        q_positions: Sequence[Ints],
        k_positions: Sequence[Ints],
    ) -> Spans:
        """With positions only where there are windows."""
        if not self.windowed:
            return Spans(q_lens, k_lens, self.device)
        return Spans(
            q_lens,
            k_lens,
            self.device,
            self.tensor(join(q_positions)),
            self.tensor(join(k_positions)),
        )

    def over(self, parts: Sequence[tuple[Item, Ints, Ints]]) -> PoolPart:
        """Own queries of requests over these slots, at these positions where there are windows."""
        items = [item for item, _, _ in parts]
        return PoolPart(
            q_rows=self.rows([item.rows for item in items]),
            slots=PoolSlots(tuple(slots for _, slots, _ in parts), self.device),
            spans=self.spans(
                tuple(item.rows[1] - item.rows[0] for item in items),
                tuple(len(slots) for _, slots, _ in parts),
                self.places(items, self.me),
                [positions for _, _, positions in parts],
            ),
        )

    def tensor(self, values: Ints) -> Tensor:
        """On the device."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)


def join(parts: Iterable[Ints]) -> Ints:
    """Back to back, int64."""
    found = list(parts)
    return np.concatenate(found).astype(np.int64, copy=False) if found else np.empty(0, np.int64)
