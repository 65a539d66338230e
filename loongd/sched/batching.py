"""Step 3 of LoongServe: which requests prefill together, on how many instances.

Knows: the dynamic programme over runs of requests (longest first) and runs of instances (most room
first). With T the batch's time times the sum of 1 / length, that is the sum of input latencies,
    f[i][k] = min over j < i, l < k with D(j, i) <= V(l, k) of f[j][l] + T(j, i, k - l)
and the best plan is the smallest f[n][k]. The search is complete: no split is pruned, since with
capacities the monotone splits of the paper are not always best.
Does not know: who the requests are, where their KV goes.

O(n^2 m^2) in numpy, one pass for each instance; with numba (the `fast` extra) the same sums run in
a compiled loop. Both take the first of equal plans in the order of (j, l), so they agree to the
last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loongd.sched.batching_loops import COMPILED, fill_loops, fill_plain
from loongd.sched.sib import Coefficients

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Requests x instances up to which loops in Python are faster than numpy.
SMALL = 8


@dataclass(frozen=True, slots=True)
class Run:
    """Requests `[first_request, end_request)` on instances `[first_instance, end_instance)`."""

    first_request: int
    end_request: int
    first_instance: int
    end_instance: int


@dataclass(frozen=True, slots=True)
class Problem:
    """What to batch.

    Args:
        lengths: tokens to prefill of each request, in the order of the runs (longest first).
        needs: slots that each request wants where it prefills.
        slots: room of each instance, in the order of the runs (most first).
        costs: coefficients for groups of 1, 2, ... up to all instances.
        share_tokens: a batch gets one more instance for each so many tokens at most.
        max_batched_tokens: most tokens of a batch of several requests.
    """

    lengths: Sequence[int]
    needs: Sequence[int]
    slots: Sequence[int]
    costs: Sequence[Coefficients]
    share_tokens: int = 1
    max_batched_tokens: int = 1 << 62


@dataclass(frozen=True, slots=True)
class Plan:
    """The best split; `latency` is the sum of input latencies, seconds per token."""

    runs: tuple[Run, ...]
    latency: float


def best_plan(problem: Problem, *, compiled: bool = COMPILED) -> Plan | None:
    """The plan with the least sum of input latencies; None when no split has room."""
    num_requests = len(problem.lengths)
    if sum(problem.needs) > sum(problem.slots):
        return None  # no run has more slots than its instances
    is_small = num_requests * len(problem.slots) <= SMALL
    fill = fill_loops if compiled else fill_plain if is_small else fill_arrays
    best, from_request, from_instance = fill(*sums(problem))
    end = int(np.argmin(best[num_requests]))
    latency = float(best[num_requests, end])
    if latency == np.inf:
        return None
    runs: list[Run] = []
    i, k = num_requests, end
    while i:
        j, l = int(from_request[i, k]), int(from_instance[i, k])  # noqa: E741 - as in the paper
        runs.append(Run(j, i, l, k))
        i, k = j, l
    return Plan(tuple(reversed(runs)), latency)


def sums(problem: Problem) -> tuple[Ints, Ints, Floats, Ints, Ints, Floats, int, int]:
    """Arguments of `fill_arrays`: sums over the requests and instances, with a leading 0."""
    inverse = np.cumsum(1.0 / np.asarray(problem.lengths, dtype=np.float64))
    return (
        _cumulate(problem.lengths),
        _cumulate([n * n for n in problem.lengths]),
        np.concatenate(([0.0], inverse)),
        _cumulate(problem.needs),
        _cumulate(problem.slots),
        np.array([_row(c) for c in problem.costs[: len(problem.slots)]], dtype=np.float64),
        problem.share_tokens,
        problem.max_batched_tokens,
    )


def _cumulate(values: Sequence[int]) -> Ints:
    return np.concatenate(([0], np.cumsum(np.asarray(values, dtype=np.int64))))


def _row(c: Coefficients) -> tuple[float, float, float, float, float]:
    return (c.alpha_s, c.item_s, c.beta_s, c.gamma_s, c.floor_s)


def fill_arrays(
    tokens: Ints,
    squares: Ints,
    inverse: Floats,
    needs: Ints,
    slots: Ints,
    costs: Floats,
    share_tokens: int,
    max_batched_tokens: int,
) -> tuple[Floats, Ints, Ints]:
    """f, and for each cell the (j, l) it comes from; see `sums`.

    One pass for each k: all f[j][l] with l < k are known then, so all i are found at once. Where
    f is infinite the other two mean nothing.
    """
    n, m = len(tokens) - 1, len(slots) - 1
    # Transposed: [k, i].
    best = np.full((m + 1, n + 1), np.inf)
    best[0, 0] = 0.0
    from_request = np.zeros((m + 1, n + 1), dtype=np.int64)
    from_instance = np.zeros((m + 1, n + 1), dtype=np.int64)
    widest = min(m, (int(tokens[n]) - 1) // share_tokens + 1)
    times = _latencies(tokens, squares, inverse, costs[:widest], share_tokens, max_batched_tokens)
    gaps = needs[1:, None] - needs[:-1]
    rows = np.arange(n)
    for k in range(1, m + 1):
        first = max(0, k - widest)
        # [l - first, i - 1, j]; wide groups start at low l.
        found = best[first:k, None, :n] + times[k - first - 1 :: -1]
        rooms = slots[k] - slots[first:k]
        narrow = int(np.count_nonzero(rooms >= needs[n]))
        if narrow < k - first:
            np.putmask(found[narrow:], gaps > rooms[narrow:, None, None], np.inf)
        # Of equal cells the first in the order of (j, l).
        of_request = found.min(axis=0)
        j = of_request.argmin(axis=1)
        best[k, 1:] = of_request[rows, j]
        from_request[k, 1:] = j
        from_instance[k, 1:] = first + found[:, rows, j].argmin(axis=0)
    return best.T, from_request.T, from_instance.T


def _latencies(
    tokens: Ints,
    squares: Ints,
    inverse: Floats,
    costs: Floats,
    share_tokens: int,
    max_batched_tokens: int,
) -> Floats:
    """T(j, i, w) as [w - 1, i - 1, j]; infinite where w is too wide or the batch too large, and
    where j is not below i."""
    requests = np.arange(len(tokens) - 1)
    count = requests[:, None] + 1 - requests
    new = tokens[1:, None] - tokens[:-1]
    square = squares[1:, None] - squares[:-1]
    alpha, item, beta, gamma, floor = (costs[:, c][:, None, None] for c in range(5))
    found: Floats = alpha + item * count
    found += beta * new
    found += gamma * square
    np.maximum(floor, found, out=found)
    found *= inverse[1:, None] - inverse[:-1]
    new[(count < 1) | ((count > 1) & (new > max_batched_tokens))] = 0
    narrower = np.arange(len(costs))[:, None, None]
    np.putmask(found, narrower * share_tokens >= new, np.inf)
    return found
