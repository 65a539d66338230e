"""One run on the live workers: a profile, or a check of one.

Knows: the order of measurements and what becomes of them. Does not know: who asked, how the workers
are lent, where a profile is kept.
"""

from __future__ import annotations

import datetime
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from statistics import median
from typing import Any

from loongd.profiling import grid
from loongd.profiling.bench import Bench
from loongd.profiling.facts import versions
from loongd.profiling.jobs import Job, repeat
from loongd.profiling.links import Links
from loongd.sched.sib import Sib
from loongd.sched.sib_default import ModelFacts, hardware_of
from loongd.sched.sib_fit import (
    DecodePoint,
    PrefillPoint,
    compute_bound_batch,
    fit_decode,
)
from loongd.sched.sib_fit_detail import fit_measured, refine_decode
from loongd.sched.sib_profile import DecodeFit, MigrateFit, PrefillFit, Profile

Word = dict[str, Any]
_TOO_SHORT_S = 0.003
"""Shorter steps measure the machine's mood."""
_CHECKED_PREFILLS = 12
_CHECKED_DECODES = 8
_MOST_MOVED = 16384
_LARGE_SHARE = 0.9
"""Of a profile's progress, for all but the small steps at its end."""
_LAUNCH_BLOCK_TOKENS = 128
"""Of each member in a block, so that the queries of small chunks travel and not their keys."""
_LEAST_BATCH = 4
"""Requests of a master that are measured however long they take."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled: the model, the device as profiles name it, and the limits of requests."""

    facts: ModelFacts
    device: str
    dtype: str
    tp: int
    max_tokens: int


@dataclass(slots=True)
class _Found:
    """What a profile has so far; `points` are the measured steps, for those who fit anew;
    `longest` and `steps` are of each degree of parallelism."""

    prefill: list[PrefillFit]
    decode: list[DecodeFit]
    points: list[Word]
    longest: dict[int, int]
    steps: dict[int, list[PrefillPoint]]


