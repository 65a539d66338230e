"""How a step's layout follows from its plan.

Knows: the arithmetic of stripes, blocks, kept runs, holders and slots; everything follows from the
plan and this member's pool, so all members agree without talking.
Does not know: layers, or tensors of K, V and Q.

With P members, member index r computes new token i of a striped request when i mod P = r, and
holds the packed rows of its stripes (all striped requests first, then the requests it is master
of). A stripe of source s is causal for r when s <= r; otherwise query row j sees key rows below
j only, which is causal again after dropping the first query row: every ring block becomes square
causal spans (striped attention, LoongServe section 4.1), with the dropped rows between them.

Older tokens that another member holds are reached in one of two ways, per request and pair of
members: the queries go there and partial results come back (pass-Q), or the K and V come here
(pass-KV), whichever moves fewer bytes. Decode passes queries; a long chunk over a short prefix
passes keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from loongd.errors import PlanError
from loongd.kernels.attention import PoolSlots, Spans
from loongd.wire import Extend, RunStep, unpack_tokens
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import (
    Ints,
    Keep,
    PoolPart,
    RingStep,
    RowBytes,
    Rows,
    SquarePart,
    StepLayout,
)
from loongd.worker.stripes import SpanLens, block_spans, stripe_rows, tail_rows, trimmed
from loongd.worker.validate import check_held, validate


@dataclass(slots=True)
class _Item:
    """One request of the step, with this member's share worked out."""

    extend: Extend
    num_new: int
    tokens: Ints
    rows: tuple[int, int] = (0, 0)
    cached_slots: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    cached_positions: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    runs: list[tuple[int, int, Ints]] = field(default_factory=list)
    """Kept runs of new tokens: (first, end, slots)."""

    @property
    def striped(self) -> bool:
        return self.extend.master is None


def lay_out(
    step: RunStep, rank: int, kv: KvCache, *, row_bytes: RowBytes, windowed: bool
) -> StepLayout:
    """Work out the step for instance `rank` and take the slots it needs from `kv`.

    `windowed` adds token positions to the spans (sliding-window layers need them) and passes
    queries always: positions of older tokens are known only where they lie.
    Raises PlanError, with `kv` as it was.
    """
    validate(step, rank)
    return _Builder(step, rank, kv, row_bytes=row_bytes, windowed=windowed).build()


