"""Fitting coefficients to measured step times.

Knows: non-negative least squares for a handful of unknowns, on relative errors, and the
formulas of `sched.sib_profile`. Does not know: how the times were measured.

Relative errors, because a step of 5 ms mispredicted by 5 ms hurts more than one of 5 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import numpy.typing as npt

from loongd.sched.sib_profile import (
    Coefficients,
    DecodeCoefficients,
    DecodeFit,
    FitError,
    MigrateFit,
    PrefillFit,
)

Floats = npt.NDArray[np.float64]
_AT_FLOOR = 1.15
"""Steps within 15 % of the shortest may be held up by the floor, not by their work."""
_NNLS_TOLERANCE = 1e-10
_NNLS_ROUNDS = 3
_TINY = 1e-14
MUST_SAVE = 0.7
"""A finer description is kept where it leaves less than such a part of the squared errors."""
_HUBER = 2.0
"""Errors beyond so many times the median one count linearly; those below `_HUBER_LEAST` never."""
_HUBER_LEAST = 0.01
_HUBER_ROUNDS = 4
_JUMP_POINTS = 8
"""Fewer points would take anything for a jump."""
_LATE = 4
"""Batches above one of so many parts of the largest tell what one request more costs there."""


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """A measured prefill step; `items` are (cached, new) tokens."""

    items: tuple[tuple[int, int], ...]
    elapsed_s: float

    @property
    def features(self) -> tuple[float, float, float, float, float]:
        """1, requests, new tokens, squared tokens, whether there are several requests."""
        new = sum(count for _, count in self.items)
        square = sum(count * (count + 2 * cached) for cached, count in self.items)
        several = float(len(self.items) > 1)
        return (1.0, float(len(self.items)), float(new), float(square), several)


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """A measured decode step of `batch` requests that read `kv_tokens` altogether."""

    batch: int
    kv_tokens: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class MigratePoint:
    """A measured move of `tokens` from one instance to another."""

    tokens: int
    elapsed_s: float


def nnls(a: Floats, b: Floats) -> Floats:
    """The x >= 0 that minimises |a x - b|, by Lawson and Hanson's active sets (1974).

    a is (rows, unknowns), b is (rows,). The unknown whose growth helps most becomes free; those
    that the free ones' least squares would make negative become zero again.
    """
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0] = 1.0
    scaled = a / scale
    x = np.zeros(a.shape[1])
    free = np.zeros(a.shape[1], dtype=bool)
    enough = _NNLS_TOLERANCE * max(1.0, float(np.linalg.norm(b)))
    for _ in range(_NNLS_ROUNDS * a.shape[1]):
        gain = np.where(free, 0.0, scaled.T @ (b - scaled @ x))
        if gain.max() <= enough:
            break
        free[int(gain.argmax())] = True
        x = _shrink(scaled, b, x, free)
    result: Floats = x / scale
    return result


def robust_nnls(a: Floats, b: Floats) -> Floats:
    """`nnls` on which no row that the others contradict has much influence: Huber's loss, by
    weights from the errors of the fit before (Holland and Welsch, 1977)."""
    x = nnls(a, b)
    for _ in range(_HUBER_ROUNDS):
        errors = np.abs(a @ x - b)
        allowed = max(_HUBER * float(np.median(errors)), _HUBER_LEAST)
        weights = np.sqrt(np.minimum(1.0, allowed / np.maximum(errors, _TINY)))
        x = nnls(a * weights[:, None], b * weights)
    return x


def _shrink(a: Floats, b: Floats, x: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """The least squares of the free unknowns; those in the way of it become zero and not `free`."""
    while free.any():
        wanted = np.zeros_like(x)
        wanted[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
        below = free & (wanted <= 0)
        if not below.any():
            return wanted
        far = float((x[below] / np.maximum(x[below] - wanted[below], _TINY)).min())
        x = x + far * (wanted - x)
        free &= x > _TINY
        x = np.where(free, x, 0.0)
    return np.zeros_like(x)


def fit_prefill(dop: int, points: Sequence[PrefillPoint]) -> PrefillFit:
    """Non-negative prefill coefficients of one dop. Raises ValueError without enough points."""
    features = np.array([point.features for point in points], dtype=np.float64)
    times = _times([point.elapsed_s for point in points])
    counts = set(features[:, 1].tolist())
    # What all steps have in common is alpha's.
    features[:, 1] *= len(counts) > 1
    features[:, 4] *= len(counts) > 2 and len(points) >= _JUMP_POINTS
    x, floor_s, predicted = _fit(features, times)
    coefficients = Coefficients(
        alpha_s=readable(x[0]),
        item_s=readable(x[1]),
        beta_s=readable(x[2]),
        gamma_s=readable(x[3]),
        many_s=readable(x[4]),
        floor_s=readable(floor_s),
    )
    return PrefillFit(
        dop=dop,
        coefficients=coefficients,
        max_tokens=int(features[:, 2].max()),
        max_square=int(features[:, 3].max()),
        max_items=int(max(counts)),
        error=error_of(predicted, times),
    )


def fit_decode(dop: int, num_masters: int, points: Sequence[DecodePoint]) -> DecodeFit:
    """Non-negative decode coefficients of one (dop, masters): a line in the requests of the busiest
    master. Raises ValueError without enough points."""
    busiest = np.array([ceil(point.batch / num_masters) for point in points], dtype=np.int64)
    kv = np.array([point.kv_tokens / dop for point in points], dtype=np.float64)
    times = _times([point.elapsed_s for point in points])
    x, floor_s, predicted = _fit(np.stack([np.ones_like(kv), busiest, kv], axis=1), times)
    coefficients = DecodeCoefficients(
        alpha_s=readable(x[0]),
        request_s=readable(x[1]),
        kv_token_s=readable(x[2]),
        floor_s=readable(floor_s),
    )
    return DecodeFit(
        dop=dop,
        num_masters=num_masters,
        coefficients=coefficients,
        max_batch=max(point.batch for point in points),
        max_kv_tokens=max(point.kv_tokens for point in points),
        error=error_of(predicted, times),
    )


def fit_migrate(points: Sequence[MigratePoint]) -> MigrateFit:
    """Seconds of a move: a constant, and so much a token. Raises ValueError without enough
    points."""
    times = _times([point.elapsed_s for point in points])
    features = np.array([(1.0, point.tokens) for point in points], dtype=np.float64)
    x = _relative(features, times)
    return MigrateFit(
        alpha_s=readable(x[0]), token_s=readable(x[1]), error=error_of(features @ x, times)
    )


def compute_bound_batch(fit: DecodeFit) -> int:
    """Requests per master at which what they cost together reaches what a step costs anyway.

    On a roofline that is where arithmetic takes as long as reading the weights. With a grid, a
    request costs what it does among the largest batches.
    """
    formula, grid = fit.coefficients, fit.grid
    each = formula.request_s + formula.over_s
    fixed = max(formula.alpha_s, formula.floor_s)
    if grid is not None:
        fixed, last = grid.times_s[0][0], grid.batches[-1]
        late = next(i for i, batch in enumerate(grid.batches) if batch * _LATE >= last)
        if grid.batches[late] < last:
            rise = grid.times_s[-1][0] - grid.times_s[late][0]
            each = rise / (last - grid.batches[late])
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


def readable(value: float) -> float:
    """Six figures are more than anybody measures, and people read profiles."""
    return float(f"{value:.6g}")


def cost(predicted: Floats, times: Floats) -> float:
    """What a fit minimises: the sum of the squared relative errors."""
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
        if cost(floored, times) < MUST_SAVE * cost(plain, times):
            return y, floor_s, floored
    return x, 0.0, plain


def _relative(features: Floats, times: Floats) -> Floats:
    return nnls(features / times[:, None], np.ones_like(times))
