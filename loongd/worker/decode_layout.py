"""The rows of a decode step for one member, as columns of numbers that a captured graph reads.

Knows: how a plan of one new token a request becomes columns of fixed height, and which exchanges
they need; every member derives its own from the same plan.
Does not know: graphs, tensors of K, V or Q, how rows are exchanged.

A member's own rows are the requests that it is master of, in the plan's order. Where another
member holds older tokens of any of them, it is asked about all of them: rows of which it holds
nothing get an empty answer. So the shape of a step is few numbers, and steps repeat shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from loongd.model.sampler import Recipe, is_plain
from loongd.wire import Extend, RunStep, Sampling
from loongd.worker.slot_table import SlotTable

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows for which there are graphs; fewer rows are padded."""
MAX_EXCHANGED_ROWS = 512
"""Most rows of a member in a step with exchanges: bounds the memory of the exchange, 25 KB a row
and worker with 32 heads of 128. Without a graph such a step takes 50 to 110 ms."""

TOKEN, SOURCE, POSITION, SLOT, ENTRY, BEGIN, END, NUM_COLUMNS = range(8)
"""Columns of own rows; (begin, end) of each asking member's rows follow."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What decides the kernels of a step.

    `asks`: members that hold older tokens of own rows; `answers`: members that ask this one; both
    in group order. `owns` is false for a member that only answers.
    """

    bucket: int
    owns: bool
    asks: tuple[int, ...]
    answers: tuple[int, ...]

    @property
    def exchanges(self) -> bool:
        """Whether rows travel."""
        return bool(self.asks or self.answers)


_same = attrgetter("request_id", "master", "segment", "cached", "holders", "sampling")
_NO_TOKEN = bytes(4)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBatch:
    """What the decode steps of one batch have in common, for one member.

    `own` are the positions in the batch of the requests that this member is master of, `requests`
    and `extends` their names and what the first of the steps said of them. `asked` are those of
    which older tokens are here and another member is master; `asked_rows` are their columns' first
    rows and their rows among that master's.
    """

    members: list[int]
    same: list[tuple[object, ...]]
    shape: DecodeShape
    own: list[int]
    requests: list[str]
    extends: list[Extend]
    asked: list[Extend]
    asked_rows: tuple[list[int], list[int]]
    recipe: Recipe | None
    """How the own rows are drawn; None where the best logits alone decide."""

    @classmethod
    def of(
        cls, step: RunStep, rank: int, shape: DecodeShape, same: list[tuple[object, ...]]
    ) -> DecodeBatch:
        """The batch of a step with this shape; `same` as `what_stays` gives it."""
        own: list[int] = []
        asked: list[Extend] = []
        asked_rows: tuple[list[int], list[int]] = [], []
        first = {member: NUM_COLUMNS + 2 * i for i, member in enumerate(shape.answers)}
        num_rows: Counter[int | None] = Counter()
        for number, extend in enumerate(step.batch):
            master = extend.master
            if master == rank:
                own.append(number)
            elif master in first and rank in extend.holders:
                asked.append(extend)
                asked_rows[0].append(first[master])
                asked_rows[1].append(num_rows[master])
            num_rows[master] += 1
        extends = [step.batch[number] for number in own]
        return cls(
            step.members,
            same,
            shape,
            own,
            [extend.request_id for extend in extends],
            extends,
            asked,
            asked_rows,
            _recipe(extends),
        )

    def goes_on(self, step: RunStep, same: list[tuple[object, ...]]) -> bool:
        """Whether it is this batch that the step decodes, one token a request."""
        return same == self.same and step.members == self.members and not _is_long(step)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A step's numbers: `columns` (columns, bucket) int32; `positions` of the own rows' tokens."""

    batch: DecodeBatch
    columns: npt.NDArray[np.int32]
    positions: list[int]

    @property
    def shape(self) -> DecodeShape:
        return self.batch.shape


def what_stays(step: RunStep) -> list[tuple[object, ...]]:
    """Of each request what does not change while the batch decodes on."""
    return list(map(_same, step.batch))


def shape_of(step: RunStep, rank: int) -> DecodeShape | None:
    """The step's shape for this member; None when no graph has that shape."""
    if _is_long(step):
        return None
    # masters and holders have few values, requests are many
    pairs = Counter([(extend.master, tuple(extend.holders)) for extend in step.batch])
    counts: Counter[int] = Counter()
    asked: set[tuple[int, int]] = set()
    for (master, holders), count in pairs.items():
        if master is None:
            return None
        counts[master] += count
        asked.update((master, holder) for holder in holders)
    asks = tuple(m for m in step.members if m != rank and (rank, m) in asked)
    answers = tuple(m for m in step.members if m != rank and (m, rank) in asked)
    # members that exchange rows must agree on their number: all take the largest's
    alone = all(master == holder for master, holder in asked)
    most = counts[rank] if alone else max(counts.values())
    limit = BUCKETS[-1] if alone else MAX_EXCHANGED_ROWS
    bucket = next((b for b in BUCKETS if b >= most), limit + 1)
    if bucket > limit:
        return None
    return DecodeShape(bucket, counts[rank] > 0, asks, answers)


def lay_out_rows(
    step: RunStep, batch: DecodeBatch, table: SlotTable, *, drawn_rows: Mapping[str, int]
) -> DecodeRows:
    """The step's numbers for this member, with a slot taken for each own row.

    Args:
        batch: that of the step; the same object as for the step before saves work.
        table: this member's slots.
        drawn_rows: by request, the row of the step before that has drawn its token; asked for
            requests whose token is not in the message.

    Raises PlanError when too few slots are free; then none is taken.
    """
    table.begin_step(len(step.batch))
    shape = batch.shape
    columns = np.zeros((NUM_COLUMNS + 2 * len(shape.answers), shape.bucket), np.int32)
    if batch.asked:
        # before own rows: nothing may have been added
        rows, places = batch.asked_rows
        first = np.array(rows)
        columns[first, places], columns[first + 1, places] = table.older(batch.asked)
    num_own = len(batch.own)
    if num_own < shape.bucket:
        columns[SOURCE, num_own:] = columns[SLOT, num_own:] = -1
        columns[ENTRY, num_own:] = table.scratch
    if not num_own:
        return DecodeRows(batch, columns, [])
    own = list(map(step.batch.__getitem__, batch.own))
    positions = [extend.start for extend in own]
    tokens = b"".join([extend.tokens or _NO_TOKEN for extend in own])
    sources = [-1 if e.tokens else drawn_rows[e.request_id] for e in own]
    slots, begins, ends = table.grow(batch.extends, positions)
    columns[TOKEN, :num_own] = np.frombuffer(tokens, "<i4")
    columns[SOURCE, :num_own] = sources
    columns[POSITION, :num_own] = positions
    columns[SLOT, :num_own] = slots
    columns[ENTRY, :num_own] = ends - 1
    columns[BEGIN, :num_own] = begins
    columns[END, :num_own] = ends
    return DecodeRows(batch, columns, positions)


def _is_long(step: RunStep) -> bool:
    """Whether any request has several new tokens."""
    return max(map(len, [extend.tokens for extend in step.batch]), default=0) > len(_NO_TOKEN)


def _recipe(extends: list[Extend]) -> Recipe | None:
    if all(is_plain(extend.sampling) for extend in extends):
        return None
    return Recipe.of([extend.sampling or Sampling() for extend in extends])
