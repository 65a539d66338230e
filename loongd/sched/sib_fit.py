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
_STEPS_POINTS = 8
_STEPS_BATCHES = 5
"""Fewer are better followed by a line."""
_MUST_SAVE = 0.7
"""Steps follow noise too: they must be better than a line by more than that."""
_BISECTIONS = 80
_NEGLIGIBLE = 1e-6


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
    counts = set(features[:, 1].tolist())
    # What all steps have in common is alpha's; and few points would take anything for a jump.
    features[:, 1] *= len(counts) > 1
    features[:, 4] *= len(counts) > 2 and len(points) >= _STEPS_POINTS
    x, floor_s, predicted = _fit(features, times)
    coefficients = Coefficients(
        alpha_s=_readable(x[0]),
        item_s=_readable(x[1]),
        beta_s=_readable(x[2]),
        gamma_s=_readable(x[3]),
        many_s=_readable(x[4]),
        floor_s=_readable(floor_s),
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
    master, or steps where enough batches were measured. Raises ValueError without enough points."""
    busiest = np.array([ceil(point.batch / num_masters) for point in points], dtype=np.int64)
    kv = np.array([point.kv_tokens / dop for point in points], dtype=np.float64)
    times = _times([point.elapsed_s for point in points])
    x, floor_s, predicted = _fit(np.stack([np.ones_like(kv), busiest, kv], axis=1), times)
    coefficients = DecodeCoefficients(
        alpha_s=_readable(x[0]),
        request_s=_readable(x[1]),
        kv_token_s=_readable(x[2]),
        floor_s=_readable(floor_s),
    )
    if len(points) >= _STEPS_POINTS and len(set(busiest.tolist())) >= _STEPS_BATCHES:
        stepped = _fit_steps(busiest, kv, times)
        found = np.array([stepped.alpha_s + stepped.extra_s(int(b)) for b in busiest])
        found += stepped.kv_token_s * kv
        if _cost(found, times) + _NEGLIGIBLE < _MUST_SAVE * _cost(predicted, times):
            coefficients, predicted = stepped, found
    return DecodeFit(
        dop=dop,
        num_masters=num_masters,
        coefficients=coefficients,
        max_batch=max(point.batch for point in points),
        max_kv_tokens=max(point.kv_tokens for point in points),
        error=error_of(predicted, times),
    )


def _fit_steps(busiest: npt.NDArray[np.int64], kv: Floats, times: Floats) -> DecodeCoefficients:
    """The best cost of a KV token, with the best non-falling times of each batch beside it.

    Both together minimise the squared relative errors: given the cost of a token, the times are an
    isotonic regression, and what is left of the errors is convex in the cost.
    """
    low, high = 0.0, float((times / np.maximum(kv, 1.0)).min())
    for _ in range(_BISECTIONS):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if _steps_cost(busiest, kv, times, left) <= _steps_cost(busiest, kv, times, right):
            high = right
        else:
            low = left
    batches, levels = _levels(busiest, kv, times, low)
    late = int(np.searchsorted(batches, batches[-1] / 4))
    rise = (levels[-1] - levels[late]) / (batches[-1] - batches[late])
    extras = (levels - levels[0]).tolist()
    return DecodeCoefficients(
        alpha_s=_readable(levels[0]),
        request_s=_readable(rise),
        kv_token_s=_readable(low),
        steps=tuple((b, _readable(s)) for b, s in zip(batches.tolist(), extras, strict=True)),
    )


def _steps_cost(
    busiest: npt.NDArray[np.int64], kv: Floats, times: Floats, kv_token_s: float
) -> float:
    batches, levels = _levels(busiest, kv, times, kv_token_s)
    return _cost(levels[np.searchsorted(batches, busiest)] + kv_token_s * kv, times)


def _levels(
    busiest: npt.NDArray[np.int64], kv: Floats, times: Floats, kv_token_s: float
) -> tuple[npt.NDArray[np.int64], Floats]:
    """Each batch and its time without KV, never falling (pool adjacent violators)."""
    batches = np.unique(busiest)
    blocks: list[tuple[float, float, int]] = []  # level, weight, batches
    for batch in batches:
        here = busiest == batch
        weights = 1 / np.square(times[here])
        total = float(weights.sum())
        level = float((weights * (times[here] - kv_token_s * kv[here])).sum()) / total
        blocks.append((max(level, 0.0), total, 1))
        while len(blocks) > 1 and blocks[-1][0] < blocks[-2][0]:
            (a, weight_a, count_a), (b, weight_b, count_b) = blocks[-2:]
            weight = weight_a + weight_b
            blocks[-2:] = [((a * weight_a + b * weight_b) / weight, weight, count_a + count_b)]
    return batches, np.repeat([b[0] for b in blocks], [b[2] for b in blocks])


def compute_bound_batch(coefficients: DecodeCoefficients) -> int:
    """Requests per master at which what they cost together reaches what a step costs anyway.

    On a roofline that is where arithmetic takes as long as reading the weights.
    """
    each = coefficients.request_s + coefficients.over_s
    fixed = max(coefficients.alpha_s, coefficients.floor_s)
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
