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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loongd.wire import Extend, RunStep, unpack_tokens
from loongd.worker.slot_table import SlotTable

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows for which there are graphs; fewer rows are padded."""
MAX_EXCHANGED_ROWS = 256
"""Most rows of a member in a step with exchanges: bounds the memory of the exchange."""

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


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A step's numbers: `columns` (columns, bucket) int32; `grown` as in `StepLayout`."""

    shape: DecodeShape
    columns: npt.NDArray[np.int32]
    own: tuple[Extend, ...]
    grown: tuple[tuple[int, int], ...]


def shape_of(step: RunStep, rank: int) -> DecodeShape | None:
    """The step's shape for this member; None when no graph has that shape."""
    counts: Counter[int] = Counter()
    asked: set[tuple[int, int]] = set()
    for extend in step.batch:
        if extend.master is None or len(extend.tokens) > 4:
            return None
        counts[extend.master] += 1
        asked.update((extend.master, holder) for holder in extend.holders)
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
    step: RunStep,
    rank: int,
    shape: DecodeShape,
    table: SlotTable,
    grown: list[tuple[int, int]],
    *,
    drawn_rows: dict[str, int],
) -> DecodeRows:
    """The step's numbers for this member, with a slot taken for each own row.

    Args:
        shape: `shape_of` the step.
        table: this member's slots.
        grown: gets (segment, 1) for each slot taken, also when this raises.
        drawn_rows: by request, the row of the step before that has drawn its token; asked for
            requests whose token is not in the message.

    Raises PlanError when no slot is free.
    """
    table.begin_step(len(step.batch))
    height, scratch = NUM_COLUMNS + 2 * len(shape.answers), table.scratch
    # lists, because numpy takes a microsecond for each number that it is given alone
    own_rows: list[tuple[int, ...]] = []
    asked: dict[int, list[tuple[int, int]]] = {member: [] for member in shape.answers}
    own: list[Extend] = []
    for extend in step.batch:
        master = extend.master
        if master == rank:
            slot, begin, end = table.grow(extend)
            grown.append((extend.segment, 1))
            token, source = _token(extend, drawn_rows)
            own_rows.append((token, source, extend.start, slot, end - 1, begin, end))
            own.append(extend)
        elif master in asked:
            held = table.older(extend) if rank in extend.holders else (0, 0)
            asked[master].append(held)
    columns = np.zeros((height, shape.bucket), np.int32)
    columns[SOURCE, len(own) :] = columns[SLOT, len(own) :] = -1
    columns[ENTRY, len(own) :] = scratch
    if own:
        columns[:NUM_COLUMNS, : len(own)] = np.array(own_rows, np.int32).T
    for number, rows in enumerate(asked.values()):
        first = NUM_COLUMNS + 2 * number
        columns[first : first + 2, : len(rows)] = np.array(rows, np.int32).T
    return DecodeRows(shape, columns, tuple(own), tuple(grown))


def _token(extend: Extend, drawn_rows: dict[str, int]) -> tuple[int, int]:
    """(token, -1), or (0, row that has drawn it)."""
    if extend.tokens:
        return unpack_tokens(extend.tokens)[0], -1
    return 0, drawn_rows[extend.request_id]
