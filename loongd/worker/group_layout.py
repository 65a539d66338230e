"""A prefill step of few tokens on a group as a list of numbers that a captured graph reads.

Knows: which steps those are, who has to take part, and how the step is cut into tiles.
Does not know: graphs, tensors of K, V or Q, larger steps (`worker.striped_layout`).

Everyone who takes part computes all new tokens, so that neither queries nor new keys travel: so few
rows cost a GPU little more than reading the weights, which it has to do for half of them too.
Each attends to the new keys by itself and to the older ones that it holds for all, and the holders
send each other's partial results round; all merge them in group order, and have the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loongd.wire import Extend, RunStep
from loongd.worker.kvcache import KvCache
from loongd.worker.prefill_layout import BUCKETS, MOST_REQUESTS, PrefillShape, tiles_of
from loongd.worker.slot_table import SlotTable
from loongd.worker.validate import check_held, validate

MOST_EXCHANGED_TOKENS = 256
"""Most new tokens of a step with older ones, and of any where members can share the rows of larger
ones (`worker.striped_layout`): one of `BUCKETS`."""
MOST_EXCHANGED_PAIRS = 96 << 20
"""Most (new token, older key) pairs of one holder in any step of a group that runs as a graph. They
take 1.2 ns each in 32 layers of 32 heads of 128, so 120 ms, which is what a group's launches cost
without a graph. Beyond, libraries attend faster than kernels that read slots."""
Spans = list[tuple[int, int, int, int]]
"""(first row, end, first key, end) of each request."""


@dataclass(frozen=True, slots=True)
class GroupWork:
    """What a step is to all of its members alike: all follow from the plan."""

    bucket: int
    holders: tuple[int, ...]
    """Members with older tokens, in group order."""
    workers: tuple[int, ...]
    """Members that hold, keep or draw: the others have nothing to do."""

    @classmethod
    def of(cls, step: RunStep) -> GroupWork | None:
        """None for a step that has to run another way, on all of its members."""
        fits = len(step.members) > 1 and 0 < len(step.batch) < MOST_REQUESTS
        if not fits or not all(map(is_plain, step.batch)):
            return None
        total, pairs = 0, held_pairs(step)
        active: set[int] = set()
        for extend in step.batch:
            total += len(extend.tokens) // 4
            active.update(instance for instance, kept in extend.keep if kept)
            active.update(draws(step, extend))
        holders = tuple(member for member in step.members if pairs[member])
        most = MOST_EXCHANGED_TOKENS if holders else BUCKETS[-1]
        if total > most or max(pairs.values()) > MOST_EXCHANGED_PAIRS:
            return None
        workers = tuple(m for m in step.members if m in active or m in holders)
        bucket = next(bucket for bucket in BUCKETS if bucket >= total)
        return cls(bucket, holders, workers)


def held_pairs(step: RunStep) -> dict[int, int]:
    """(new token, older key) pairs of each member; the step's requests are plain."""
    pairs = dict.fromkeys(step.members, 0)
    for extend in step.batch:
        for holder, held in zip(extend.holders, extend.holder_tokens, strict=True):
            pairs[holder] += len(extend.tokens) // 4 * held
    return pairs


def is_plain(extend: Extend) -> bool:
    """Whether a request is striped and its plan says where all older tokens are."""
    told = len(extend.holders) == len(extend.holder_tokens)
    all_held = told and sum(extend.holder_tokens) == extend.start
    return extend.master is None and len(extend.tokens) > 0 and all_held