class Session:
    """One run on one bench."""

    def __init__(self, bench: Bench, effort: grid.Effort, seed: int) -> None:
        """`seed` selects what a check measures."""
        self._bench = bench
        self._effort = effort
        self._seed = seed
        self._limit = 0
        self._longest = 0
        self._max_batch = 0

    # ---- a profile -----------------------------------------------------------------------------

    async def profile(self, subject: Subject, *, quick: bool) -> AsyncGenerator[Word, None]:
        """Progress, then `{"made": Profile, "points": [...]}`."""
        dops = _dops(len(self._bench.instances))
        found = _Found([], [], [], {}, {})
        links = Links(self._bench, {})
        for number, dop in enumerate(dops):
            async for word in self._profile_dop(dop, found):
                within = _within(word, number, len(dops))
                yield within | {"fraction": _LARGE_SHARE * within["fraction"]}
        # Last of all: what the host needs falls during a profile; see `sched.sib_fit_detail`.
        for number, dop in enumerate(dops):
            async for done in self._profile_launches(dop, found):
                at = _LARGE_SHARE + (1 - _LARGE_SHARE) * (number + done) / len(dops)
                yield {"stage": f"dop {dop}: launches", "fraction": at}
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
        yield {"made": _profile(subject, found, links, quick=quick), "points": found.points}

    async def _profile_dop(self, dop: int, found: _Found) -> AsyncGenerator[Word, None]:
        async for _ in self._warm_up(dop):
            yield {"stage": f"dop {dop}: warm-up", "fraction": 0.0}
        bench = self._bench
        sizes = grid.prefill_sizes(
            self._longest,
            bench.block_tokens,
            self._most_cached,
            limit=self._limit,
            padded_sizes=self._padded_sizes(dop),
        )
        jobs = [self._prefill_job(items) for items in sizes]
        async for done in repeat(jobs, self._effort):
            yield {"stage": f"dop {dop}: prefill", "fraction": 0.7 * done}
        found.longest[dop] = self._longest
        found.steps[dop] = _keep(found, "prefill", dop, sizes, jobs)
        masters = _masters(dop)
        for number, num_masters in enumerate(masters):
            async for done in self._profile_decode(dop, num_masters, found):
                at = 0.7 + 0.3 * (number + done) / len(masters)
                yield {"stage": f"dop {dop}: decode", "fraction": at}
        bench.clear()

    async def _profile_launches(self, dop: int, found: _Found) -> AsyncGenerator[float, None]:
        """Small steps of a group, over little KV; then its prefill fit."""
        bench, longest = self._bench, found.longest[dop]
        bench.group(dop)
        await bench.fill(
            max(dop, min(_LAUNCH_BLOCK_TOKENS * dop, longest // grid.NUM_BLOCKS)), longest
        )
        sizes = grid.launch_sizes(longest, bench.block_tokens, bench.max_tokens, dop)
        jobs = [self._prefill_job(items) for items in sizes]
        async for done in repeat(jobs, self._effort):
            yield done
        bench.clear()
        launches = _keep(found, "launch", dop, sizes, jobs)
        fit = fit_measured(dop, found.steps[dop], launches, self._padded_sizes(dop))
        found.prefill.append(fit)

    def _padded_sizes(self, dop: int) -> tuple[int, ...]:
        """New tokens to which a group's small steps are padded."""
        return self._bench.padded_sizes if dop == 1 else ()

    async def _profile_decode(
        self, dop: int, num_masters: int, found: _Found
    ) -> AsyncGenerator[float, None]:
        bench = self._bench
        most = max(self._max_batch, _LEAST_BATCH * num_masters)
        sizes = grid.decode_sizes(most, num_masters, self._most_blocks)
        jobs = [self._decode_job(size, num_masters) for size in sizes]
        async for done in repeat(jobs, self._effort):
            yield done
        points = [
            DecodePoint(size.batch, bench.kv_tokens(size.blocks), job.typical_s)
            for size, job in zip(sizes, jobs, strict=True)
        ]
        fit = fit_decode(dop, num_masters, points)
        found.decode.append(refine_decode(fit, points, grid.levels(bench.block_tokens, dop)))
        what = {"phase": "decode", "dop": dop, "num_masters": num_masters}
        found.points += [
            what
            | {"batch": p.batch, "kv_tokens": p.kv_tokens, "seconds": p.elapsed_s}
            | {"level": sum(size.blocks) * bench.block_tokens // dop}
            for size, p in zip(sizes, points, strict=True)
        ]

    # ---- a check -------------------------------------------------------------------------------

    async def check(self, profile: Profile) -> AsyncGenerator[Word, None]:
        """Progress, then `{"check": ...}`: predictions beside measurements of unseen batches."""
        sib = Sib(profile)
        dops = [fit.dop for fit in profile.prefill if fit.dop <= len(self._bench.instances)]
        points: list[Word] = []
        for number, dop in enumerate(dops):
            async for word in self._check_dop(sib, dop, points):
                yield _within(word, number, len(dops))
        yield {"stage": "done", "fraction": 1.0}
        noise = median(point.pop("spread") for point in points) if points else 0.0
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
                "migrate": _migrate_facts(profile),
            }
        }

    async def _check_dop(
        self, sib: Sib, dop: int, points: list[Word]
    ) -> AsyncGenerator[Word, None]:
        async for _ in self._warm_up(dop):
            yield {"stage": f"dop {dop}: warm-up", "fraction": 0.0}
        longest = min(self._longest, _reach(sib.profile, dop))
        sizes = grid.random_prefills(
            longest, self._bench.block_tokens, self._most_cached, self._seed, _CHECKED_PREFILLS
        )
        jobs = [self._prefill_job(items) for items in sizes]
        async for done in repeat(jobs, self._effort):
            yield {"stage": f"dop {dop}: prefill", "fraction": 0.7 * done}
        for items, job in zip(sizes, jobs, strict=True):
            _add(points, sib.prefill_s(dop, items), job, phase="prefill", dop=dop, items=items)
        async for done in self._check_decode(sib, dop, points):
            yield {"stage": f"dop {dop}: decode", "fraction": 0.7 + 0.3 * done}
        self._bench.clear()

    async def _check_decode(
        self, sib: Sib, dop: int, points: list[Word]
    ) -> AsyncGenerator[float, None]:
        """Batches of each profiled number of masters, all in one set of rounds."""
        jobs: list[tuple[Word, Job]] = []
        for num_masters in _masters(dop):
            most = min(self._max_batch, _largest_batch(sib.profile, dop))
            seed = self._seed + num_masters
            for size in grid.random_decodes(
                most, num_masters, self._most_blocks, seed, _CHECKED_DECODES
            ):
                what = {
                    "dop": dop,
                    "num_masters": num_masters,
                    "batch": size.batch,
                    "kv_tokens": self._bench.kv_tokens(size.blocks),
                }
                jobs.append((what, self._decode_job(size, num_masters)))
        async for done in repeat([job for _, job in jobs], self._effort):
            yield done
        for what, job in jobs:
            _add(points, sib.decode_s(**what), job, phase="decode", **what)

    # ---- inside --------------------------------------------------------------------------------

    @property
    def _most_cached(self) -> int:
        """Cached tokens that leave room for the longest chunk."""
        return max(0, self._bench.max_tokens - max(self._longest // 2, 16))

    @property
    def _most_blocks(self) -> int:
        """Blocks that a decoding request can read."""
        return max(1, (self._bench.max_tokens - 1) // self._bench.block_tokens)

    async def _warm_up(self, dop: int) -> AsyncGenerator[None, None]:
        """Find the longest prompt and the largest decode batch that are worth timing, and fill the
        pool with what steps read; yields now and then."""
        yield
        bench, effort = self._bench, self._effort
        bench.group(dop)
        room = bench.pool_tokens * dop * 2 // 5
        self._limit = min(bench.max_tokens, room)
        self._longest, took_s = await self._find_longest(self._limit)
        yield
        fill_tokens = min(room, int(self._longest * effort.fill_s / took_s))
        most = min(fill_tokens // grid.NUM_BLOCKS, bench.max_tokens - 1)
        await bench.fill(max(most, dop, 1), self._longest)
        self._max_batch = 1
        while self._max_batch < effort.max_batch:
            yield
            twice = (0,) * (2 * self._max_batch)
            elapsed_s = min([await bench.decode(num_masters=1, blocks=twice) for _ in range(2)])
            if elapsed_s > effort.max_decode_s:
                break
            self._max_batch *= 2

    async def _find_longest(self, limit: int) -> tuple[int, float]:
        """The longest prompt worth timing, and the seconds that it takes."""
        bench = self._bench
        tokens = min(32, limit)
        await bench.prefill([(0, tokens)])
        while True:
            elapsed_s = min([await bench.prefill([(0, tokens)]) for _ in range(2)])
            if 2 * elapsed_s > self._effort.max_step_s or tokens >= limit:
                return tokens, elapsed_s
            tokens = min(2 * tokens, limit)

    def _prefill_job(self, items: grid.Items) -> Job:
        return Job(lambda: self._bench.prefill(items))

    def _decode_job(self, size: grid.DecodeSize, num_masters: int) -> Job:
        return Job(lambda: self._bench.decode(num_masters=num_masters, blocks=size.blocks))


def _keep(
    found: _Found, phase: str, dop: int, sizes: list[grid.Items], jobs: list[Job]
) -> list[PrefillPoint]:
    """Measured steps as points for a fit; with all their times among what is found."""
    found.points += [
        {
            "phase": phase,
            "dop": dop,
            "items": items,
            "seconds": job.typical_s,
            "times_s": [round(s, 5) for s in job.times],
        }
        for items, job in zip(sizes, jobs, strict=True)
    ]
    return [PrefillPoint(items, job.typical_s) for items, job in zip(sizes, jobs, strict=True)]


def _within(word: Word, number: int, count: int) -> Word:
    """Progress of one of several equal parts as progress of all."""
    return word | {"fraction": (number + word["fraction"]) / count}


def _add(points: list[Word], predicted_s: float, job: Job, **what: Any) -> None:
    measured_s = job.typical_s
    if measured_s < _TOO_SHORT_S:
        return
    error = abs(predicted_s / measured_s - 1)
    times = {"predicted_s": predicted_s, "measured_s": measured_s, "error": error}
    points.append({**what, **times, "spread": grid.spread(job.times)})


def _mean(points: list[Word]) -> float:
    return sum(point["error"] for point in points) / len(points) if points else 0.0


def _dops(num_instances: int) -> list[int]:
    """All degrees up to four, then powers of two and the largest."""
    wanted = {*range(1, 5), *(1 << i for i in range(3, 10)), num_instances}
    return sorted(dop for dop in wanted if dop <= num_instances)


def _masters(dop: int) -> list[int]:
    return sorted({1, dop})


def _reach(profile: Profile, dop: int) -> int:
    """The longest single prompt inside the profiled range."""
    return next(fit.max_tokens for fit in profile.prefill if fit.dop == dop)


def _largest_batch(profile: Profile, dop: int) -> int:
    """The largest batch inside the profiled range of every number of masters."""
    return min((fit.max_batch for fit in profile.decode if fit.dop == dop), default=1)


def _migrate_facts(profile: Profile) -> Word:
    """What a check says of moving KV: it is shown, not measured again."""
    fit = profile.migrate
    return {
        "alpha_s": fit.alpha_s,
        "token_s": fit.token_s,
        "bytes_per_s": profile.link_bytes_per_s,
        "num_links": len(fit.links),
        "compute_bound_batch": profile.compute_bound_batch,
        "max_batch": max(fit.max_batch for fit in profile.decode),
    }


def _profile(subject: Subject, found: _Found, links: Links, *, quick: bool) -> Profile:
    facts = subject.facts
    hardware = hardware_of(subject.device)
    alone = next(fit for fit in found.decode if fit.dop == 1)
    source = f"measured on these workers ({'quick' if quick else 'full'})"
    if links.points:
        migrate = links.fit(facts.kv_bytes_per_token)
        bytes_per_s = median(link.bytes_per_s for link in migrate.links)
    else:
        source += "; migration and link bandwidth derived from constants of the device"
        bytes_per_s = hardware.link_bytes
        migrate = MigrateFit(
            alpha_s=hardware.exchange_s * facts.num_layers,
            token_s=facts.kv_bytes_per_token / bytes_per_s,
        )
    return Profile(
        model=facts.name,
        shape=facts.key,
        device=subject.device,
        tp=subject.tp,
        dtype=subject.dtype,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=source,
        measured=True,
        prefill=found.prefill,
        decode=found.decode,
        migrate=migrate,
        compute_bound_batch=compute_bound_batch(alone),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        link_bytes_per_s=bytes_per_s,
        versions=versions(),
    )
