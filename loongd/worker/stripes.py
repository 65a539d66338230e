"""Which rows of a striped request meet in a ring block.

Knows: numbers of rows. Does not know: requests, slots, tensors.

Member r of P computes new token i when i mod P = r. Its row j sees the rows 0 .. j of the stripe
of an earlier member (or its own), and the rows below j of a later one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, compress

SpanLens = tuple[int, int]
"""Numbers of queries and keys of one span."""


def stripe_rows(first: int, end: int, source: int, dop: int) -> range:
    """Rows of the stripe of `source` whose tokens lie in `[first, end)` of the new tokens."""
    return range(max(-(-(first - source) // dop), 0), max(-(-(end - source) // dop), 0))


def block_spans(num_queries: int, num_keys: int, *, later: bool) -> list[SpanLens]:
    """One request's rows over its rows of a block: a causal square between rows left alone.

    Over the block of a `later` member, dropping the first query row makes a square.
    """
    square = max(num_queries - later, 0)
    return [(num_queries - square, 0), (square, square), (0, num_keys - square)]


def tail_rows(counts: Sequence[int], sampled: Iterable[bool]) -> tuple[tuple[int, int], ...]:
    """(first, end) of each sampled request's rows in a block with so many rows of each request."""
    ends = accumulate(counts)
    rows = [(end - count, end) for end, count in zip(ends, counts, strict=True)]
    return tuple(compress(rows, sampled))


def trimmed(spans: Sequence[SpanLens]) -> tuple[list[SpanLens], slice, slice]:
    """Packed spans without the empty ones and without those at the ends that have no partner.

    Returns also which of the packed queries and which of the packed keys are left.
    """
    squares = [number for number, span in enumerate(spans) if all(span)]
    if not squares:
        return [], slice(0, 0), slice(0, 0)
    before, inner = spans[: squares[0]], spans[squares[0] : squares[-1] + 1]
    rows = []
    for side in (0, 1):
        first = sum(span[side] for span in before)
        rows.append(slice(first, first + sum(span[side] for span in inner)))
    return [span for span in inner if any(span)], rows[0], rows[1]
