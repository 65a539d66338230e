"""A small prefill of new prompts on a group as a list of numbers that a captured graph reads.

Knows: which steps those are, which rows each member computes of them, and how the attention of
these to each member's rows is cut into tiles.
Does not know: graphs, tensors of K, V or Q, steps with older tokens (`worker.group_layout`).

Tokens are dealt as in a ring: member r of P computes the new tokens i of each prompt with
i mod P = r. All members send each other their rows' K and V, so each has all keys of its queries,
and stores what it keeps of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loongd.wire import Extend, RunStep
from loongd.worker.group_layout import (
    GROUP_BUCKETS,
    draws,
    is_plain,
    padded_tiles,
    take_kept,
    tile_sizes,
)
from loongd.worker.kvcache import KvCache
from loongd.worker.prefill_layout import MOST_REQUESTS, PrefillShape
from loongd.worker.validate import validate

ROWS: tuple[int, ...] = (64, 128, 192, *range(256, 1025, 128), 1280, 1536, 2048, 2560)
"""New tokens of a member for which there are graphs; fewer are padded. With more the devices take
longer than hosts do to launch kernels one by one (7B on two H200: 70 to 95 ms), and those overlap
what travels."""
LEAST_TOKENS = 257
"""New tokens of a step from which they are dealt out: reading the weights takes as long for fewer,
so that each member computes all of them and nothing travels."""
MOST_SENT_ROWS = ROWS[-1]
"""Most rows that a member sends in a layer, copies for other members counted: they travel while
nothing is computed, 16 KB each with 32 key heads of 128, 0.1 to 0.2 ms altogether."""


def most_rows(dop: int) -> int:
    """Most new tokens of a member of a group, one of `ROWS`."""
    return max(rows for rows in ROWS if rows == ROWS[0] or rows * (dop - 1) <= MOST_SENT_ROWS)


def padded_sizes(dop: int) -> list[int]:
    """Numbers of new tokens to which steps of new prompts are padded on so many members."""
    small = [size for size in GROUP_BUCKETS if size < LEAST_TOKENS]
    dealt = [dop * rows for rows in ROWS if rows <= most_rows(dop)]
    return [*small, *(size for size in dealt if size >= LEAST_TOKENS)]


@dataclass(frozen=True, slots=True)
class StripedWork:
    """What a step is to all of its members alike: `rows` of each, padding included."""

    rows: int
    members: tuple[int, ...]

    @classmethod
    def of(cls, step: RunStep) -> StripedWork | None:
        """None for a step that has to run another way, on all of its members."""
        dop = len(step.members)
        fits = dop > 1 and len(step.batch) < MOST_REQUESTS
        if not fits or not all(is_plain(one) and one.start == 0 for one in step.batch):
            return None
        counts = [len(extend.tokens) // 4 for extend in step.batch]
        most = sum(-(-count // dop) for count in counts)  # the first member's
        if sum(counts) < LEAST_TOKENS or most > most_rows(dop):
            return None
        return cls(next(rows for rows in ROWS if rows >= most), tuple(step.members))


@dataclass(frozen=True, slots=True)
class StripedShape:
    """What decides the kernels of a step on member `rank` of `members`; `cut` tells how attention
    to each member's rows is cut."""

    rank: int
    members: tuple[int, ...]
    cut: PrefillShape

    @property
    def rows(self) -> int:
        """New tokens of each member, padding included."""
        return self.cut.bucket

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
        of each row of the last layer; for each source tiles and ends of attention to its rows.
        """
        dop = len(self.members)
        return (*[self.rows] * (2 + dop), self.cut.num_rows, *tile_sizes(self.cut) * dop)


@dataclass(frozen=True, slots=True)
class StripedNumbers:
    """A step's numbers, int32, and its requests that draw a token here, in the order of rows."""

    shape: StripedShape
    numbers: npt.NDArray[np.int32]
    sampled: tuple[Extend, ...]


def lay_out_striped(
    step: RunStep, shape: StripedShape, kv: KvCache, grown: list[tuple[int, int]]
) -> StripedNumbers:
    """The step's numbers for a member, with slots taken for what it keeps.

    Args:
        shape: of the step's `StripedWork`, for this member.
        kv: this member's pool.
        grown: gets (segment, tokens) for the slots taken, also when this raises.

    Raises PlanError for a plan that contradicts itself or the pool, or when the pool is full.
    """
    validate(step, shape.rank)
    rank, me, dop, sources = shape.rank, shape.me, len(shape.members), shape.sources
    own = np.zeros((2, shape.rows), np.int32)
    slots = np.full((dop, shape.rows), -1, np.int32)
    rows = np.zeros(shape.cut.num_rows, np.int32)
    spans: list[list[tuple[int, int, int, int]]] = [[] for _ in range(dop)]
    sampled: list[Extend] = []
    first = [0] * dop
    for extend in step.batch:
        ids = np.frombuffer(extend.tokens, "<i4")
        kept = np.full(len(ids), -1, np.int32)
        take_kept(extend, rank, kv, kept, grown)
        begin, count = first[0], len(range(me, len(ids), dop))
        own[0, begin : begin + count] = ids[me::dop]
        own[1, begin : begin + count] = np.arange(me, len(ids), dop)
        for at, source in enumerate(sources):
            key, theirs = first[at], kept[source::dop]
            slots[at, key : key + len(theirs)] = theirs
            # the first row sees none of a later member's
            seen = max(count - (source > me), 0)
            spans[at].append((begin, begin + count, key, key + seen))
            first[at] += len(theirs)
        if rank in draws(step, extend):
            rows[len(sampled)] = begin + count - 1
            sampled.append(extend)
    if first[0] < shape.rows:
        # rows of padding see nothing, which makes them zeros, whatever was there before
        for at in range(dop):
            spans[at].append((first[0], shape.rows, 0, 0))
    tiles = [part for of in spans for part in padded_tiles(of, shape.cut, causal=True)]
    numbers = np.concatenate([own.ravel(), slots.ravel(), rows, *tiles])
    return StripedNumbers(shape, numbers, tuple(sampled))
