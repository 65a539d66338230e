"""P90 goodput: the rate at which the share of requests that keep the SLO falls through 90 %.

LoongServe Figure 12: attainment at several rates of the same stretched arrival pattern, N growing
with the rate, and linear interpolation between the two rates around the crossing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Point:
    """`attainment` (0 to 1) of a run at `rate_rps`."""

    rate_rps: float
    attainment: float


@dataclass(frozen=True, slots=True)
class Goodput:
    """`rate_rps` is None when the crossing lies outside the rates tried."""

    rate_rps: float | None
    target: float
    points: tuple[Point, ...]


def crossing(points: Sequence[Point], target: float = 0.9) -> float | None:
    """The first rate at which the linearly interpolated attainment falls to `target`."""
    ordered = sorted(points, key=lambda p: p.rate_rps)
    for low, high in pairwise(ordered):
        if low.attainment >= target > high.attainment:
            share = (low.attainment - target) / (low.attainment - high.attainment)
            return low.rate_rps + share * (high.rate_rps - low.rate_rps)
    return None


def find_goodput(
    run: Callable[[float], float],
    guess_rps: float,
    *,
    target: float = 0.9,
    width: float = 0.05,
    max_runs: int = 16,
) -> Goodput:
    """Bracket the crossing from a guess, then bisect until the rates are `width` apart.

    Args:
        run: attainment (0 to 1) at a rate.
        width: relative, high / low - 1.
    """
    points: dict[float, float] = {}

    def good(rate_rps: float) -> bool:
        points[rate_rps] = run(rate_rps)
        return points[rate_rps] >= target

    low = high = guess_rps
    if good(guess_rps):
        while len(points) < max_runs and good(high := high * 1.25):
            low = high
    else:
        while len(points) < max_runs and not good(low := low / 1.25):
            high = low
    while high / low - 1 > width and len(points) < max_runs:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if good(middle) else (low, middle)
    tried = tuple(Point(rate_rps, points[rate_rps]) for rate_rps in sorted(points))
    return Goodput(crossing([p for p in tried if low <= p.rate_rps <= high], target), target, tried)
