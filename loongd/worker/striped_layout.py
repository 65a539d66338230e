"""A small prefill on a group, its rows dealt out, as a list of numbers that a captured graph reads.

Knows: which steps those are, which rows each member computes of them, and how the attention of
these to each member's rows, and of all rows to a member's older tokens, is cut into tiles.
Does not know: graphs, tensors of K, V or Q, steps of few tokens (`worker.group_layout`).

Tokens are dealt as in a ring: member r of P computes the new tokens i of each request with
i mod P = r. All members send each other their rows' K and V, so each has all new keys of its
queries, and stores what it keeps of them. Older tokens stay where they are: the queries go to the
members that hold some, with the keys, and partial results come back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loongd.model.spec import ModelSpec
from loongd.wire import Extend, RunStep
from loongd.worker.group_layout import (
    MOST_EXCHANGED_PAIRS,
    MOST_EXCHANGED_TOKENS,
    Spans,
    draws,
    held_pairs,
    is_plain,
    older_regions,
    padded_tiles,
    take_kept,
    tile_sizes,
)
from loongd.worker.kvcache import KvCache
from loongd.worker.prefill_layout import BUCKETS, MOST_REQUESTS, PrefillShape
from loongd.worker.slot_table import SlotTable
from loongd.worker.validate import validate

ROWS: tuple[int, ...] = (64, 128, 192, *range(256, 1025, 128), 1280, 1536, 2048, 2560, 3072, 4096)
"""New tokens of a member for which there are graphs; fewer are padded."""
LEAST_TOKENS = MOST_EXCHANGED_TOKENS + 1
"""New tokens of a step from which they are dealt out: reading the weights takes as long for fewer,
so that each member computes all of them."""
MOST_SENT_ROWS = ROWS[-1]
"""Most rows that a member sends in a layer of a step over older tokens, copies for other members
counted: they travel while nothing is computed. With 32 heads of 128, keys like queries, a row is
16 KB, 8 more for its queries and 16 for each partial result that comes back: 0.8 ms altogether.
Hosts need 100 to 200 ms to launch such a step's kernels one by one."""
MOST_NEW_ROWS = 2560
"""The same of a step without older tokens: 0.1 to 0.2 ms. With more the devices take longer than
hosts do to launch (7B on two H200: 70 to 95 ms), and a ring overlaps what travels."""
MOST_PARTIAL_ROWS = max(MOST_SENT_ROWS, MOST_EXCHANGED_TOKENS)
"""Most rows of a partial result in any step of a group."""


def most_rows(dop: int, *, older: bool) -> int:
    """Most new tokens of a member of a group, one of `ROWS`, with `older` tokens or without."""
    most = MOST_SENT_ROWS if older else MOST_NEW_ROWS
    return max(rows for rows in ROWS if rows == ROWS[0] or rows * (dop - 1) <= most)


def message_length(spec: ModelSpec, rows: int, *, queries: bool = True) -> int:
    """Elements of what a member sends of so many rows: K and V, and then `queries`."""
    heads = 2 * spec.num_kv_heads + (spec.num_heads if queries else 0)
    return rows * heads * spec.head_dim


def padded_sizes(dop: int, *, older: bool) -> list[int]:
    """Numbers of new tokens to which steps are padded on so many members, with `older` tokens or
    without."""
    small = [size for size in BUCKETS if size < LEAST_TOKENS]
    dealt = [dop * rows for rows in ROWS if rows <= most_rows(dop, older=older)]
    return [*small, *(size for size in dealt if size >= LEAST_TOKENS)]


