"""Timing many steps several times each, so that no moment of the machine falls on one of them.

Knows: runs of the same step back to back, rounds over all steps, each in another order, and when
the time for them is up. Does not know: what a step is.

A device's clock and a host's speed depend on what they did in the tenths of a second before. So a
run is a burst: the step again and again, as a busy server has it, until that has taken a while; the
first does not count. And all kinds of steps share the rounds, in an order of their own each time:
what else happens on the machine for a second spoils one run of many steps, not all of one; and
where one processor does all, its slower moments are taken out of the times (`profiling.pace`).
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low

from loongd.profiling import grid
from loongd.profiling.pace import slowness

_SEED = 7
_SURE_SHARE = 0.4
"""Of the progress, for the rounds whose times are not known before."""
_MOST_IN_BURST = 8


@dataclass(slots=True)
class Job:
    """One step: how to run it, once or several times in a row, and what that took so far.

    `times` has one for each run; `cost_s` is what the cheapest run took altogether; `slowness`,
    where it is known, has the machine's in each run but the first.
    """

    run: Callable[[], Awaitable[Sequence[float]]]
    times: list[float] = field(default_factory=list)
    cost_s: float = float("inf")
    slowness: list[float] = field(default_factory=list)

    @property
    def typical_s(self) -> float:
        """One time for all of them, as in calm moments where slowness is known."""
        if not self.slowness:
            return grid.typical(self.times)
        counted = zip(self.times[1:], self.slowness, strict=True)
        return median_low(elapsed_s / slow for elapsed_s, slow in counted)

    async def measure(self) -> None:
        """Run it once more."""
        steps = await self.run()
        self.times.append(grid.typical(steps))
        self.cost_s = min(self.cost_s, sum(steps))


async def burst(run: Callable[[], Awaitable[float]], least_s: float) -> list[float]:
    """Run a step again and again until it has taken `least_s`: seconds of each."""
    times = [await run()]
    while sum(times) < least_s and len(times) < _MOST_IN_BURST:
        times.append(await run())
    return times


async def repeat(
    jobs: Sequence[Job],
    effort: grid.Effort,
    budget_s: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[float, None]:
    """Run all jobs round by round; yields the share done. The fewest rounds each, and then until
    each has had its own number or all together have taken `budget_s`."""
    began_s = clock()
    rng = random.Random(_SEED)
    turns: list[int] = []
    orders = [list(range(len(jobs)))]
    while len(orders) < effort.min_rounds:
        orders.append(rng.sample(orders[0], len(jobs)))
    for number, order in enumerate(orders):
        for at, i in enumerate(order):
            await jobs[i].measure()
            turns.append(i)
            yield _SURE_SHARE * (number + at / len(jobs)) / len(orders)
    # The first run of a size may plan or compile, and never counts; the others say how long more
    # will take.
    wanted = [effort.rounds(job.cost_s) - len(orders) for job in jobs]
    total_s = sum(job.cost_s * rounds for job, rounds in zip(jobs, wanted, strict=True))
    spent_s = 0.0
    for number in range(max(wanted, default=0)):
        order = [i for i in range(len(jobs)) if number < wanted[i]]
        rng.shuffle(order)
        for i in order:
            used = (clock() - began_s) / budget_s
            if used >= 1.0:
                break
            await jobs[i].measure()
            turns.append(i)
            spent_s += jobs[i].cost_s
            share = max(spent_s / total_s, used)
            yield min(_SURE_SHARE + (1 - _SURE_SHARE) * share, 1.0)
    if effort.one_pace:
        _tell_slowness(jobs, turns)
    yield 1.0


def _tell_slowness(jobs: Sequence[Job], turns: Sequence[int]) -> None:
    """Tell each job how slow the machine was in its runs, which came in these turns."""
    num_seen: Counter[int] = Counter()
    counted: list[tuple[int, float]] = []
    for i in turns:
        if num_seen[i]:  # the first never counts
            counted.append((i, jobs[i].times[num_seen[i]]))
        num_seen[i] += 1
    steps, times = [i for i, _ in counted], [elapsed_s for _, elapsed_s in counted]
    for i, slow in zip(steps, slowness(steps, times), strict=True):
        jobs[i].slowness.append(slow)
