"""Timing many steps several times each, so that no moment of the machine falls on one of them.

Knows: runs of the same step back to back, rounds over all steps, each in another order, and when
the time for them is up. Does not know: what a step is.

A device's clock and a host's speed depend on what they did in the tenths of a second before. So a
run is a burst: the step again and again, as a busy server has it, until that has taken a while; the
first does not count. And all kinds of steps share the rounds, in an order of their own each time:
what else happens on the machine for a second spoils one run of many steps, not all of one.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from loongd.profiling import grid

_SEED = 7
_SURE_SHARE = 0.4
"""Of the progress, for the rounds whose times are not known before."""
_MOST_IN_BURST = 8


@dataclass(slots=True)
class Job:
    """One step: how to run it, once or several times in a row, and what that took so far.

    `times` has one for each run; `cost_s` is what the cheapest run took altogether.
    """

    run: Callable[[], Awaitable[Sequence[float]]]
    times: list[float] = field(default_factory=list)
    cost_s: float = float("inf")

    @property
    def typical_s(self) -> float:
        """One time for all of them."""
        return grid.typical(self.times)

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
    limit_s: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> AsyncGenerator[float, None]:
    """Run all jobs round by round; yields the share done. The fewest rounds each, and then until
    each has had its own number or all together have taken `budget_s`; when they have taken
    `limit_s`, no more than `LEAST_ROUNDS`."""
    began_s = clock()
    rng = random.Random(_SEED)
    orders = [list(range(len(jobs)))]
    while len(orders) < effort.min_rounds:
        orders.append(rng.sample(orders[0], len(jobs)))
    for number, order in enumerate(orders):
        for at, i in enumerate(order):
            used = (clock() - began_s) / limit_s
            if number >= grid.LEAST_ROUNDS and used >= 1.0:
                yield 1.0
                return
            await jobs[i].measure()
            num_done = number + at / len(jobs)
            by_limit = min(used, num_done / grid.LEAST_ROUNDS)
            yield max(_SURE_SHARE * num_done / len(orders), by_limit)
    # The first run of a size may plan or compile, and never counts; the others say how long more
    # will take.
    wanted = [effort.rounds(job.cost_s) - len(orders) for job in jobs]
    total_s = sum(job.cost_s * rounds for job, rounds in zip(jobs, wanted, strict=True))
    spent_s = 0.0
    least_share = (clock() - began_s) / limit_s
    for number in range(max(wanted, default=0)):
        order = [i for i in range(len(jobs)) if number < wanted[i]]
        rng.shuffle(order)
        for i in order:
            used = (clock() - began_s) / min(budget_s, limit_s)
            if used >= 1.0:
                break
            await jobs[i].measure()
            spent_s += jobs[i].cost_s
            share = max(spent_s / total_s, used)
            yield min(max(least_share, _SURE_SHARE + (1 - _SURE_SHARE) * share), 1.0)
    yield 1.0
