"""Fitting what measurements add to the prefill formula: `sched.sib_detail` from measured steps.

Knows: how a step is told to be replayed, to be bound by its host or by its device, how the tiles of
queries are found, and how a table is drawn through noisy times without following the noise. Does
not know: how the times were measured.

Launch-bound steps are small ones that are no replays. They alone tell the host's costs, and what
other steps near that bound took is left out.

A detail is kept only where it makes the squared relative errors much smaller than the formula's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import msgspec
import numpy as np

from loongd.sched.sib_detail import (
    EARLY_CACHED_TOKENS,
    LONG_CACHED_TOKENS,
    LONG_NEW_TOKENS,
    HostCosts,
    PrefillDetail,
    SmallSteps,
    Table,
    dealt_to,
    padded,
    small_limits,
    tiled,
)
from loongd.sched.sib_fit import (
    MUST_SAVE,
    Floats,
    PrefillPoint,
    cost,
    error_of,
    fit_prefill,
    readable,
    robust_nnls,
)
from loongd.sched.sib_profile import PrefillFit

_LEAST_POINTS = 12
_LEAST_LAUNCHES = 4
"""Fewer small steps tell nothing of the host."""
_LEAST_CLEAR = 4
"""Fewer steps that are bound by the device tell nothing of it."""
_CLEAR = 1.3
"""A step that took so many times what its host needs when warm was bound by the device; a host that
was not warm yet has been seen to need 1.2 times."""
_HICCUPS = 20
"""One in so many steps may have been spoiled each time that it ran."""
_OVER = 1.05
"""A step that is foreseen to take so many times what it took is foreseen wrongly."""
_KNOT_RATIO = 1.6
"""Each row of a table has so many times the tokens of the one before."""
_SMOOTHNESS = 0.05
"""How much a change of slope costs, beside the squared relative errors."""
_USUAL = 16
"""A chunk of a long prefill is more than one of so many parts of what came before it."""
_TILES = (1, 16, 32, 64, 128, 256)
"""Numbers of queries that kernels may take at a time; the measured times say which it is."""
_HALVES = (4, 5, 6, 7)
"""Eighths of a tile that half of one may count as."""
_FIXED = 10
"""Columns of `_device_features`."""
_LAUNCHED = slice(1, 4)
"""Those that count requests and chunks: beside a host, whose launches these costs are, they would
only take up what it was slower by while larger steps were measured."""


def fit_measured(
    dop: int,
    points: Sequence[PrefillPoint],
    launches: Sequence[PrefillPoint] = (),
    prompt_sizes: Sequence[int] = (),
    chunk_sizes: Sequence[int] = (),
) -> PrefillFit:
    """The formula and, where it is called for, the detail of a profile's points; `launches` are
    small steps, which on a GPU its host holds up, unless it replays them, padded to `prompt_sizes`
    or, with cached tokens, to `chunk_sizes` (new tokens, ascending).

    LoongServe's formula (section 5.2) has one line for all lengths; see `sched.sib_detail`. Here it
    is of prompts and of chunks as a prefill has them; short chunks over much KV, which take as long
    as reading it, are left to the detail. Fewer than twelve points get no detail.
    """
    replays = _Replays.of(dop, [*points, *launches], (tuple(prompt_sizes), tuple(chunk_sizes)))
    detail, trusted = _prefill_detail(dop, replays.without(points), replays.without(launches))
    trusted = [*trusted, *replays.points]
    usual = [p for p in trusted if all(_USUAL * new >= cached for cached, new in p.items)]
    fit = fit_prefill(dop, usual)
    if len(trusted) < _LEAST_POINTS:
        return fit
    found = msgspec.structs.replace(fit, detail=detail, small=replays.small)
    times, measured = _times_of(trusted), [point.items for point in trusted]
    plain_s, found_s = (np.array([one.time_s(items) for items in measured]) for one in (fit, found))
    if cost(found_s, times) >= MUST_SAVE * cost(plain_s, times):
        return fit
    return msgspec.structs.replace(found, error=error_of(found_s, times))


@dataclass(frozen=True, slots=True)
class _Replays:
    """The ways in which steps are replayed, each with enough points to tell its times; `points` are
    those of all."""

    small: tuple[SmallSteps, ...]
    points: list[PrefillPoint]

    @classmethod
    def of(
        cls, dop: int, points: Sequence[PrefillPoint], sizes: tuple[tuple[int, ...], ...]
    ) -> _Replays:
        """`sizes` are those of prompts and those of chunks."""
        if not all(sizes):
            return cls((), [])
        small: list[SmallSteps] = []
        covered: list[PrefillPoint] = []
        left = list(points)
        for limits, of in zip(small_limits(dop, sizes[0][-1], sizes[1][-1]), sizes, strict=False):
            mine = [point for point in left if limits.covers(point.items)]
            if len(mine) >= _LEAST_POINTS:
                detail = _device_detail(dop, mine, sizes=of, dealt=limits.dealt)
                small.append(SmallSteps(limits=limits, detail=detail))
                covered += mine
            left = [point for point in left if not limits.covers(point.items)]
        # too few others would tell less alone than with these
        return cls(tuple(small), covered) if len(left) >= _LEAST_POINTS else cls((), [])

    def without(self, points: Sequence[PrefillPoint]) -> list[PrefillPoint]:
        """Those that are no replays."""
        kinds = [one.limits for one in self.small]
        return [p for p in points if not any(limits.covers(p.items) for limits in kinds)]


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
    if len(clear) < _LEAST_CLEAR:
        return alone, everything
    both = _beside(dop, host, clear, [p for p in everything if p not in clear])
    trusted = [*clear, *launches]
    if _cost_of(_device_detail(dop, trusted), trusted) < MUST_SAVE * _cost_of(both, trusted):
        return alone, everything
    return both, trusted


def _beside(
    dop: int, host: HostCosts, clear: Sequence[PrefillPoint], bound: Sequence[PrefillPoint]
) -> PrefillDetail:
    """What the device needs beside a host, from the steps that are `clear`ly bound by it. The
    others take no longer than they took: those that would are made to fit too."""
    known, left = list(clear), list(bound)
    while True:
        detail = _device_detail(dop, known, host)
        over = [
            p
            for p in left
            if detail.time_s(p.items) > _OVER * max(p.elapsed_s, host.time_s(p.items))
        ]
        if not over:
            return detail
        known += over
        left = [p for p in left if p not in over]


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
    step, item, chunk, long = robust_nnls(features / times[:, None], np.ones(len(times))).tolist()
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
    dealt: int = 1,
) -> PrefillDetail:
    """With the tiles that suit the times best, and with dearer early keys and half tiles of their
    own, if each is much better than without."""
    plain = _Blocks(LONG_NEW_TOKENS * dop, dealt=dealt)
    best = _with_blocks(points, host, sizes, plain)
    least = _cost_of(best, points)
    for early in (0, EARLY_CACHED_TOKENS * dop):
        for halves in ((0,), _HALVES):
            tried = [
                _with_blocks(
                    points,
                    host,
                    sizes,
                    _Blocks(plain.few_tokens, tile, early, tile * half // 8, dealt),
                )
                for tile, half in product(_TILES, halves)
            ]
            costs = [_cost_of(detail, points) for detail in tried]
            if min(costs) < MUST_SAVE * least:
                least = min(costs)
                best = tried[costs.index(least)]
    return best


def _with_blocks(
    points: Sequence[PrefillPoint],
    host: HostCosts | None,
    sizes: tuple[int, ...],
    blocks: _Blocks,
) -> PrefillDetail:
    work = _Work.of(points, hosted=host is not None, sizes=sizes, blocks=blocks)
    return msgspec.structs.replace(
        _detail(work.fit(), host, work.knots),
        padded_sizes=sizes,
        tile_tokens=blocks.tile_tokens,
        half_tokens=blocks.half_tokens,
        few_tokens=blocks.few_tokens,
        early_tokens=blocks.early_tokens,
        dealt=blocks.dealt,
    )


def _cost_of(detail: PrefillDetail, points: Sequence[PrefillPoint]) -> float:
    """The sum of squared relative errors, without the few largest: hiccups of the machine."""
    errors = np.array([detail.time_s(p.items) / p.elapsed_s - 1 for p in points])
    squares = np.sort(np.square(errors))
    return float(squares[: len(squares) - len(squares) // _HICCUPS].sum())


def _times_of(points: Sequence[PrefillPoint]) -> Floats:
    return np.array([point.elapsed_s for point in points], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Numbers of tokens of `sched.sib_detail`."""

    few_tokens: int
    tile_tokens: int = 1
    early_tokens: int = 0
    half_tokens: int = 0
    dealt: int = 1


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
        blocks: _Blocks,
    ) -> _Work:
        """`hosted` leaves what a request and a chunk cost beside their tokens to a host; new tokens
        are padded to `sizes`."""
        times = _times_of(points)
        totals = [padded(sizes, sum(n for _, n in point.items)) for point in points]
        new = np.array(totals, dtype=np.float64)
        knots = _knots(new, sizes)
        widths = np.diff(knots)
        parts = np.clip(new[:, None] - knots[None, :-1], 0.0, widths[None, :])
        fixed = np.array([_device_features(point, blocks) for point in points], dtype=np.float64)
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
        return robust_nnls(
            a, np.concatenate([np.ones(len(self.times)), np.zeros(len(self.smooth))])
        )


def _device_features(point: PrefillPoint, blocks: _Blocks) -> tuple[float, ...]:
    """1, requests, several, chunks, their new and their cached tokens, squares, crosses, those of
    the first new tokens and of the first cached ones."""
    items = point.items
    members = dealt_to(blocks.dealt, items)
    tile, half = members * blocks.tile_tokens, members * blocks.half_tokens
    chunks = [(cached, new, tiled(new, tile, half)) for cached, new in items if cached]
    return (
        1.0,
        float(len(items)),
        float(len(items) > 1),
        float(len(chunks)),
        float(sum(new for _, new, _ in chunks)),
        float(sum(cached for cached, _, _ in chunks)),
        float(sum(new * new for _, new in items)),
        float(sum(2 * cached * queries for cached, _, queries in chunks)),
        float(sum(2 * cached * min(queries, blocks.few_tokens) for cached, _, queries in chunks)),
        float(sum(2 * min(cached, blocks.early_tokens) * new for cached, new, _ in chunks)),
    )


def _detail(x: Floats, host: HostCosts | None, knots: Floats) -> PrefillDetail:
    fixed = map(readable, x[:_FIXED].tolist())
    step, item, many, chunk, chunk_token, cached, square, cross, few, early = fixed
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
        early_s=early,
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
