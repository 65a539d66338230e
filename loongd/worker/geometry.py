"""How a step's layout follows from its plan.

Knows: the arithmetic of stripes, blocks, kept runs and slots; everything follows from the plan and
this member's pool, so all members agree without talking.
Does not know: layers, or tensors of K, V and Q.

A stripe of source s is causal for member r when s <= r; otherwise query row j sees key rows below
j only, which is causal again after dropping the first query row: every ring block becomes square
causal spans (striped attention, LoongServe section 4.1), with the dropped rows between them.

Older tokens that another member holds are reached in one of two ways, per request and holder: the
queries go there and partial results come back (pass-Q), or the K and V come here (pass-KV):
`worker.passing` chooses, `worker.exchanges` tells who sends what.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from loongd.errors import PlanError
from loongd.wire import RunStep
from loongd.worker.exchanges import joint, key_rounds, queries_in, queries_out, stays
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import (
    Gathered,
    Ints,
    Keep,
    PoolPart,
    RingStep,
    RowBytes,
    SquarePart,
    StepLayout,
)
from loongd.worker.shares import Item, Shares, join
from loongd.worker.stripes import SpanLens, block_spans, stripe_rows, tail_rows, trimmed
from loongd.worker.validate import check_held, validate


def lay_out(
    step: RunStep, rank: int, kv: KvCache, *, row_bytes: RowBytes, windowed: bool
) -> StepLayout:
    """Work out the step for instance `rank` and take the slots it needs from `kv`.

    `windowed` adds token positions to the spans (sliding-window layers need them) and passes
    queries always: positions of older tokens are known only where they lie.
    Raises PlanError, with `kv` as it was.
    """
    validate(step, rank)
    shares = Shares(step, rank, kv.device, row_bytes=row_bytes, windowed=windowed)
    return _Builder(shares, kv).build()


@dataclass(frozen=True, slots=True)
class _Block:
    """One member's ring block as this member uses it; rows count from its first."""

    spans: list[SpanLens]
    keep_rows: Ints
    keep_slots: Ints
    tails: tuple[tuple[int, int], ...]