@dataclass(frozen=True, slots=True)
class StripedWork:
    """What a step is to all of its members alike: `rows` of each, padding included."""

    rows: int
    members: tuple[int, ...]
    holders: tuple[int, ...] = ()
    """Members with older tokens, in group order."""

    @classmethod
    def of(cls, step: RunStep) -> StripedWork | None:
        """None for a step that has to run another way, on all of its members."""
        dop = len(step.members)
        fits = dop > 1 and len(step.batch) < MOST_REQUESTS
        if not fits or not all(map(is_plain, step.batch)):
            return None
        counts = [len(extend.tokens) // 4 for extend in step.batch]
        most = sum(-(-count // dop) for count in counts)  # the first member's
        pairs = held_pairs(step)
        if sum(counts) < LEAST_TOKENS or most > most_rows(dop, older=any(pairs.values())):
            return None
        if max(pairs.values()) > MOST_EXCHANGED_PAIRS:
            return None
        rows = next(rows for rows in ROWS if rows >= most)
        holders = tuple(member for member in step.members if pairs[member])
        return cls(rows, tuple(step.members), holders)


@dataclass(frozen=True, slots=True)
class StripedShape:
    """What decides the kernels of a step on member `rank` of `members`, of which the `holders` have
    older tokens. `new` and `older` tell how attention to a member's rows and to older keys is cut.
    """

    rank: int
    members: tuple[int, ...]
    holders: tuple[int, ...]
    new: PrefillShape
    older: PrefillShape

    @property
    def rows(self) -> int:
        """New tokens of each member, padding included."""
        return self.new.bucket

    @property
    def holds(self) -> bool:
        """Whether older tokens are here."""
        return self.rank in self.holders

    @property
    def me(self) -> int:
        """This member's index."""
        return self.members.index(self.rank)

    @property
    def sources(self) -> tuple[int, ...]:
        """Member indices in the order in which their rows are attended to: the own ones first, as
        the others' travel meanwhile."""
        dop = len(self.members)
        return tuple((self.me - step) % dop for step in range(dop))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of the numbers, multiples of 16 bytes as kernels like it.

        For each own row: token, position; for each source's rows: slot (-1: not kept here); own row
        of each row of the last layer; for each source tiles and ends of attention to its rows, and
        if older tokens are here, for each source those of attention of its rows to them.
        """
        dop = len(self.members)
        older = tile_sizes(self.older) * dop if self.holds else ()
        new = tile_sizes(self.new) * dop
        return (*[self.rows] * (2 + dop), self.new.num_rows, *new, *older)


@dataclass(frozen=True, slots=True)
class StripedNumbers:
    """A step's numbers, int32, and its requests that draw a token here, in the order of rows."""

    shape: StripedShape
    numbers: npt.NDArray[np.int32]
    sampled: tuple[Extend, ...]


def lay_out_striped(
    step: RunStep,
    shape: StripedShape,
    kv: KvCache,
    table: SlotTable,
    grown: list[tuple[int, int]],
) -> StripedNumbers:
    """The step's numbers for a member, with slots taken for what it keeps.

    Args:
        shape: of the step's `StripedWork`, for this member.
        kv, table: this member's pool, and its slots.
        grown: gets (segment, tokens) for the slots taken, also when this raises.

    Raises PlanError for a plan that contradicts itself or the pool, or when the pool is full.
    """
    validate(step, shape.rank)
    rank, me, dop, sources = shape.rank, shape.me, len(shape.members), shape.sources
    own = np.zeros((2, shape.rows), np.int32)
    slots = np.full((dop, shape.rows), -1, np.int32)
    rows = np.zeros(shape.new.num_rows, np.int32)
    new: list[Spans] = [[] for _ in range(dop)]
    older: list[Spans] = [[] for _ in range(dop)]
    regions = older_regions(step, rank, table) if shape.holds else [(0, 0)] * len(step.batch)
    sampled: list[Extend] = []
    first = [0] * dop
    for extend, region in zip(step.batch, regions, strict=True):
        ids = np.frombuffer(extend.tokens, "<i4")
        kept = np.full(len(ids), -1, np.int32)
        take_kept(extend, rank, kv, kept, grown)
        begin, end = first[0], first[0] + len(range(me, len(ids), dop))
        own[0, begin:end] = ids[me::dop]
        own[1, begin:end] = extend.start + np.arange(me, len(ids), dop)
        for at, source in enumerate(sources):
            theirs = kept[source::dop]
            key, last = first[at], first[at] + len(theirs)
            slots[at, key:last] = theirs
            # the first row sees none of a later member's
            seen = max(end - begin - (source > me), 0)
            new[at].append((begin, end, key, key + seen))
            older[at].append((key, last, *region))
            first[at] = last
        if rank in draws(step, extend):
            rows[len(sampled)] = end - 1
            sampled.append(extend)
    # rows of padding see nothing, which makes them zeros, whatever was there before
    for at in range(dop):
        new[at].append((first[0], shape.rows, 0, 0))
        older[at].append((first[at], shape.rows, 0, 0))
    tiles = [part for spans in new for part in padded_tiles(spans, shape.new, causal=True)]
    if shape.holds:
        tiles += [p for spans in older for p in padded_tiles(spans, shape.older, causal=False)]
    numbers = np.concatenate([own.ravel(), slots.ravel(), rows, *tiles])
    return StripedNumbers(shape, numbers, tuple(sampled))
