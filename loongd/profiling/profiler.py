"""Runs a profile or a check on the live workers, and says how far it is.

Knows: the order of measurements and what becomes of them. Does not know: HTTP, or how the workers
are lent (an `Owner` does).

Repetitions go round by round over all points, not point by point: what else happens on the
machine for a second then spoils one repetition of many points, not all of one.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import msgspec

from loongd.errors import WorkerError
from loongd.exclusive import Exclusive
from loongd.profiling import grid, store
from loongd.profiling.bench import NUM_BLOCKS, Bench
from loongd.profiling.facts import versions
from loongd.sched.sib import Sib
from loongd.sched.sib_default import ModelFacts, hardware_of
from loongd.sched.sib_fit import (
    DecodePoint,
    PrefillPoint,
    compute_bound_batch,
    fit_decode,
    fit_prefill,
)
from loongd.sched.sib_profile import DecodeFit, MigrateFit, PrefillFit, Profile

_log = logging.getLogger(__name__)
_TOO_SHORT_S = 0.003
"""Shorter steps measure the machine's mood."""
_CHECK_SEED = 20240412
_CHECKED_PREFILLS = 9
_CHECKED_DECODES = 5


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `loongctl profile` asks for.

    Args:
        quick: fewer repetitions and shorter steps.
        check: compare the profile in force with fresh measurements; writes nothing.
        save: keep the new profile in the state directory.
    """

    quick: bool = False
    check: bool = False
    save: bool = True


class Owner(Protocol):
    """Who lends the workers."""

    def exclusive(self) -> AbstractContextManager[Exclusive]:
        """The workers, while nobody is served. Raises RequestError when they are busy."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled: the model, the device as profiles name it, and the limits of requests."""

    facts: ModelFacts
    device: str
    dtype: str
    tp: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class _Job:
    """One point: how to run it once, and its times so far."""

    run: Callable[[], Awaitable[float]]
    times: list[float]


