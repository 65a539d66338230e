"""One run on the live workers: a profile, or a check of one.

Knows: the order of measurements and what becomes of them. Does not know: who asked, how the workers
are lent, where a profile is kept.
"""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from loongd.profiling import grid
from loongd.profiling.bench import Bench
from loongd.profiling.jobs import Job, burst, repeat
from loongd.profiling.links import Links
from loongd.profiling.made import Subject, make_profile, migrate_facts
from loongd.profiling.parts import Part, dops_of, masters_of, parts_of
from loongd.sched.sib import Sib
from loongd.sched.sib_fit import (
    DecodePoint,
    PrefillPoint,
    fit_decode,
)
from loongd.sched.sib_fit_detail import fit_measured
from loongd.sched.sib_fit_grid import refine_decode
from loongd.sched.sib_profile import DecodeFit, PrefillFit, Profile

Word = dict[str, Any]
_TOO_SHORT_S = 0.003
"""Shorter steps measure the machine's mood."""
_CHECKED_PREFILLS = 12
_CHECKED_DECODES = 8
_MOST_MOVED = 16384
_LEAST_BATCH = 4
"""Requests of a master that are measured however long they take."""


@dataclass(slots=True)
class _Found:
    """What a profile has so far; `points` are the measured steps, for those who fit anew."""

    prefill: list[PrefillFit]
    decode: list[DecodeFit]
    points: list[Word]
    spreads: list[float]
    """How much repetitions of each step differ (`grid.spread`)."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Decode steps of one size in a row, and what it was asked of them."""

    size: grid.DecodeSize
    num_masters: int
    kv_tokens: int
    job: Job


