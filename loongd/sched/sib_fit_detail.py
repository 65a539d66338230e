"""Fitting what measurements add to the formulas: `sched.sib_detail` from measured steps.

Knows: how a step is told to be bound by its host or by its device, how a table is drawn through
noisy times without following the noise, and how a grid with holes is filled. Does not know: how
the times were measured.

Launch-bound steps are small ones, measured by themselves after all others, for hosts were seen to
need 15 % less once a profile was over. So they alone tell the host's costs, and what other steps
near that bound took is left out.

A detail is kept only where it makes the squared relative errors much smaller than the formula's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import msgspec
import numpy as np
import numpy.typing as npt

from loongd.sched.sib_detail import (
    LONG_CACHED_TOKENS,
    LONG_NEW_TOKENS,
    DecodeGrid,
    HostCosts,
    PrefillDetail,
    Table,
    padded,
)
from loongd.sched.sib_fit import (
    DecodePoint,
    Floats,
    PrefillPoint,
    cost,
    error_of,
    fit_prefill,
    nnls,
    readable,
)
from loongd.sched.sib_profile import DecodeFit, PrefillFit

_MUST_SAVE = 0.7
_LEAST_POINTS = 12
_LEAST_BATCHES = 5
_LEAST_LAUNCHES = 4
"""Fewer small steps tell nothing of the host."""
_CLEAR = 1.3
"""A step that took so many times what its host needs when warm was bound by the device; a host that
was not warm yet has been seen to need 1.2 times."""
_KNOT_RATIO = 1.6
"""Each row of a table has so many times the tokens of the one before."""
_SMOOTHNESS = 0.05
"""How much a change of slope costs, beside the squared relative errors."""
_USUAL = 16
"""A chunk of a long prefill is more than one of so many parts of what came before it."""
_FIXED = 9
"""Columns of `_device_features`."""
_LAUNCHED = slice(1, 4)
"""Those that count requests and chunks: beside a host, whose launches these costs are, they would
only take up what it was slower by while larger steps were measured."""


def fit_measured(
    dop: int,
    points: Sequence[PrefillPoint],
    launches: Sequence[PrefillPoint] = (),
    padded_sizes: Sequence[int] = (),
) -> PrefillFit:
    """The formula and, where it is called for, the detail of a profile's points; `launches` are
    small steps, which on a GPU its host holds up, unless it replays them padded to `padded_sizes`
    (new tokens, ascending).

    LoongServe's formula (section 5.2) has one line for all lengths; see `sched.sib_detail`. Here it
    is of prompts and of chunks as a prefill has them; short chunks over much KV, which take as long
    as reading it, are left to the detail. Fewer than twelve points get no detail.
    """
    if padded_sizes:
        trusted = [*points, *launches]
        detail = _device_detail(dop, trusted, sizes=tuple(padded_sizes))
    else:
        detail, trusted = _prefill_detail(dop, points, launches)
    usual = [p for p in trusted if all(_USUAL * new >= cached for cached, new in p.items)]
    fit = fit_prefill(dop, usual)
    if len(trusted) < _LEAST_POINTS:
        return fit
    times = _times_of(trusted)
    plain = np.array([fit.coefficients.time_s(point.items) for point in trusted])
    found = np.array([detail.time_s(point.items) for point in trusted])
    if cost(found, times) >= _MUST_SAVE * cost(plain, times):
        return fit
    return msgspec.structs.replace(fit, detail=detail, error=error_of(found, times))


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
    if cost(found, times) >= _MUST_SAVE * cost(plain, times):
        return fit
    return msgspec.structs.replace(refined, error=error_of(found, times))


# ---- prefill -------------------------------------------------------------------------------------


def _prefill_detail(
    dop: int, points: Sequence[PrefillPoint], launches: Sequence[PrefillPoint]
) -> tuple[PrefillDetail, list[PrefillPoint]]:
    """The better of one formula for all points and of a host beside a device; and the points that
    it rests on."""
    everything = [*points, *launches]
    alone = _device_detail(dop, everything)
    if len(launches) < _LEAST_LAUNCHES:
        return alone, everything
    host = _host_costs(dop, launches)
    clear = [p for p in points if p.elapsed_s > _CLEAR * host.time_s(p.items)]
    if len(clear) < _FIXED:
        return alone, everything
    both = _device_detail(dop, clear, host)
    trusted = [*clear, *launches]
    if _cost_of(_device_detail(dop, trusted), trusted) < _MUST_SAVE * _cost_of(both, trusted):
        return alone, everything
    return both, trusted


def _host_costs(dop: int, launches: Sequence[PrefillPoint]) -> HostCosts:
    long_new, long_cached = LONG_NEW_TOKENS * dop, LONG_CACHED_TOKENS * dop
    features = np.array(
        [
            (
                1.0,
                float(len(point.items)),
                float(sum(cached > 0 for cached, _ in point.items)),
                float(sum(c >= long_cached and n >= long_new for c, n in point.items)),
            )
            for point in launches
        ]
    )
    times = _times_of(launches)
    step, item, chunk, long = nnls(features / times[:, None], np.ones(len(times))).tolist()
    return HostCosts(
        step_s=readable(step),
        item_s=readable(item),
        chunk_s=readable(chunk),
        long_s=readable(long),
        long_new_tokens=long_new,
        long_cached_tokens=long_cached,
    )


def _device_detail(
    dop: int,
    points: Sequence[PrefillPoint],
    host: HostCosts | None = None,
    sizes: tuple[int, ...] = (),
) -> PrefillDetail:
    few_tokens = LONG_NEW_TOKENS * dop
    work = _Work.of(points, hosted=host is not None, sizes=sizes, few_tokens=few_tokens)
    detail = _detail(work.fit(), host, work.knots)
    return msgspec.structs.replace(detail, padded_sizes=sizes, few_tokens=few_tokens)


def _cost_of(detail: PrefillDetail, points: Sequence[PrefillPoint]) -> float:
    return cost(np.array([detail.time_s(point.items) for point in points]), _times_of(points))


def _times_of(points: Sequence[PrefillPoint]) -> Floats:
    return np.array([point.elapsed_s for point in points], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Work:
    """What the device does in each step: `_FIXED` features, and new tokens by parts of a table.

    The slopes of the table are not negative, so its times never fall; each is drawn towards its
    neighbour's by `smooth`, so that noise alone bends nothing.
    """

    device: Floats
    smooth: Floats
    times: Floats
    knots: Floats

    @classmethod
    def of(
        cls,
        points: Sequence[PrefillPoint],
        *,
        hosted: bool,
        sizes: tuple[int, ...],
        few_tokens: int,
    ) -> _Work:
        """`hosted` leaves what a request and a chunk cost beside their tokens to a host; new tokens
        are padded to `sizes`, and the first `few_tokens` of a chunk cost more."""
        times = _times_of(points)
        totals = [padded(sizes, sum(n for _, n in point.items)) for point in points]
        new = np.array(totals, dtype=np.float64)
        knots = _knots(new, sizes)
        widths = np.diff(knots)
        parts = np.clip(new[:, None] - knots[None, :-1], 0.0, widths[None, :])
        fixed = np.array(
            [_device_features(point, few_tokens) for point in points], dtype=np.float64
        )
        if hosted:
            fixed[:, _LAUNCHED] = 0.0
        order = np.argsort(new, kind="stable")
        level = np.interp(knots[1:-1], new[order], times[order])
        bends = (np.eye(len(widths), k=1) - np.eye(len(widths)))[:-1]
        bends *= (_SMOOTHNESS**0.5 * widths[:-1] / level)[:, None]
        smooth = np.concatenate([np.zeros((len(bends), fixed.shape[1])), bends], axis=1)
        return cls(np.concatenate([fixed, parts], axis=1), smooth, times, knots)

    def fit(self) -> Floats:
        """Coefficients of all columns."""
        a = np.concatenate([self.device / self.times[:, None], self.smooth])
        return nnls(a, np.concatenate([np.ones(len(self.times)), np.zeros(len(self.smooth))]))


def _device_features(point: PrefillPoint, few_tokens: int) -> tuple[float, ...]:
    """1, requests, several, chunks, their new and their cached tokens, squares, crosses, and
    those of the first new tokens."""
    items = point.items
    chunks = [(cached, new) for cached, new in items if cached]
    return (
        1.0,
        float(len(items)),
        float(len(items) > 1),
        float(len(chunks)),
        float(sum(new for _, new in chunks)),
        float(sum(cached for cached, _ in chunks)),
        float(sum(new * new for _, new in items)),
        float(sum(2 * cached * new for cached, new in items)),
        float(sum(2 * cached * min(new, few_tokens) for cached, new in items)),
    )


def _detail(x: Floats, host: HostCosts | None, knots: Floats) -> PrefillDetail:
    fixed = map(readable, x[:_FIXED].tolist())
    step, item, many, chunk, chunk_token, cached, square, cross, few = fixed
    seconds = np.concatenate([[0.0], np.cumsum(x[_FIXED:] * np.diff(knots))])
    late = len(knots) // 2
    rise = (seconds[-1] - seconds[late]) / (knots[-1] - knots[late])
    rows: Table = tuple(
        (int(place), readable(s)) for place, s in zip(knots.tolist(), seconds.tolist(), strict=True)
    )
    return PrefillDetail(
        step_s=step,
        item_s=item,
        many_s=many,
        chunk_s=chunk,
        chunk_token_s=chunk_token,
        cached_s=cached,
        square_s=square,
        cross_s=cross,
        token_s=readable(rise),
        few_s=few,
        rows=rows,
        host=host,
    )


def _knots(new: Floats, sizes: Sequence[int]) -> Floats:
    """0, and measured numbers of tokens: all that are in `sizes`, and of others those that are far
    enough apart, the largest among them."""
    places: list[float] = []
    for place in sorted(set(new.tolist()), reverse=True):
        if not places or place in sizes or places[-1] >= _KNOT_RATIO * place:
            places.append(place)
    return np.array([0.0, *places[::-1]], dtype=np.float64)


# ---- decode --------------------------------------------------------------------------------------


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
    _fill(batches, columns, filled, kv_token_s)
    rising = _rising(_rising(filled, axis=0), axis=1)
    return DecodeGrid(
        batches=tuple(batches.tolist()),
        kv_tokens=tuple(int(column) for column in columns),
        times_s=tuple(tuple(map(readable, row)) for row in rising.tolist()),
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


def _rising(values: Floats, axis: int = 0) -> Floats:
    """The nearest values that never fall along an axis, near enough: midway between the running
    maximum and the running minimum from behind."""
    up = np.maximum.accumulate(values, axis=axis)
    down = np.flip(np.minimum.accumulate(np.flip(values, axis), axis=axis), axis)
    middle: Floats = (up + down) / 2
    return middle


def _pairs(busiest: npt.NDArray[np.int64], kv: Floats) -> list[tuple[int, float]]:
    return list(zip(busiest.tolist(), kv.tolist(), strict=True))
