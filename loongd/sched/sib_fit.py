"""Fitting coefficients to measured step times.

Knows: exact non-negative least squares for a handful of unknowns, on relative errors, and the two
formulas of `sched.sib_profile`. Does not know: how the times were measured.

Relative errors, because a step of 5 ms mispredicted by 5 ms hurts more than one of 5 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import ceil

import numpy as np
import numpy.typing as npt

from loongd.sched.sib_profile import (
    Coefficients,
    DecodeCoefficients,
    DecodeFit,
    FitError,
    PrefillFit,
)

Floats = npt.NDArray[np.float64]
_AT_FLOOR = 1.15
"""Steps within 15 % of the shortest may be held up by the floor, not by their work."""
_MAX_UNKNOWNS = 6
_SHAPE_POINTS = 8
"""Fewer points would take any knee for a good one."""
_MUST_SAVE = 0.9
"""A knee must earn its keep: noise alone would choose one for less."""
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A measured prefill step; `items` are (cached, new) tokens."""

    items: tuple[tuple[int, int], ...]
    elapsed_s: float

    @property
    def features(self) -> tuple[float, float, float, float]:
        """1, requests, new tokens, squared tokens."""
        new = sum(count for _, count in self.items)
        square = sum(count * (count + 2 * cached) for cached, count in self.items)
        return (1.0, float(len(self.items)), float(new), float(square))


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A measured decode step of `batch` requests that read `kv_tokens` altogether."""

    batch: int
    kv_tokens: int
    elapsed_s: float


def nnls(a: Floats, b: Floats) -> Floats:
    """The exact x >= 0 that minimises |a x - b|, by trying every set of free unknowns.

    a is (rows, unknowns) with at most six unknowns, b is (rows,). Raises ValueError for more.
    """
    num = a.shape[1]
    if num > _MAX_UNKNOWNS:
        raise ValueError(f"{num} unknowns, but every set of at most {_MAX_UNKNOWNS} is tried")
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    scaled = a / scale
    best, least = np.zeros(num), float(b @ b)
    for size in range(1, num + 1):
        for free in combinations(range(num), size):
            columns = list(free)
            found = np.linalg.lstsq(scaled[:, columns], b, rcond=None)[0]
            if (found < 0).any():
                continue
            rest = scaled[:, columns] @ found - b
            if float(rest @ rest) < least * (1 - 1e-12):
                least = float(rest @ rest)
                best = np.zeros(num)
                best[columns] = found
    result: Floats = best / scale
    return result


def fit_prefill(dop: int, points: Sequence[PrefillPoint]) -> PrefillFit:
    """Non-negative prefill coefficients of one dop. Raises ValueError without enough points."""
    features = np.array([point.features for point in points], dtype=np.float64)
    times = _times([point.elapsed_s for point in points])
    max_items = int(features[:, 1].max())
    if (features[:, 1] == max_items).all():
        features[:, 1] = 0.0  # what all steps have in common is alpha's

    def build(x: Floats, floor_s: float) -> Coefficients:
        return Coefficients(
            alpha_s=_readable(x[0]),
            item_s=_readable(x[1]),
            beta_s=_readable(x[2]),
            gamma_s=_readable(x[3]),
            floor_s=_readable(floor_s),
        )

    x, floor_s, predicted = _fit(features, times)
    return PrefillFit(
        dop=dop,
        coefficients=build(x, floor_s),
        max_tokens=int(features[:, 2].max()),
        max_square=int(features[:, 3].max()),
        max_items=max_items,
        error=error_of(predicted, times),
    )


def fit_decode(dop: int, num_masters: int, points: Sequence[DecodePoint]) -> DecodeFit:
    """Non-negative decode coefficients of one (dop, masters), with the best knee among the
    measured batches. Raises ValueError without enough points."""
    busiest = np.array([ceil(point.batch / num_masters) for point in points], dtype=np.float64)
    kv = np.array([point.kv_tokens / dop for point in points], dtype=np.float64)
    times = _times([point.elapsed_s for point in points])
    best: tuple[float, DecodeCoefficients, Floats] | None = None
    for knee, has_many in _shapes(busiest):
        over = np.maximum(0.0, busiest - knee) if knee else np.zeros_like(busiest)
        many = np.where(busiest > 1, float(has_many), 0.0)
        features = np.stack([np.ones_like(busiest), busiest, kv, over, many], axis=1)
        x, floor_s, predicted = _fit(features, times)
        cost = _cost(predicted, times)
        if best is None or cost + _NEGLIGIBLE < _MUST_SAVE * best[0]:
            found = DecodeCoefficients(
                alpha_s=_readable(x[0]),
                request_s=_readable(x[1]),
                kv_token_s=_readable(x[2]),
                over_s=_readable(x[3]),
                many_s=_readable(x[4]),
                knee=knee,
                floor_s=_readable(floor_s),
            )
            best = (cost, found, predicted)
    assert best is not None
    return DecodeFit(
        dop=dop,
        num_masters=num_masters,
        coefficients=best[1],
        max_batch=max(point.batch for point in points),
        max_kv_tokens=max(point.kv_tokens for point in points),
        error=error_of(best[2], times),
    )


def _shapes(busiest: Floats) -> list[tuple[float, bool]]:
    """(knee, whether a second request costs extra) to try, the simplest first."""
    if len(busiest) < _SHAPE_POINTS:
        return [(0.0, False)]
    # With a knee at two, the extra cost of the second request could not be told from the rest.
    knees = [b for b in sorted(set(busiest.tolist()))[1:-1] if b > 2]
    return [(0.0, False), (0.0, True), *((knee, True) for knee in knees)]


def compute_bound_batch(coefficients: DecodeCoefficients) -> int:
    """Requests per master at which what they cost together reaches what a step costs anyway.

    On a roofline that is where arithmetic takes as long as reading the weights.
    """
    each = coefficients.request_s + coefficients.over_s
    fixed = max(coefficients.alpha_s + coefficients.many_s, coefficients.floor_s)
    return max(1, round(fixed / each)) if each > 0 else 1 << 30


def error_of(predicted: Floats, measured: Floats) -> FitError:
    """Mean and worst relative error."""
    errors = np.abs(predicted / measured - 1)
    return FitError(
        mean=round(float(errors.mean()), 5),
        worst=round(float(errors.max()), 5),
        num_points=len(measured),
    )


def _times(values: Sequence[float]) -> Floats:
    times = np.array(values, dtype=np.float64)
    if len(times) < 2 or (times <= 0).any():
        raise ValueError(f"{len(times)} points; a fit needs two or more, each above 0 s")
    return times


def _readable(value: float) -> float:
    """Six figures are more than anybody measures, and people read profiles."""
    return float(f"{value:.6g}")


def _cost(predicted: Floats, times: Floats) -> float:
    return float(np.square(predicted / times - 1).sum())


def _fit(features: Floats, times: Floats) -> tuple[Floats, float, Floats]:
    """Coefficients, floor and predictions; the floor only where it makes the fit better."""
    x = _relative(features, times)
    plain = features @ x
    floor_s = float(times.min())
    above = times > floor_s * _AT_FLOOR
    if int(above.sum()) >= features.shape[1] and not above.all():
        floor_s = float(np.median(times[~above]))
        y = _relative(features[above], times[above])
        floored = np.maximum(features @ y, floor_s)
        if _cost(floored, times) < 0.7 * _cost(plain, times):
            return y, floor_s, floored
    return x, 0.0, plain


def _relative(features: Floats, times: Floats) -> Floats:
    return nnls(features / times[:, None], np.ones_like(times))
