"""Timing many steps several times each, so that no moment of the machine falls on one of them.

Knows: rounds over all steps, each in another order. Does not know: what a step is.

Repetitions go round by round over all steps, not step by step: what else happens on the machine for
a second then spoils one repetition of many steps, not all of one. Each round has an order of its
own, from a seed, so that no step always runs after the same other one.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from loongd.profiling import grid

_SEED = 7
_SURE_ROUNDS = 2
_SURE_SHARE = 0.4
"""Of the progress, for the rounds whose times are not known before."""


@dataclass(frozen=True, slots=True)
class Job:
    """One step: how to run it once, and its times so far."""

    run: Callable[[], Awaitable[float]]
    times: list[float] = field(default_factory=list)

    @property
    def typical_s(self) -> float:
        """One time for all of them."""
        return grid.typical(self.times)


async def repeat(jobs: Sequence[Job], effort: grid.Effort) -> AsyncGenerator[float, None]:
    """Run all jobs round by round; yields the share done."""
    for number in range(_SURE_ROUNDS):
        for at, job in enumerate(jobs):
            job.times.append(await job.run())
            yield _SURE_SHARE * (number + at / len(jobs)) / _SURE_ROUNDS
    # The first run of a size may plan or compile, and never counts; the second says how long the
    # others will take.
    wanted = [effort.rounds(min(job.times)) - _SURE_ROUNDS for job in jobs]
    total = sum(min(job.times) * rounds for job, rounds in zip(jobs, wanted, strict=True))
    spent = 0.0
    rng = random.Random(_SEED)
    for number in range(max(wanted, default=0)):
        order = [i for i in range(len(jobs)) if number < wanted[i]]
        rng.shuffle(order)
        for i in order:
            spent += min(jobs[i].times[:_SURE_ROUNDS])
            jobs[i].times.append(await jobs[i].run())
            yield min(_SURE_SHARE + (1 - _SURE_SHARE) * spent / total, 1.0)
    yield 1.0
