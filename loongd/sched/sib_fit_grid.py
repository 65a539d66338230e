"""Fitting a grid of measured decode times: `sched.sib_detail` from measured steps.

Knows: how a grid with holes is filled, and how noise is kept from making it fall. Does not know:
how the times were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec
import numpy as np
import numpy.typing as npt

from loongd.sched.sib_detail import DecodeGrid
from loongd.sched.sib_fit import MUST_SAVE, DecodePoint, Floats, cost, error_of, readable
from loongd.sched.sib_profile import DecodeFit

_LEAST_POINTS = 12
_LEAST_BATCHES = 5
_PROJECTIONS = 50
_GUESSED = 0.1
"""Weight of a time that fills a hole, beside a measured one's."""


def refine_decode(
    fit: DecodeFit, points: Sequence[DecodePoint], levels: Sequence[int]
) -> DecodeFit:
    """`fit` with a grid where its points call for it; `levels` are the KV tokens of a member near
    which they lie, ascending, the first near 0."""
    busiest = np.array([ceil(point.batch / fit.num_masters) for point in points], dtype=np.int64)
    if len(points) < _LEAST_POINTS or len(set(busiest.tolist())) < _LEAST_BATCHES:
        return fit
    kv = np.array([point.kv_tokens / fit.dop for point in points], dtype=np.float64)
    times = np.array([point.elapsed_s for point in points], dtype=np.float64)
    plain = np.array([fit.time_s(busiest=int(b), kv_tokens=k) for b, k in _pairs(busiest, kv)])
    grid = _decode_grid(busiest, kv, times, levels, fit.coefficients.kv_token_s)
    refined = msgspec.structs.replace(fit, grid=grid)
    found = np.array([refined.time_s(busiest=int(b), kv_tokens=k) for b, k in _pairs(busiest, kv)])
    if cost(found, times) >= MUST_SAVE * cost(plain, times):
        return fit
    return msgspec.structs.replace(refined, error=error_of(found, times))


def _decode_grid(
    busiest: npt.NDArray[np.int64],
    kv: Floats,
    times: Floats,
    levels: Sequence[int],
    kv_token_s: float,
) -> DecodeGrid:
    """Each point moved to the nearest level by the cost of a KV token; holes filled."""
    batches = np.unique(busiest)
    columns = np.array(levels, dtype=np.float64)
    nearest = np.abs(kv[:, None] - columns[None, :]).argmin(axis=1)
    moved = np.maximum(times + kv_token_s * (columns[nearest] - kv), 0.5 * times)
    filled = np.full((len(batches), len(columns)), np.nan)
    for row, batch in enumerate(batches):
        for column in range(len(columns)):
            here = moved[(busiest == batch) & (nearest == column)]
            if len(here):
                filled[row, column] = here.mean()
    wanted = ~np.isnan(filled).all(axis=0)
    columns, filled = columns[wanted], filled[:, wanted]
    weights = np.where(np.isnan(filled), _GUESSED, 1.0)
    _fill(batches, columns, filled, kv_token_s)
    rising = _rising(_rising(_isotonic(np.log(filled), weights), axis=0), axis=1)
    return DecodeGrid(
        batches=tuple(batches.tolist()),
        kv_tokens=tuple(int(column) for column in columns),
        times_s=tuple(tuple(map(readable, row)) for row in np.exp(rising).tolist()),
    )


def _fill(
    batches: npt.NDArray[np.int64], columns: Floats, filled: Floats, kv_token_s: float
) -> None:
    """Fill holes: the first column by the cost of KV, others by what KV costs other batches."""
    for row in range(len(batches)):
        if np.isnan(filled[row, 0]):
            first = int(np.flatnonzero(~np.isnan(filled[row]))[0])
            guess = filled[row, first] - kv_token_s * (columns[first] - columns[0])
            filled[row, 0] = max(guess, 0.5 * filled[row, first])
    places = batches.astype(np.float64)
    for column in range(1, len(columns)):
        known = ~np.isnan(filled[:, column])
        reads = filled[known, column] - filled[known, 0]
        hole = ~known
        filled[hole, column] = filled[hole, 0] + np.interp(places[hole], places[known], reads)


def _isotonic(values: Floats, weights: Floats) -> Floats:
    """The values nearest to these, by weighted squares, that fall along neither axis, near enough:
    projections on either in turn, each with what the one before took away (Dykstra, 1983). So one
    size that is slower than larger ones does not raise all of them."""
    found, taken = values, [np.zeros_like(values), np.zeros_like(values)]
    for number in range(2 * _PROJECTIONS):
        axis = number % 2
        wanted = found + taken[axis]
        lines = zip(np.moveaxis(wanted, axis, -1), np.moveaxis(weights, axis, -1), strict=True)
        found = np.moveaxis(np.stack([_pooled(line, w) for line, w in lines]), -1, axis)
        taken[axis] = wanted - found
    return found


def _pooled(values: Floats, weights: Floats) -> Floats:
    """The same for one line, exactly: neighbours that fall are pooled (Ayer and others, 1955)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, how many
    for one, weight in zip(values.tolist(), weights.tolist(), strict=True):
        pools.append((one, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, wa, na), (b, wb, nb) = pools.pop(-2), pools.pop()
            pools.append(((a * wa + b * wb) / (wa + wb), wa + wb, na + nb))
    found, _, counts = zip(*pools, strict=True)
    return np.repeat(np.array(found, dtype=np.float64), counts)


def _rising(values: Floats, axis: int = 0) -> Floats:
    """The nearest values that never fall along an axis, near enough: midway between the running
    maximum and the running minimum from behind."""
    up = np.maximum.accumulate(values, axis=axis)
    down = np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
    middle: Floats = (up + down) / 2
    return middle


def _pairs(busiest: npt.NDArray[np.int64], kv: Floats) -> list[tuple[int, float]]:
    return list(zip(busiest.tolist(), kv.tolist(), strict=True))