class Profiler:
    """One profile or check at a time; who gets the workers from the owner has the turn."""

    def __init__(self, owner: Owner, sib: Sib, subject: Callable[[], Subject]) -> None:
        """A new profile goes into `sib` at once. `subject` is asked once the workers are up."""
        self._owner = owner
        self._sib = sib
        self._subject = subject

    async def run(self, request: ProfileRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Yields `{"stage", "fraction"}` again and again, in the end `{"profile", "path"}` or
        `{"check"}`. Raises RequestError when busy, WorkerError when a worker fails."""
        subject = self._subject()
        with self._owner.exclusive() as exclusive:
            bench = Bench(
                exclusive, vocab_size=subject.facts.vocab_size, max_tokens=subject.max_tokens
            )
            effort = grid.QUICK if request.quick else grid.FULL
            session = _Session(bench, effort)
            try:
                work = (
                    session.check(self._sib.profile)
                    if request.check
                    else session.profile(subject, quick=request.quick)
                )
                async for word in work:
                    if "made" in word:
                        yield self._keep(word["made"], save=request.save)
                    else:
                        yield word
            finally:
                bench.clear()
            used = await exclusive.num_used()
            if used:
                raise WorkerError(f"{used} KV slots are still used after profiling")

    def _keep(self, profile: Profile, *, save: bool) -> dict[str, Any]:
        self._sib.replace(profile)
        path = store.save(store.state_dir(os.environ), profile) if save else None
        _log.info("profiled: %s", path or "not saved")
        return {
            "profile": msgspec.to_builtins(profile),
            "path": None if path is None else str(path),
        }


class _Session:
    """One run on one bench."""

    def __init__(self, bench: Bench, effort: grid.Effort) -> None:
        self._bench = bench
        self._effort = effort

    async def profile(
        self, subject: Subject, *, quick: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Progress, then `{"made": Profile}`."""
        dops = _dops(self._bench.num_instances)
        prefill: list[PrefillFit] = []
        decode: list[DecodeFit] = []
        for number, dop in enumerate(dops):
            share = (number / len(dops), 1 / len(dops))
            async for word in self._one_dop(dop, share, prefill, decode):
                yield word
        yield {"stage": "done", "fraction": 1.0}
        yield {"made": _profile(subject, prefill, decode, quick=quick)}

    async def _one_dop(
        self,
        dop: int,
        share: tuple[float, float],
        prefill: list[PrefillFit],
        decode: list[DecodeFit],
    ) -> AsyncGenerator[dict[str, Any], None]:
        began, width = share
        yield {"stage": f"dop {dop}: warm-up", "fraction": began}
        self._bench.group(dop)
        longest = await self._longest(dop)
        await self._bench.fill(self._block_tokens(longest, dop))
        sizes = grid.prefill_sizes(longest, self._bench.block_tokens)
        jobs = [self._prefill_job(items) for items in sizes]
        async for done in self._repeat(jobs):
            yield {"stage": f"dop {dop}: prefill", "fraction": began + width * 0.7 * done}
        points = [
            PrefillPoint(items, grid.typical(job.times))
            for items, job in zip(sizes, jobs, strict=True)
        ]
        prefill.append(fit_prefill(dop, points))
        masters = _masters(dop)
        for number, num_masters in enumerate(masters):
            batches = grid.decode_sizes(self._effort.max_batch, num_masters)
            jobs = [self._decode_job(size, num_masters) for size in batches]
            async for done in self._repeat(jobs):
                at = 0.7 + 0.3 * (number + done) / len(masters)
                yield {"stage": f"dop {dop}: decode", "fraction": began + width * at}
            measured = [
                DecodePoint(size.batch, self._kv_tokens(size), grid.typical(job.times))
                for size, job in zip(batches, jobs, strict=True)
            ]
            decode.append(fit_decode(dop, num_masters, measured))
        self._bench.clear()

    async def check(self, profile: Profile) -> AsyncGenerator[dict[str, Any], None]:
        """Progress, then `{"check": ...}`: predictions beside measurements of unseen batches."""
        sib = Sib(profile)
        dops = [fit.dop for fit in profile.prefill if fit.dop <= self._bench.num_instances]
        points: list[dict[str, Any]] = []
        for number, dop in enumerate(dops):
            share = (number / len(dops), 1 / len(dops))
            async for word in self._check_dop(sib, dop, share, points):
                yield word
        yield {"stage": "done", "fraction": 1.0}
        errors = [point["error"] for point in points]
        yield {
            "check": {
                "num_points": len(points),
                "mean": sum(errors) / len(errors) if errors else 0.0,
                "worst": max(errors, default=0.0),
                "noise": median(point.pop("spread") for point in points) if points else 0.0,
                "points": points,
                "source": profile.source,
                "date": profile.date,
            }
        }

    async def _check_dop(
        self, sib: Sib, dop: int, share: tuple[float, float], points: list[dict[str, Any]]
    ) -> AsyncGenerator[dict[str, Any], None]:
        began, width = share
        self._bench.group(dop)
        yield {"stage": f"dop {dop}: warm-up", "fraction": began}
        longest = min(await self._longest(dop), _reach(sib.profile, dop))
        await self._bench.fill(self._block_tokens(longest, dop))
        sizes = grid.unseen_prefills(
            longest, self._bench.block_tokens, _CHECK_SEED + dop, _CHECKED_PREFILLS
        )
        jobs = [self._prefill_job(items) for items in sizes]
        async for done in self._repeat(jobs):
            yield {"stage": f"dop {dop}: prefill", "fraction": began + width * 0.7 * done}
        for items, job in zip(sizes, jobs, strict=True):
            _add(points, sib.prefill_s(dop, items), job, phase="prefill", dop=dop, items=items)
        masters = _masters(dop)
        for number, num_masters in enumerate(masters):
            batches = grid.unseen_decodes(
                self._effort.max_batch, _CHECK_SEED + dop, _CHECKED_DECODES
            )
            jobs = [self._decode_job(size, num_masters) for size in batches]
            async for done in self._repeat(jobs):
                at = 0.7 + 0.3 * (number + done) / len(masters)
                yield {"stage": f"dop {dop}: decode", "fraction": began + width * at}
            for size, job in zip(batches, jobs, strict=True):
                what = {
                    "dop": dop,
                    "num_masters": num_masters,
                    "batch": size.batch,
                    "kv_tokens": self._kv_tokens(size),
                }
                _add(points, sib.decode_s(**what), job, phase="decode", **what)
        self._bench.clear()

    # ---- inside --------------------------------------------------------------------------------

    async def _longest(self, dop: int) -> int:
        """The longest prompt worth timing: what the time, the model and the pool allow."""
        bench = self._bench
        room = bench.pool_tokens * dop * 2 // 5
        limit = min(bench.max_tokens, room)
        tokens = min(32, limit)
        await bench.prefill([(0, tokens)])
        while True:
            elapsed_s = min([await bench.prefill([(0, tokens)]) for _ in range(2)])
            if 2 * elapsed_s > self._effort.max_step_s or tokens >= limit:
                return tokens
            tokens = min(2 * tokens, limit)

    def _block_tokens(self, longest: int, dop: int) -> int:
        most = min(longest, self._bench.max_tokens * 3 // 4)
        return max(most // NUM_BLOCKS, dop, 1)

    def _kv_tokens(self, size: grid.DecodeSize) -> int:
        return size.batch * (size.num_blocks * self._bench.block_tokens + 1)

    def _prefill_job(self, items: grid.Items) -> _Job:
        return _Job(lambda: self._bench.prefill(items), [])

    def _decode_job(self, size: grid.DecodeSize, num_masters: int) -> _Job:
        return _Job(
            lambda: self._bench.decode(
                num_masters=num_masters, batch=size.batch, num_blocks=size.num_blocks
            ),
            [],
        )

    async def _repeat(self, jobs: Sequence[_Job]) -> AsyncGenerator[float, None]:
        """Run all jobs round by round; yields the share done."""
        first = [await job.run() for job in jobs]
        for job, elapsed_s in zip(jobs, first, strict=True):
            job.times.append(elapsed_s)
        wanted = [self._effort.rounds(elapsed_s) for elapsed_s in first]
        total = sum(elapsed_s * rounds for elapsed_s, rounds in zip(first, wanted, strict=True))
        spent = sum(first)
        yield spent / total
        for number in range(1, max(wanted)):
            for job, elapsed_s, rounds in zip(jobs, first, wanted, strict=True):
                if number < rounds:
                    job.times.append(await job.run())
                    spent += elapsed_s
                    yield min(spent / total, 1.0)


def _add(points: list[dict[str, Any]], predicted_s: float, job: _Job, **what: Any) -> None:
    measured_s = grid.typical(job.times)
    if measured_s < _TOO_SHORT_S:
        return
    error = abs(predicted_s / measured_s - 1)
    times = {"predicted_s": predicted_s, "measured_s": measured_s, "error": error}
    points.append({**what, **times, "spread": grid.spread(job.times)})


def _dops(num_instances: int) -> list[int]:
    """All degrees up to four, then powers of two and the largest."""
    wanted = {*range(1, 5), *(1 << i for i in range(3, 10)), num_instances}
    return sorted(dop for dop in wanted if dop <= num_instances)


def _masters(dop: int) -> list[int]:
    return sorted({1, dop})


def _reach(profile: Profile, dop: int) -> int:
    """The longest single prompt inside the profiled range."""
    return next(fit.max_tokens for fit in profile.prefill if fit.dop == dop)


def _profile(
    subject: Subject, prefill: list[PrefillFit], decode: list[DecodeFit], *, quick: bool
) -> Profile:
    facts = subject.facts
    hardware = hardware_of(subject.device)
    alone = next(fit for fit in decode if fit.dop == 1)
    return Profile(
        model=facts.name,
        shape=facts.key,
        device=subject.device,
        tp=subject.tp,
        dtype=subject.dtype,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=(
            f"measured on these workers ({'quick' if quick else 'full'}); "
            "migration and link bandwidth derived from constants of the device"
        ),
        measured=True,
        prefill=prefill,
        decode=decode,
        migrate=MigrateFit(
            alpha_s=hardware.exchange_s * facts.num_layers,
            token_s=facts.kv_bytes_per_token / hardware.link_bytes,
        ),
        compute_bound_batch=compute_bound_batch(alone.coefficients),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        link_bytes_per_s=hardware.link_bytes,
        versions=versions(),
    )