def draws(step: RunStep, extend: Extend) -> Iterator[int]:
    """The member that draws the request's next token, as in every striped step; none if none."""
    if extend.sampling is not None:
        yield step.members[(len(extend.tokens) // 4 - 1) % len(step.members)]


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What decides the kernels of a step on member `rank`.

    `new` and `older` tell how attention to new and to older keys is cut; partial results come from
    the `sources` (this member may be among them) and go to the `targets`.
    """

    rank: int
    new: PrefillShape
    older: PrefillShape
    sources: tuple[int, ...]
    targets: tuple[int, ...]

    @property
    def bucket(self) -> int:
        """New tokens, padding included."""
        return self.new.bucket

    @property
    def holds(self) -> bool:
        """Whether older tokens are here."""
        return self.rank in self.sources

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of the numbers, multiples of 16 bytes as kernels like it.

        For each new token: token, position, slot (-1: not kept here); new token of each row of the
        last layer; tiles and ends of attention to new keys, and to older ones if any are here.
        """
        older = tile_sizes(self.older) if self.holds else ()
        return (*[self.bucket] * 3, self.new.num_rows, *tile_sizes(self.new), *older)


def tile_sizes(cut: PrefillShape) -> tuple[int, int]:
    """Lengths of `padded_tiles`, flat, multiples of 16 bytes."""
    return 5 * cut.num_tiles, -(-(cut.num_tiles + 1) // 4) * 4


@dataclass(frozen=True, slots=True)
class GroupNumbers:
    """A step's numbers, int32, and its requests that draw a token here, in the order of rows."""

    shape: GroupShape
    numbers: npt.NDArray[np.int32]
    sampled: tuple[Extend, ...]


def lay_out_group(
    step: RunStep,
    shape: GroupShape,
    kv: KvCache,
    table: SlotTable,
    grown: list[tuple[int, int]],
) -> GroupNumbers:
    """The step's numbers for a member that takes part, with slots taken for what it keeps.

    Args:
        shape: of the step's `GroupWork`, for this member.
        kv, table: this member's pool, and its slots.
        grown: gets (segment, tokens) for the slots taken, also when this raises.

    Raises PlanError for a plan that contradicts itself or the pool, or when the pool is full.
    """
    rank = shape.rank
    validate(step, rank)
    tokens = np.zeros((3, shape.bucket), np.int32)
    tokens[2] = -1
    rows = np.zeros(shape.new.num_rows, np.int32)
    regions = older_regions(step, rank, table) if shape.holds else [(0, 0)] * len(step.batch)
    older: Spans = []
    spans: Spans = []
    sampled: list[Extend] = []
    first = 0
    for extend, region in zip(step.batch, regions, strict=True):
        ids = np.frombuffer(extend.tokens, "<i4")
        last = first + len(ids)
        tokens[0, first:last] = ids
        tokens[1, first:last] = np.arange(extend.start, extend.start + len(ids))
        take_kept(extend, rank, kv, tokens[2, first:last], grown)
        spans.append((first, last, first, last))
        older.append((first, last, *region))
        if rank in draws(step, extend):
            rows[len(sampled)] = last - 1
            sampled.append(extend)
        first = last
    if first < shape.bucket:
        # rows of padding see nothing, which makes them zeros, whatever was there before
        spans.append((first, shape.bucket, 0, 0))
        older.append((first, shape.bucket, 0, 0))
    parts = [tokens.ravel(), rows, *padded_tiles(spans, shape.new, causal=True)]
    if shape.holds:
        parts += padded_tiles(older, shape.older, causal=False)
    return GroupNumbers(shape, np.concatenate(parts), tuple(sampled))


def older_regions(step: RunStep, rank: int, table: SlotTable) -> list[tuple[int, int]]:
    """First and end of each request's older tokens here, as entries of the table; nothing may be
    added to the pool yet."""
    table.begin_step(len(step.batch))
    held = [extend for extend in step.batch if rank in extend.holders]
    found = dict(zip(map(id, held), table.older(held).T.tolist(), strict=True))
    regions = []
    for extend in step.batch:
        begin, end = found.get(id(extend), (0, 0))
        if rank in extend.holders:
            check_held(extend, rank, end - begin)
        regions.append((begin, end))
    return regions


def take_kept(
    extend: Extend,
    rank: int,
    kv: KvCache,
    slots: npt.NDArray[np.int32],
    grown: list[tuple[int, int]],
) -> None:
    """Take slots for the runs that this member keeps, and write them to `slots`."""
    first = 0
    for instance, count in extend.keep:
        if instance == rank and count:
            positions = extend.start + np.arange(first, first + count, dtype=np.int64)
            taken = kv.extend(extend.segment, positions, after=extend.cached)
            slots[first : first + count] = taken
            grown.append((extend.segment, count))
        first += count


def padded_tiles(
    spans: Spans, cut: PrefillShape, *, causal: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """As `tiles_of`, with as many ends as have room."""
    tiles, ends = tiles_of(spans, cut, causal=causal)
    return tiles, np.pad(ends, (0, tile_sizes(cut)[1] - len(ends)), mode="edge")
