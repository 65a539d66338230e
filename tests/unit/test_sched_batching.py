"""The dynamic programme against complete enumeration, and its two forms against each other."""

import random
from functools import cache

import numpy as np
import pytest

from loongd.sched.batching import Problem, Run, best_plan, fill_arrays, sums
from loongd.sched.batching_loops import fill_loops, fill_plain
from loongd.sched.sib import Coefficients


def latency(problem, j, i, w):
    """T(j, i, w), straight from the definition."""
    lengths = problem.lengths[j:i]
    if (w - 1) * problem.share_tokens >= sum(lengths):
        return float("inf")
    if len(lengths) > 1 and sum(lengths) > problem.max_batched_tokens:
        return float("inf")
    time_s = problem.costs[w - 1].time_s([(0, n) for n in lengths])
    return time_s * sum(1 / n for n in lengths)


def enumerate_all(problem):
    """The least sum over every way to cut both sequences, by trying all."""
    n, m = len(problem.lengths), len(problem.slots)

    @cache
    def best(j, l):  # noqa: E741
        if j == n:
            return 0.0
        found = float("inf")
        for i in range(j + 1, n + 1):
            for k in range(l + 1, m + 1):
                if sum(problem.needs[j:i]) <= sum(problem.slots[l:k]):
                    found = min(found, latency(problem, j, i, k - l) + best(i, k))
        return found

    return best(0, 0)


def random_problem(draw, *, num_requests=7, num_instances=5):
    n, m = draw.randint(1, num_requests), draw.randint(1, num_instances)
    lengths = sorted((int(10 ** draw.uniform(0, 4.5)) for _ in range(n)), reverse=True)
    tight = draw.choice([0.3, 1.0, 1.5, 10.0])
    slots = sorted(draw.randint(0, int(2 * tight * sum(lengths) / m)) for _ in range(m))
    # Any numbers: a wider group may well be slower, as over PCIe.
    costs = [
        Coefficients(
            alpha_s=draw.uniform(0, 0.1),
            beta_s=draw.choice([0.0, draw.uniform(0, 1e-3)]),
            gamma_s=draw.choice([0.0, draw.uniform(0, 1e-6)]),
            item_s=draw.choice([0.0, 1e-3]),
            floor_s=draw.choice([0.0, 0.05]),
        )
        for _ in range(m)
    ]
    return Problem(
        lengths=lengths,
        needs=[n + draw.choice([0, 0, 100]) for n in lengths],
        slots=slots[::-1],
        costs=costs,
        share_tokens=draw.choice([1, 1, 500]),
        max_batched_tokens=draw.choice([1 << 40, 2000]),
    )


@pytest.mark.parametrize("seed", range(20))
def test_equals_brute_force(seed):
    draw = random.Random(seed)
    num_feasible = 0
    for _ in range(150):
        problem = random_problem(draw)
        wanted, plan = enumerate_all(problem), best_plan(problem, compiled=False)
        if plan is None:
            assert wanted == float("inf")
            continue
        num_feasible += 1
        assert plan.latency == pytest.approx(wanted, rel=1e-9)
        check_plan(problem, plan)
    assert 40 < num_feasible < 150


def check_plan(problem, plan):
    """The runs follow each other, have room, and cost what the plan says."""
    request = instance = 0
    total = 0.0
    for run in plan.runs:
        assert (run.first_request, run.first_instance) == (request, instance)
        request, instance = run.end_request, run.end_instance
        needs = sum(problem.needs[run.first_request : run.end_request])
        assert needs <= sum(problem.slots[run.first_instance : run.end_instance])
        total += latency(problem, run.first_request, request, instance - run.first_instance)
    assert request == len(problem.lengths)
    assert plan.latency == pytest.approx(total, rel=1e-9)


def check_fill(fill, seed):
    """The same table as numpy's to the last bit, and where there is a plan the same way to it."""
    draw = random.Random(seed)
    for _ in range(150):
        problem = random_problem(draw, num_requests=12, num_instances=6)
        arguments = sums(problem)
        ours, loops = fill_arrays(*arguments), fill(*arguments)
        assert np.array_equal(ours[0], loops[0])
        feasible = np.isfinite(ours[0])
        assert np.array_equal(ours[1][feasible], loops[1][feasible])
        assert np.array_equal(ours[2][feasible], loops[2][feasible])


def test_loops_equal_numpy_to_the_last_bit():
    check_fill(fill_plain, 5)


def test_compiled_loops_equal_numpy_to_the_last_bit():
    pytest.importorskip("numba")
    assert fill_loops is not fill_plain
    check_fill(fill_loops, 6)


def test_compiled_plans_are_the_same():
    pytest.importorskip("numba")
    draw = random.Random(7)
    plans = []
    for _ in range(60):
        problem = random_problem(draw, num_requests=30, num_instances=8)
        plans.append(best_plan(problem, compiled=True))
        assert plans[-1] == best_plan(problem, compiled=False)
    assert len([plan for plan in plans if plan is not None and len(plan.runs) > 1]) > 15


def test_short_prompts_do_not_wait_for_a_long_one():
    """The published code puts all in one batch on all instances."""
    costs = [Coefficients(alpha_s=0.01, beta_s=1e-4 / w, gamma_s=1e-8 / w) for w in (1, 2, 3, 4)]
    plan = best_plan(Problem([50_000, 40, 30], [50_000, 40, 30], [100_000] * 4, costs))
    assert plan.runs == (Run(0, 1, 0, 2), Run(1, 2, 2, 3), Run(2, 3, 3, 4))


def test_a_batch_gets_an_instance_for_each_share_at_most():
    costs = [Coefficients(alpha_s=0.0, beta_s=1e-4 / w, gamma_s=0.0) for w in (1, 2, 3)]
    problem = Problem([900], [900], [1000] * 3, costs, share_tokens=500)
    assert best_plan(problem).runs == (Run(0, 1, 0, 2),)
    assert best_plan(Problem([900], [900], [1000] * 3, costs)).runs == (Run(0, 1, 0, 3),)


def test_no_plan_without_room():
    costs = [Coefficients(alpha_s=0.0, beta_s=1e-4, gamma_s=0.0)] * 2
    assert best_plan(Problem([900], [900], [400, 400], costs)) is None
    assert best_plan(Problem([900], [900], [400, 500], costs)).runs == (Run(0, 1, 0, 2),)