class _Builder:
    def __init__(self, shares: Shares, kv: KvCache) -> None:
        self._shares = shares
        self._kv = kv
        self._grown: list[tuple[int, int]] = []

    def build(self) -> StepLayout:
        self._find_cached()
        self._take_slots()
        shares = self._shares
        owned = [item for item in shares.items if item.rows[0] < item.rows[1]]
        ring = self._ring()
        sampling = [item for item in owned if shares.owns_last(item)]
        local, incoming = self._local(), queries_in(shares)
        return StepLayout(
            me=shares.me,
            members=shares.members,
            tokens=join(shares.mine(item, item.tokens) for item in owned),
            positions=join(shares.positions(item, shares.me) for item in owned),
            lengths=join(
                np.full(item.rows[1] - item.rows[0], item.extend.start + item.num_new)
                for item in owned
            ),
            block_lens=tuple(self._block_len(source) for source in range(shares.dop)),
            ring=ring,
            gathered=self._gathered(ring),
            store=self._store(),
            square=self._square(),
            local=local,
            queries_out=queries_out(shares),
            queries_in=incoming,
            joint=joint(shares, local, incoming),
            rounds=key_rounds(shares),
            sample_rows=tuple(item.rows[1] - 1 for item in sampling),
            sampled=tuple(item.extend for item in sampling),
            windowed=shares.windowed,
            grown=tuple(self._grown),
        )

    # ---- slots ---------------------------------------------------------------------------------

    def _find_cached(self) -> None:
        rank = self._shares.rank
        for item in self._shares.items:
            extend = item.extend
            if rank in extend.holders:
                item.cached_slots = self._kv.slots_of(extend.cached)
                if extend.holder_tokens:
                    check_held(extend, rank, len(item.cached_slots))
                if self._shares.windowed:
                    item.cached_positions = self._kv.positions_of(extend.cached)

    def _take_slots(self) -> None:
        try:
            for item in self._shares.items:
                self._take_item_slots(item)
        except PlanError:
            self._kv.take_back(self._grown)
            raise

    def _take_item_slots(self, item: Item) -> None:
        extend = item.extend
        keep = extend.keep if item.striped else [(extend.master, item.num_new)]
        first = 0
        for instance, count in keep:
            if instance == self._shares.rank and count:
                positions = extend.start + np.arange(first, first + count, dtype=np.int64)
                slots = self._kv.extend(extend.segment, positions, after=extend.cached)
                item.runs.append((first, first + count, slots))
                self._grown.append((extend.segment, count))
            first += count

    # ---- parts ---------------------------------------------------------------------------------

    def _block_len(self, member: int) -> int:
        return sum(self._shares.count(item, member) for item in self._shares.striped)

    def _ring(self) -> tuple[RingStep, ...]:
        shares = self._shares
        if not shares.striped:
            return ()
        return tuple(self._ring_step((shares.me - step) % shares.dop) for step in range(shares.dop))

    def _ring_step(self, source: int) -> RingStep:
        shares, block = self._shares, self._block(source)
        used, q_rows, k_rows = trimmed(block.spans)
        q_positions = join(shares.places(shares.striped, shares.me))
        k_positions = join(shares.places(shares.striped, source))
        return RingStep(
            source=source,
            keep=self._keep(block.keep_rows, block.keep_slots),
            q_rows=q_rows,
            k_rows=k_rows,
            spans=shares.spans(
                tuple(q for q, _ in used),
                tuple(k for _, k in used),
                [q_positions[q_rows]],
                [k_positions[k_rows]],
            ),
            tails=block.tails,
        )

    def _block(self, source: int) -> _Block:
        shares = self._shares
        spans: list[SpanLens] = []
        keep_rows, keep_slots = [], []
        block_row = 0
        in_blocks = [shares.count(item, source) for item in shares.striped]
        for item, in_block in zip(shares.striped, in_blocks, strict=True):
            spans += block_spans(item.rows[1] - item.rows[0], in_block, later=source > shares.me)
            for first, end, slots in item.runs:
                rows = stripe_rows(first, end, source, shares.dop)
                keep_rows.append(np.arange(rows.start, rows.stop) + block_row)
                keep_slots.append(
                    slots[source + np.arange(rows.start, rows.stop) * shares.dop - first]
                )
            block_row += in_block
        tails = tail_rows(in_blocks, map(shares.owns_last, shares.striped))
        return _Block(spans, join(keep_rows), join(keep_slots), tails)

    def _gathered(self, ring: tuple[RingStep, ...]) -> Gathered | None:
        """The ring's steps in one, when all members have few rows and no window needs positions."""
        shares = self._shares
        lens = [self._block_len(step.source) for step in ring]
        if len(ring) < 2 or shares.windowed or max(lens) > shares.row_bytes.gathered_rows:
            return None
        ends = list(itertools.accumulate(lens))
        blocks = [self._block(step.source) for step in ring]
        placed = list(zip([0, *ends[:-1]], blocks, strict=True))
        spans = [span for block in blocks for span in block.spans if any(span)]
        tails = zip(*([(at + lo, at + hi) for lo, hi in b.tails] for at, b in placed), strict=True)
        return Gathered(
            ends=tuple(ends),
            keep=self._keep(
                join(at + block.keep_rows for at, block in placed),
                join(block.keep_slots for block in blocks),
            ),
            spans=shares.spans(tuple(q for q, _ in spans), tuple(k for _, k in spans), [], []),
            tails=tuple(join(np.arange(*rows) for rows in of_one) for of_one in tails),
        )

    def _mastered(self) -> list[Item]:
        return [i for i in self._shares.items if not i.striped and i.rows[0] < i.rows[1]]

    def _store(self) -> Keep | None:
        mine = self._mastered()
        rows = join(np.arange(*item.rows) for item in mine)
        return self._keep(rows, join(slots for item in mine for _, _, slots in item.runs))

    def _square(self) -> SquarePart | None:
        shares = self._shares
        many = [item for item in self._mastered() if item.num_new > 1]
        if not many:
            return None
        lens = tuple(item.num_new for item in many)
        positions = shares.places(many, shares.me)
        return SquarePart(
            rows=shares.rows([item.rows for item in many]),
            spans=shares.spans(lens, lens, positions, positions),
        )

    def _local(self) -> PoolPart | None:
        """Own queries over own older tokens that leave in no round; a single new token joins its
        keys here."""
        shares, parts = self._shares, []
        for item in shares.items:
            if not stays(shares, item):
                continue
            own = item.cached_slots
            at = item.cached_positions
            if not item.striped and item.num_new == 1 and item.runs:
                own = np.concatenate((own, item.runs[0][2]))
                at = np.concatenate((at, shares.positions(item, shares.me)))
            if item.rows[0] < item.rows[1] and len(own):
                parts.append((item, own, at))
        return shares.over(parts) if parts else None

    def _keep(self, rows: Ints, slots: Ints) -> Keep | None:
        if len(rows) == 0:
            return None
        return Keep(rows=self._shares.listed(rows), slots=self._shares.tensor(slots))