class _Builder:
    def __init__(
        self, step: RunStep, rank: int, kv: KvCache, *, row_bytes: RowBytes, windowed: bool
    ) -> None:
        self._members = tuple(step.members)
        self._dop = len(self._members)
        self._me = self._members.index(rank)
        self._rank = rank
        self._kv = kv
        self._device = kv.k_LSKH.device
        self._windowed = windowed
        self._row_bytes = row_bytes
        items = [
            _Item(extend, len(extend.tokens) // 4, np.array(unpack_tokens(extend.tokens), np.int64))
            for extend in step.batch
        ]
        self._striped = [item for item in items if item.striped]
        self._items = self._striped + [item for item in items if not item.striped]
        self._grown: list[tuple[int, int]] = []

    def build(self) -> StepLayout:
        self._assign_rows()
        self._find_cached()
        self._take_slots()
        owned = [item for item in self._items if item.rows[0] < item.rows[1]]
        sampling = [item for item in owned if self._owns_last(item)]
        return StepLayout(
            me=self._me,
            members=self._members,
            tokens=_join(self._mine(item, item.tokens) for item in owned),
            positions=_join(self._positions(item, self._me) for item in owned),
            lengths=_join(
                np.full(item.rows[1] - item.rows[0], item.extend.start + item.num_new)
                for item in owned
            ),
            block_lens=tuple(self._block_len(source) for source in range(self._dop)),
            ring=self._ring(),
            store=self._store(),
            square=self._square(),
            local=self._local(),
            queries_out=self._queries_out(),
            queries_in=self._queries_in(),
            keys_out=self._keys_out(),
            keys_in=self._keys_in(),
            sample_rows=tuple(item.rows[1] - 1 for item in sampling),
            sampled=tuple(item.extend for item in sampling),
            windowed=self._windowed,
            grown=tuple(self._grown),
        )

    # ---- shares --------------------------------------------------------------------------------

    def _count(self, item: _Item, member: int) -> int:
        """New tokens of the request that the member index computes."""
        if item.striped:
            return len(range(member, item.num_new, self._dop))
        return item.num_new if self._members[member] == item.extend.master else 0

    def _mine(self, item: _Item, values: Ints) -> Ints:
        return values[self._me :: self._dop] if item.striped else values

    def _positions(self, item: _Item, member: int) -> Ints:
        positions = item.extend.start + np.arange(item.num_new, dtype=np.int64)
        return positions[member :: self._dop] if item.striped else positions

    def _block_len(self, member: int) -> int:
        return sum(self._count(item, member) for item in self._striped)

    def _owns_last(self, item: _Item) -> bool:
        if item.extend.sampling is None:
            return False
        return not item.striped or (item.num_new - 1) % self._dop == self._me

    def _assign_rows(self) -> None:
        row = 0
        for item in self._items:
            count = self._count(item, self._me)
            item.rows = (row, row + count)
            row += count

    def _find_cached(self) -> None:
        for item in self._items:
            extend = item.extend
            if self._rank in extend.holders:
                item.cached_slots = self._kv.slots_of(extend.cached)
                if extend.holder_tokens:
                    check_held(extend, self._rank, len(item.cached_slots))
                if self._windowed:
                    item.cached_positions = self._kv.positions_of(extend.cached)

    def _take_slots(self) -> None:
        try:
            for item in self._items:
                self._take_item_slots(item)
        except PlanError:
            for segment, count in reversed(self._grown):
                self._kv.truncate(segment, count)
            raise

    def _take_item_slots(self, item: _Item) -> None:
        extend = item.extend
        keep = extend.keep if item.striped else [(extend.master, item.num_new)]
        first = 0
        for instance, count in keep:
            if instance == self._rank and count:
                positions = extend.start + np.arange(first, first + count, dtype=np.int64)
                slots = self._kv.extend(extend.segment, positions, after=extend.cached)
                item.runs.append((first, first + count, slots))
                self._grown.append((extend.segment, count))
            first += count

    # ---- parts ---------------------------------------------------------------------------------

    def _ring(self) -> tuple[RingStep, ...]:
        if not self._striped:
            return ()
        return tuple(self._ring_step((self._me - step) % self._dop) for step in range(self._dop))

    def _ring_step(self, source: int) -> RingStep:
        spans: list[SpanLens] = []
        keep_rows, keep_slots = [], []
        block_row = 0
        in_blocks = [self._count(item, source) for item in self._striped]
        for item, in_block in zip(self._striped, in_blocks, strict=True):
            spans += block_spans(item.rows[1] - item.rows[0], in_block, later=source > self._me)
            for first, end, slots in item.runs:
                rows = stripe_rows(first, end, source, self._dop)
                keep_rows.append(np.arange(rows.start, rows.stop) + block_row)
                keep_slots.append(
                    slots[source + np.arange(rows.start, rows.stop) * self._dop - first]
                )
            block_row += in_block
        used, q_rows, k_rows = trimmed(spans)
        placed = self._striped if self._windowed else []
        q_positions = _join(self._positions(item, self._me) for item in placed)
        k_positions = _join(self._positions(item, source) for item in placed)
        return RingStep(
            source=source,
            keep=self._keep(_join(keep_rows), _join(keep_slots)),
            q_rows=q_rows,
            k_rows=k_rows,
            spans=self._spans(
                tuple(q for q, _ in used),
                tuple(k for _, k in used),
                [q_positions[q_rows]],
                [k_positions[k_rows]],
            ),
            tails=tail_rows(in_blocks, map(self._owns_last, self._striped)),
        )

    def _mastered(self) -> list[_Item]:
        return [i for i in self._items if not i.striped and i.rows[0] < i.rows[1]]

    def _store(self) -> Keep | None:
        mine = self._mastered()
        rows = _join(np.arange(*item.rows) for item in mine)
        return self._keep(rows, _join(slots for item in mine for _, _, slots in item.runs))

    def _square(self) -> SquarePart | None:
        many = [item for item in self._mastered() if item.num_new > 1]
        if not many:
            return None
        lens = tuple(item.num_new for item in many)
        positions = [self._positions(item, self._me) for item in many]
        return SquarePart(
            rows=self._rows([item.rows for item in many]),
            spans=self._spans(lens, lens, positions, positions),
        )

    def _local(self) -> PoolPart | None:
        """Own queries over own older tokens; a single new token joins its keys here."""
        items, slots, k_positions = [], [], []
        for item in self._items:
            own = item.cached_slots
            at = item.cached_positions
            if not item.striped and item.num_new == 1 and item.runs:
                own = np.concatenate((own, item.runs[0][2]))
                at = np.concatenate((at, self._positions(item, self._me)))
            if item.rows[0] < item.rows[1] and len(own):
                items.append(item)
                slots.append(own)
                k_positions.append(at)
        if not items:
            return None
        positions = [self._positions(item, self._me) for item in items]
        return PoolPart(
            q_rows=self._rows([item.rows for item in items]),
            slots=PoolSlots(tuple(slots), self._device),
            spans=self._spans(
                tuple(item.rows[1] - item.rows[0] for item in items),
                tuple(len(s) for s in slots),
                positions,
                k_positions,
            ),
        )

    # ---- exchanges -----------------------------------------------------------------------------

    def _passes_keys(self, item: _Item, owner: int, holder: int) -> bool:
        """Whether the holder's K and V go to the owner's queries; owner is a member index."""
        extend = item.extend
        if self._windowed or not extend.holder_tokens:
            return False
        cached = extend.holder_tokens[extend.holders.index(holder)]
        queries = self._count(item, owner) * self._row_bytes.query
        return cached * self._row_bytes.key < queries

    def _exchanged(self, owner: int, holder: int, *, keys: bool) -> list[_Item]:
        """Requests for which this owner (member index) and holder exchange queries, or keys."""
        return [
            item
            for item in self._items
            if holder in item.extend.holders
            and self._count(item, owner)
            and self._passes_keys(item, owner, holder) == keys
        ]

    def _others(self) -> list[tuple[int, int]]:
        """(member index, member) of all members but this one, in group order."""
        return [(i, m) for i, m in enumerate(self._members) if m != self._rank]

    def _queries_out(self) -> tuple[tuple[int, Rows, int], ...]:
        out = []
        for _, holder in self._others():
            ranges = [item.rows for item in self._exchanged(self._me, holder, keys=False)]
            count = sum(hi - lo for lo, hi in ranges)
            if count:
                out.append((holder, self._rows(ranges), count))
        return tuple(out)

    def _queries_in(self) -> tuple[tuple[int, int, PoolPart], ...]:
        parts = []
        for index, owner in self._others():
            items = self._exchanged(index, self._rank, keys=False)
            if not items:
                continue
            counts = tuple(self._count(item, index) for item in items)
            part = PoolPart(
                q_rows=slice(0, sum(counts)),
                slots=PoolSlots(tuple(item.cached_slots for item in items), self._device),
                spans=self._spans(
                    counts,
                    tuple(len(item.cached_slots) for item in items),
                    [self._positions(item, index) for item in items],
                    [item.cached_positions for item in items],
                ),
            )
            parts.append((owner, sum(counts), part))
        return tuple(parts)

    def _keys_out(self) -> tuple[tuple[int, Tensor], ...]:
        out = []
        for index, owner in self._others():
            items = self._exchanged(index, self._rank, keys=True)
            slots = _join(item.cached_slots for item in items)
            if len(slots):
                out.append((owner, self._tensor(slots)))
        return tuple(out)

    def _keys_in(self) -> tuple[tuple[int, int, PoolPart], ...]:
        parts = []
        for _, holder in self._others():
            items = self._exchanged(self._me, holder, keys=True)
            lens = [i.extend.holder_tokens[i.extend.holders.index(holder)] for i in items]
            if not sum(lens):
                continue
            ends = list(itertools.accumulate(lens, initial=0))
            slots = tuple(np.arange(lo, hi) for lo, hi in itertools.pairwise(ends))
            part = PoolPart(
                q_rows=self._rows([item.rows for item in items]),
                slots=PoolSlots(slots, self._device),
                spans=Spans(
                    tuple(item.rows[1] - item.rows[0] for item in items), tuple(lens), self._device
                ),
            )
            parts.append((holder, sum(lens), part))
        return tuple(parts)

    # ---- small makers --------------------------------------------------------------------------

    def _rows(self, ranges: Sequence[tuple[int, int]]) -> Rows:
        full = [(lo, hi) for lo, hi in ranges if lo < hi]
        if not full:
            return slice(0, 0)
        if all(a[1] == b[0] for a, b in itertools.pairwise(full)):
            return slice(full[0][0], full[-1][1])
        return self._tensor(_join(np.arange(lo, hi) for lo, hi in full))

    def _keep(self, rows: Ints, slots: Ints) -> Keep | None:
        if len(rows) == 0:
            return None
        consecutive = int(rows[-1]) - int(rows[0]) + 1 == len(rows) and bool(
            np.all(np.diff(rows) == 1)
        )
        where = slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else self._tensor(rows)
        return Keep(rows=where, slots=self._tensor(slots))

    def _spans(
        self,
        q_lens: tuple[int, ...],
        k_lens: tuple[int, ...],
        q_positions: Sequence[Ints],
        k_positions: Sequence[Ints],
    ) -> Spans:
        if not self._windowed:
            return Spans(q_lens, k_lens, self._device)
        return Spans(
            q_lens,
            k_lens,
            self._device,
            self._tensor(_join(q_positions)),
            self._tensor(_join(k_positions)),
        )

    def _tensor(self, values: Ints) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _join(parts: Iterable[Ints]) -> Ints:
    found = list(parts)
    return np.concatenate(found).astype(np.int64, copy=False) if found else np.empty(0, np.int64)
