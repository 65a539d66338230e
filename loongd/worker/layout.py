"""The geometry of one step for one member, fixed before the first layer.

Knows: which new tokens this member computes, which it keeps and in which slots, which blocks
pass in the ring, whose queries come and go. Everything follows from the plan, so all members
agree without talking.
Does not know: tensors of K, V or Q, layers, transports.

With P members, member index r computes new token i of a striped request when i mod P = r, and
holds the packed rows of its stripes (all striped requests first, then the requests it is master
of). A stripe of source s is causal for r when s <= r; otherwise query row j sees key rows below
j only, which is causal again after dropping the first query row: every ring block becomes square
causal spans (striped attention, LoongServe section 4.1).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongd.errors import PlanError
from loongd.kernels.attention import PoolSlots, Spans
from loongd.wire import Extend, RunStep, unpack_tokens
from loongd.worker.kvcache import KvCache

Rows = slice | Tensor
"""Rows of a packed tensor: a slice (view) where they are consecutive, else an index."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Keep:
    """Rows of a block to store in `slots` (both int64 on the device)."""

    rows: Rows
    slots: Tensor


@dataclass(frozen=True, slots=True)
class RingStep:
    """What to do while the block of member `source` is at hand."""

    source: int
    keep: Keep | None
    q_rows: Rows
    k_rows: Rows
    spans: Spans


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Queries (`q_rows` of the packed queries at hand) over this member's own pool."""

    q_rows: Rows
    slots: PoolSlots
    spans: Spans


@dataclass(frozen=True, slots=True)
class SquarePart:
    """New tokens of requests that one master computes alone, among themselves."""

    rows: Rows
    spans: Spans


@dataclass(frozen=True, slots=True)
class StepLayout:
    """All of it. `block_lens[s]` is the number of ring rows of member index s."""

    me: int
    members: tuple[int, ...]
    tokens: Ints
    positions: Ints
    lengths: Ints
    block_lens: tuple[int, ...]
    ring: tuple[RingStep, ...]
    store: Keep | None
    square: SquarePart | None
    local: PoolPart | None
    queries_out: tuple[tuple[int, Rows, int], ...]
    queries_in: tuple[tuple[int, int, PoolPart], ...]
    sample_rows: tuple[int, ...]
    sampled: tuple[Extend, ...]
    windowed: bool
    grown: tuple[tuple[int, int], ...]
    """(segment, tokens) that this step added to the pool, to take back if it fails."""


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


def validate(step: RunStep, rank: int) -> None:
    """Raise PlanError when the plan contradicts itself or does not concern this instance."""
    members = step.members
    if rank not in members or len(set(members)) != len(members):
        raise PlanError(f"step {step.step_id}: bad members {members} for instance {rank}")
    for extend in step.batch:
        num_new = len(extend.tokens) // 4
        where = f"step {step.step_id}, request {extend.request_id}"
        if num_new == 0 or extend.start < 0:
            raise PlanError(f"{where}: {num_new} new tokens at position {extend.start}")
        if not set(extend.holders) <= set(members):
            raise PlanError(f"{where}: holders {extend.holders} outside {members}")
        if extend.master is not None:
            if extend.master not in members or extend.keep:
                raise PlanError(f"{where}: master {extend.master} outside {members}, or keeps")
            continue
        kept = sum(count for _, count in extend.keep)
        if kept != num_new or not {instance for instance, _ in extend.keep} <= set(members):
            raise PlanError(f"{where}: keep {extend.keep} for {num_new} tokens over {members}")


def lay_out(step: RunStep, rank: int, kv: KvCache, *, windowed: bool) -> StepLayout:
    """Work out the step for instance `rank` and take the slots it needs from `kv`.

    `windowed` adds token positions to the spans (sliding-window layers need them).
    Raises PlanError, with `kv` as it was.
    """
    validate(step, rank)
    return _Builder(step, rank, kv, windowed=windowed).build()


class _Builder:
    def __init__(self, step: RunStep, rank: int, kv: KvCache, *, windowed: bool) -> None:
        self._members = tuple(step.members)
        self._dop = len(self._members)
        self._me = self._members.index(rank)
        self._rank = rank
        self._kv = kv
        self._device = kv.k_LSKH.device
        self._windowed = windowed
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
            if self._rank in item.extend.holders:
                item.cached_slots = self._kv.slots_of(item.extend.cached)
                if self._windowed:
                    item.cached_positions = self._kv.positions_of(item.extend.cached)

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
        sources = ((self._me - step) % self._dop for step in range(self._dop))
        return tuple(self._ring_step(source) for source in sources)

    def _ring_step(self, source: int) -> RingStep:
        dropped = 0 if source <= self._me else 1
        q_ranges, k_ranges, positions_q, positions_k = [], [], [], []
        keep_rows, keep_slots = [], []
        block_row = 0
        for item in self._striped:
            in_block = self._count(item, source)
            num_q = max(item.rows[1] - item.rows[0] - dropped, 0)
            q_ranges.append((item.rows[0] + dropped, item.rows[0] + dropped + num_q))
            k_ranges.append((block_row, block_row + num_q))
            if self._windowed:
                positions_q.append(self._positions(item, self._me)[dropped : dropped + num_q])
                positions_k.append(self._positions(item, source)[:num_q])
            for first, end, slots in item.runs:
                rows = _stripe_rows(first, end, source, self._dop)
                keep_rows.append(np.arange(rows.start, rows.stop) + block_row)
                keep_slots.append(
                    slots[source + np.arange(rows.start, rows.stop) * self._dop - first]
                )
            block_row += in_block
        lens = tuple(hi - lo for lo, hi in q_ranges)
        return RingStep(
            source=source,
            keep=self._keep(_join(keep_rows), _join(keep_slots)),
            q_rows=self._rows(q_ranges),
            k_rows=self._rows(k_ranges),
            spans=self._spans(lens, lens, positions_q, positions_k),
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

    def _queries_out(self) -> tuple[tuple[int, Rows, int], ...]:
        """For each other member: which of my rows it must see, and how many they are."""
        out = []
        for member in self._members:
            ranges = [i.rows for i in self._items if member in i.extend.holders]
            count = sum(hi - lo for lo, hi in ranges)
            if member != self._rank and count:
                out.append((member, self._rows(ranges), count))
        return tuple(out)

    def _queries_in(self) -> tuple[tuple[int, int, PoolPart], ...]:
        """For each other member: how many of its queries come, and what they look at here."""
        parts = []
        for index, member in enumerate(self._members):
            items = [
                item
                for item in self._items
                if self._rank in item.extend.holders and self._count(item, index)
            ]
            if member == self._rank or not items:
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
            parts.append((member, sum(counts), part))
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


def _stripe_rows(first: int, end: int, source: int, dop: int) -> range:
    """Rows of the stripe of `source` whose tokens lie in `[first, end)` of the new tokens."""
    return range(max(-(-(first - source) // dop), 0), max(-(-(end - source) // dop), 0))


def _join(parts: Iterable[Ints]) -> Ints:
    found = list(parts)
    return np.concatenate(found).astype(np.int64, copy=False) if found else np.empty(0, np.int64)
