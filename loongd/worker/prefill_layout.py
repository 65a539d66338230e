"""A small prefill step on one instance as a list of numbers that a captured graph reads.

Knows: which steps are small, how their requests are packed into a bucket of rows, and how their
attention is cut into tiles over the slot table.
Does not know: graphs, tensors of K, V or Q, groups of several.

Of each request the slots of all tokens, older and new, are one region of the slot table, the new
ones last and in order. So a request is one causal span, whatever it has cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loongd.kernels.cudnn import LEAST_QUERIES
from loongd.kernels.gpu.plan import tile_table
from loongd.wire import Extend, RunStep
from loongd.worker.slot_table import SlotTable
from loongd.worker.validate import check_held, validate

BUCKETS = (16, 32, 64, *range(128, 1025, 128), 1280, 1536, 1792, 2048)
"""Numbers of new tokens for which there are graphs; fewer are padded. Up to about 128 reading the
weights takes all the time; above, products come in tiles of 128 rows (448 rows take longer than
512: 15.2 ms a step against 13.0, 8B on an H200). Hosts need 25 to 50 ms to launch a step's kernels
one by one, slow ones 80, and the device as long for some 2,048 new tokens."""
MOST_REQUESTS = 32
"""Requests of a step: rows of its last layer, and so of which the head makes logits."""
MOST_PAIRS = 32 << 20
"""Most (new token, key) pairs of requests that the library would take: beyond, its attention saves
more (580 TFLOP/s against 440) than the launches cost (7B on an H200, 1,055 new tokens over 16,551:
83 ms by launches where the device needs 37). Fewer new tokens over a prefix of any length are done
by the same kernel either way (flash-attn 3 would take a third less than that kernel does)."""


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """What decides the kernels of a step: `bucket` new tokens, and how attention is cut.

    `group` query heads share keys; tiles are of `block_m` rows (token, head of a group) and
    `block_k` keys. If it `is_square`, the tokens are one request's first ones, and tiles do not
    matter.
    """

    bucket: int
    group: int
    block_m: int
    block_k: int
    is_square: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the last layer."""
        return min(MOST_REQUESTS, self.bucket)

    @property
    def num_tiles(self) -> int:
        """At least the tiles of any step: each request adds one that is not full. A multiple of
        16, since Triton compiles anew for numbers that are and numbers that are not."""
        tiles = self.bucket * self.group // self.block_m + self.num_rows
        return -(-tiles // 16) * 16

    @property
    def sizes(self) -> tuple[int, ...]:
        """Lengths of the parts of the numbers, multiples of 16 bytes as kernels like it.

        For each new token: token, position, slot, entry of the table; for each row of the last
        layer: new token, first and end of its slots in the table; tiles and ends as in
        `kernels.gpu.plan.plan_tiles`.
        """
        return (*[self.bucket] * 4, *[self.num_rows] * 3, 5 * self.num_tiles, self.num_tiles + 1)


@dataclass(frozen=True, slots=True)
class PrefillNumbers:
    """A step's numbers, int32, and its requests that draw a token, in the order of the rows."""

    shape: PrefillShape
    numbers: npt.NDArray[np.int32]
    sampled: tuple[Extend, ...]


def bucket_of(step: RunStep, rank: int) -> int | None:
    """The step's bucket on this instance; None when it has to run another way."""
    if step.members != [rank] or len(step.batch) > MOST_REQUESTS:
        return None
    total = pairs = 0
    for extend in step.batch:
        count = len(extend.tokens) // 4
        if count == 0 or (extend.start > 0) != (list(extend.holders) == [rank]):
            return None
        total += count
        pairs += count * (extend.start + count) if count >= LEAST_QUERIES else 0
    if total == 0 or pairs > MOST_PAIRS:
        return None
    return next((bucket for bucket in BUCKETS if bucket >= total), None)


def is_lone(step: RunStep) -> bool:
    """Whether the step is one request's first tokens."""
    return len(step.batch) == 1 and step.batch[0].start == 0


def lay_out_prefill(
    step: RunStep,
    rank: int,
    shape: PrefillShape,
    table: SlotTable,
    grown: list[tuple[int, int]],
) -> PrefillNumbers:
    """The step's numbers, with slots taken for all new tokens. Padding repeats the last one.

    Args:
        shape: of the bucket that `bucket_of` gives.
        table: this instance's slots.
        grown: gets (segment, tokens) for the slots taken, also when this raises.

    Raises PlanError for a plan that contradicts itself or the pool, or when the pool is full.
    """
    validate(step, rank)
    table.begin_step(len(step.batch), shape.bucket)
    tokens = np.zeros((4, shape.bucket), np.int32)
    tokens[2], tokens[3] = -1, table.scratch
    rows = np.zeros((3, shape.num_rows), np.int32)
    spans: list[tuple[int, int, int, int]] = []
    sampled: list[Extend] = []
    first = 0
    for extend in step.batch:
        ids = np.frombuffer(extend.tokens, "<i4")
        slots, begin, end = table.grow_by(extend, len(ids))
        grown.append((extend.segment, len(ids)))
        if extend.holder_tokens:
            check_held(extend, rank, end - begin - len(ids))
        last = first + len(ids)
        tokens[0, first:last] = ids
        tokens[1, first:last] = np.arange(extend.start, extend.start + len(ids))
        tokens[2, first:last] = slots
        tokens[3, first:last] = np.arange(end - len(ids), end)
        spans.append((first, last, begin, end))
        if extend.sampling is not None:
            rows[:, len(sampled)] = last - 1, begin, end
            sampled.append(extend)
        first = last
    # the last token again: what a square computes of the rows behind it must be as finite
    tokens[:2, first:] = tokens[:2, first - 1 : first]
    parts = (tokens.ravel(), rows.ravel(), *tiles_of(spans, shape, causal=True))
    return PrefillNumbers(shape, np.concatenate(parts), tuple(sampled))


def tiles_of(
    spans: list[tuple[int, int, int, int]], shape: PrefillShape, *, causal: bool
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """The step's tiles, row by row, and their ends; padded with tiles of nothing."""
    found, ends = tile_table(spans, shape.group, shape.block_m, shape.block_k, causal=causal)
    tiles = np.zeros((shape.num_tiles, 5), np.int32)
    tiles[: len(found)] = found
    padding = shape.num_tiles + 1 - len(ends)
    return tiles.ravel(), np.pad(ends, (0, padding), mode="edge")