class Session:
    """One run on one bench."""

    def __init__(
        self,
        bench: Bench,
        effort: grid.Effort,
        seed: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seed` selects what a check measures."""
        self._bench = bench
        self._effort = effort
        self._seed = seed
        self._clock = clock
        self._limit = 0
        self._longest = 0
        self._max_batch = 0

    # ---- a profile -----------------------------------------------------------------------------

    async def profile(self, subject: Subject, *, quick: bool) -> AsyncGenerator[Word, None]:
        """Progress, then `{"made": Profile, "points": [...]}`."""
        dops = dops_of(len(self._bench.instances))
        found = _Found([], [], [], [])
        links = Links(self._bench, {})
        for part in parts_of(dops, self._effort, self._clock()):
            async for word in self._profile_dop(part, found):
                yield part.within(word)
        if len(self._bench.instances) > 1:
            most = min(self._longest, _MOST_MOVED, self._bench.pool_tokens // 3)
            async for _ in links.measure(most):
                yield {"stage": "migration", "fraction": 1.0}
            found.points += [
                {"phase": "migrate", "instances": pair, "tokens": p.tokens, "seconds": p.elapsed_s}
                for pair, points in links.points.items()
                for p in points
            ]
        yield {"stage": "done", "fraction": 1.0}
        yield {
            "made": make_profile(
                subject,
                found.prefill,
                found.decode,
                links,
                quick=quick,
                noise=_noise(found.spreads),
            ),
            "points": found.points,
        }

    async def _profile_dop(self, part: Part, found: _Found) -> AsyncGenerator[Word, None]:
        """All steps of a group, in the same rounds, and the fits of their times."""
        dop = part.dop
        async for word in self._warm_up(part):
            yield word
        bench, replays = self._bench, self._bench.padded_sizes
        sizes = grid.prefill_sizes(
            self._longest,
            bench.block_tokens,
            self._most_cached,
            limit=self._limit,
            padded_sizes=replays.prompts,
        )
        small = grid.launch_sizes(self._longest, bench.block_tokens, bench.max_tokens, dop, replays)
        prefills, launches = ([(s, self._prefill_job(s)) for s in of] for of in (sizes, small))
        rows = [
            self._row(size, num_masters)
            for num_masters in masters_of(dop)
            for size in grid.decode_sizes(
                max(self._max_batch, _LEAST_BATCH * num_masters), num_masters, self._most_blocks
            )
        ]
        jobs = [job for _, job in (*prefills, *launches)] + [row.job for row in rows]
        async for word in self._measure(jobs, part):
            yield word
        bench.clear()
        found.spreads += [grid.spread(job.times) for job in jobs if job.typical_s >= _TOO_SHORT_S]
        found.prefill.append(
            fit_measured(
                dop,
                _keep(found, "prefill", dop, prefills),
                _keep(found, "launch", dop, launches),
                replays.prompts,
                replays.chunks,
            )
        )
        for num_masters in masters_of(dop):
            self._fit_decode(dop, num_masters, rows, found)

    def _fit_decode(self, dop: int, num_masters: int, rows: list[_Row], found: _Found) -> None:
        block_tokens = self._bench.block_tokens
        mine = [row for row in rows if row.num_masters == num_masters]
        points = [DecodePoint(row.size.batch, row.kv_tokens, row.job.typical_s) for row in mine]
        fit = fit_decode(dop, num_masters, points)
        found.decode.append(refine_decode(fit, points, grid.levels(block_tokens, dop)))
        found.points += [
            {
                "phase": "decode",
                "dop": dop,
                "num_masters": num_masters,
                "batch": row.size.batch,
                "kv_tokens": row.kv_tokens,
                "seconds": row.job.typical_s,
                "times_s": _rounded(row.job.times),
                "level": sum(row.size.blocks) * block_tokens // dop,
            }
            for row in mine
        ]

    # ---- a check -------------------------------------------------------------------------------

    async def check(self, profile: Profile) -> AsyncGenerator[Word, None]:
        """Progress, then `{"check": ...}`: predictions beside measurements of unseen batches."""
        sib = Sib(profile)
        dops = [fit.dop for fit in profile.prefill if fit.dop <= len(self._bench.instances)]
        points: list[Word] = []
        for part in parts_of(dops, self._effort, self._clock()):
            async for word in self._check_dop(sib, part, points):
                yield part.within(word)
        yield {"stage": "done", "fraction": 1.0}
        noise = _noise([point.pop("spread") for point in points])
        yield {
            "check": {
                "num_points": len(points),
                "mean": _mean(points),
                "worst": max((point["error"] for point in points), default=0.0),
                "noise": noise,
                "points": points,
                "source": profile.source,
                "date": profile.date,
                "seed": self._seed,
                "migrate": migrate_facts(profile),
                "doubt": profile.doubt,
            }
        }

    async def _check_dop(
        self, sib: Sib, part: Part, points: list[Word]
    ) -> AsyncGenerator[Word, None]:
        """Unseen batches, all in the same rounds as in a profile."""
        bench, profile, dop = self._bench, sib.profile, part.dop
        async for word in self._warm_up(part, _most_read(profile, dop)):
            yield word
        longest = min(self._longest, _reach(profile, dop))
        sizes = grid.random_prefills(
            longest, bench.block_tokens, self._most_cached, self._seed, _CHECKED_PREFILLS
        )
        prefills = [(items, self._prefill_job(items)) for items in sizes]
        most = min(self._max_batch, _largest_batch(profile, dop))
        rows = [
            self._row(size, num_masters)
            for num_masters in masters_of(dop)
            for size in grid.random_decodes(
                most, num_masters, self._most_blocks, self._seed + num_masters, _CHECKED_DECODES
            )
        ]
        jobs = [job for _, job in prefills] + [row.job for row in rows]
        async for word in self._measure(jobs, part):
            yield word
        bench.clear()
        for items, job in prefills:
            _add(points, sib.prefill_s(dop, items), job, phase="prefill", dop=dop, items=items)
        for row in rows:
            what = {
                "dop": dop,
                "num_masters": row.num_masters,
                "batch": row.size.batch,
                "kv_tokens": row.kv_tokens,
            }
            _add(points, sib.decode_s(**what), row.job, phase="decode", **what)

    # ---- inside --------------------------------------------------------------------------------

    @property
    def _most_cached(self) -> int:
        """Cached tokens that leave room for the longest chunk."""
        return max(0, self._bench.max_tokens - max(self._longest // 2, 16))

    @property
    def _most_blocks(self) -> int:
        """Blocks that a decoding request can read."""
        room = self._bench.max_tokens - self._effort.row_steps
        return max(1, room // self._bench.block_tokens)

    async def _measure(self, jobs: Sequence[Job], part: Part) -> AsyncGenerator[Word, None]:
        limit_s = max(part.ends_s - self._clock(), _TOO_SHORT_S)
        async for done in repeat(jobs, self._effort, part.budget_s, limit_s, self._clock):
            yield {"stage": f"dop {part.dop}: steps", "fraction": done}

    async def _warm_up(
        self, part: Part, most_read: int = sys.maxsize
    ) -> AsyncGenerator[Word, None]:
        """Find the longest prompt and the largest decode batch that are worth timing, and fill the
        pool with what steps read, at most `most_read` tokens; yields now and then."""
        dop = part.dop
        word = {"stage": f"dop {dop}: warm-up", "fraction": 0.0}
        yield word
        bench, effort = self._bench, self._effort
        bench.group(dop)
        room = bench.pool_tokens * dop * 2 // 5
        self._limit = min(bench.max_tokens, room)
        self._longest, took_s = await self._find_longest(self._limit, 32)
        if effort.look_twice:
            yield word
            self._longest, took_s = await self._find_longest(self._limit, self._longest)
        yield word
        fill_tokens = min(room, int(self._longest * effort.fill_s / took_s))
        most = min(fill_tokens // grid.NUM_BLOCKS, bench.max_tokens - effort.row_steps)
        await bench.fill(max(min(most, most_read // grid.NUM_BLOCKS), dop, 1), self._longest)
        self._max_batch = 1
        while self._max_batch < effort.max_batch:
            yield word
            twice = (0,) * (2 * self._max_batch)
            if min(await bench.decode(num_masters=1, blocks=twice, num_steps=3)) > (
                effort.max_decode_s
            ):
                break
            self._max_batch *= 2

    async def _find_longest(self, limit: int, least: int) -> tuple[int, float]:
        """The longest prompt worth timing, of `least` tokens or more, and the seconds that it
        takes."""
        bench, num_runs = self._bench, self._effort.min_rounds
        tokens = min(least, limit)
        await bench.prefill([(0, tokens)])
        while True:
            elapsed_s = min([await bench.prefill([(0, tokens)]) for _ in range(num_runs)])
            if 2 * elapsed_s > self._effort.max_step_s or tokens >= limit:
                return tokens, elapsed_s
            tokens = min(2 * tokens, limit)

    def _prefill_job(self, items: grid.Items) -> Job:
        return Job(lambda: burst(lambda: self._bench.prefill(items), self._effort.burst_s))

    def _row(self, size: grid.DecodeSize, num_masters: int) -> _Row:
        bench, num_steps = self._bench, self._effort.row_steps
        what: Any = {"num_masters": num_masters, "blocks": size.blocks, "num_steps": num_steps}
        kv_tokens = bench.kv_tokens(size.blocks, num_steps)
        return _Row(size, num_masters, kv_tokens, Job(lambda: bench.decode(**what)))


def _keep(
    found: _Found, phase: str, dop: int, measured: list[tuple[grid.Items, Job]]
) -> list[PrefillPoint]:
    """Measured steps as points for a fit; with all their times among what is found."""
    found.points += [
        {
            "phase": phase,
            "dop": dop,
            "items": items,
            "seconds": job.typical_s,
            "times_s": _rounded(job.times),
        }
        for items, job in measured
    ]
    return [PrefillPoint(items, job.typical_s) for items, job in measured]


def _noise(spreads: Sequence[float]) -> float:
    """How much repetitions of a step differ, typically."""
    return median(spreads) if spreads else 0.0


def _rounded(times: Sequence[float]) -> list[float]:
    return [round(s, 5) for s in times]


def _add(points: list[Word], predicted_s: float, job: Job, **what: Any) -> None:
    measured_s = job.typical_s
    if measured_s < _TOO_SHORT_S:
        return
    error = abs(predicted_s / measured_s - 1)
    times = {"predicted_s": predicted_s, "measured_s": measured_s, "error": error}
    runs = {"times_s": _rounded(job.times), "spread": grid.spread(job.times)}
    points.append({**what, **times, **runs})


def _mean(points: list[Word]) -> float:
    return sum(point["error"] for point in points) / len(points) if points else 0.0


def _reach(profile: Profile, dop: int) -> int:
    """The longest single prompt inside the profiled range."""
    return next(fit.max_tokens for fit in profile.prefill if fit.dop == dop)


def _largest_batch(profile: Profile, dop: int) -> int:
    """The largest batch inside the profiled range of every number of masters."""
    return min((fit.max_batch for fit in profile.decode if fit.dop == dop), default=1)


def _most_read(profile: Profile, dop: int) -> int:
    """The most KV tokens that the profiled steps of a group read."""
    fits = [fit for fit in profile.decode if fit.dop == dop]
    return min(
        fit.max_kv_tokens if fit.grid is None else fit.grid.kv_tokens[-1] * dop for fit in fits
    )
