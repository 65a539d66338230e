"""Step 3 of LoongServe: which requests prefill together, on how many instances.

Knows: the dynamic programme over runs of requests (longest first) and runs of instances (most room
first). With T the batch's time times the sum of 1 / length, that is the sum of input latencies,
    f[i][k] = min over j < i, l < k with D(j, i) <= V(l, k) of f[j][l] + T(j, i, k - l)
and the best plan is the smallest f[n][k]. The search is complete: no split is pruned, since with
capacities the monotone splits of the paper are not always best.
Does not know: who the requests are, where their KV goes.

O(n^2 m^2) in numpy; with numba (the `fast` extra) the same sums run in a compiled loop. Both take
the first of equal plans in the order of (j, l), so they agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loongd.sched.batching_loops import COMPILED, fill_loops
from loongd.sched.sib import Coefficients

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


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
    fill = fill_loops if compiled else fill_arrays
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
    """f, and for each cell the (j, l) it comes from; see `sums`."""
    n, m = len(tokens) - 1, len(slots) - 1
    best = np.full((n + 1, m + 1), np.inf)
    best[0, 0] = 0.0
    from_request = np.zeros((n + 1, m + 1), dtype=np.int64)
    from_instance = np.zeros((n + 1, m + 1), dtype=np.int64)
    # All (l, k) with l < k, by k and then l: those of one k are neighbours.
    ends, starts = np.tril_indices(m + 1, -1)
    room = slots[ends] - slots[starts]
    widths = ends - starts
    for i in range(1, n + 1):
        times = _latencies(i, tokens, squares, inverse, costs, share_tokens, max_batched_tokens)
        found = best[:i, starts] + times[:, widths - 1]
        found[(needs[i] - needs[:i])[:, None] > room[None, :]] = np.inf
        for k in range(1, m + 1):
            block = found[:, k * (k - 1) // 2 : k * (k + 1) // 2]
            at = int(np.argmin(block))
            best[i, k] = block.flat[at]
            from_request[i, k], from_instance[i, k] = divmod(at, k)
    return best, from_request, from_instance


def _latencies(
    i: int,
    tokens: Ints,
    squares: Ints,
    inverse: Floats,
    costs: Floats,
    share_tokens: int,
    max_batched_tokens: int,
) -> Floats:
    """T(j, i, w) as a matrix [j, w - 1]; infinite where w is too wide or the batch too large."""
    count = i - np.arange(i)
    new = tokens[i] - tokens[:i]
    square = squares[i] - squares[:i]
    alpha, item, beta, gamma, floor = (costs[:, c][None, :] for c in range(5))
    times = alpha + item * count[:, None] + beta * new[:, None] + gamma * square[:, None]
    found: Floats = np.maximum(floor, times) * (inverse[i] - inverse[:i])[:, None]
    narrower = np.arange(costs.shape[0])
    found[narrower[None, :] * share_tokens >= new[:, None]] = np.inf
    found[(count > 1) & (new > max_batched_tokens), :] = np.inf
    return found
