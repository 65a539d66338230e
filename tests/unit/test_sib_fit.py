"""Fits against planted coefficients, the optimality conditions, and published measurements."""

import math
import random
from itertools import combinations
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongd.profiling.store import load
from loongd.sched.sib import Sib
from loongd.sched.sib_fit import (
    DecodePoint,
    PrefillPoint,
    compute_bound_batch,
    fit_decode,
    fit_prefill,
    nnls,
    robust_nnls,
)
from loongd.sched.sib_fit_grid import refine_decode
from loongd.sched.sib_profile import Coefficients, DecodeCoefficients

PROFILES = Path(__file__).parents[2] / "etc" / "profiles"


@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(2, 12), unknowns=st.integers(1, 5))
def test_nnls_satisfies_the_optimality_conditions(seed: int, rows: int, unknowns: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(rows, unknowns)), rng.normal(size=rows)
    x = nnls(a, b)
    gradient = a.T @ (a @ x - b)
    assert (x >= 0).all()
    assert (gradient >= -1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6


@given(seed=st.integers(0, 2**32 - 1))
def test_nnls_is_as_good_as_the_best_of_all_sets_of_free_unknowns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.exponential(size=(15, 6)) ** 3, rng.exponential(size=15)
    least = float(b @ b)
    for size in range(1, 7):
        for free in combinations(range(6), size):
            x = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if (x >= 0).all():
                least = min(least, float(np.square(a[:, free] @ x - b).sum()))
    rest = a @ nnls(a, b) - b
    assert float(rest @ rest) == pytest.approx(least, rel=1e-9)


def test_nnls_of_equal_and_empty_columns_is_finite() -> None:
    a = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0], [3.0, 3.0, 0.0]])
    x = nnls(a, np.array([2.0, 4.0, 6.0]))
    assert a @ x == pytest.approx([2.0, 4.0, 6.0])
    assert x[2] == 0.0


def test_rows_that_the_others_contradict_have_little_influence() -> None:
    rng = np.random.default_rng(1)
    a, x = rng.exponential(size=(40, 4)), np.array([1.0, 0.0, 2.0, 0.5])
    times = a @ x * rng.uniform(0.99, 1.01, size=40)
    times[::13] *= 1.6
    rows, ones = a / times[:, None], np.ones(40)
    assert np.abs(robust_nnls(rows, ones) - x).max() < 0.02
    assert np.abs(nnls(rows, ones) - x).max() > 0.06


def prefill_points(rng: random.Random, truth: Coefficients, noise: float) -> list[PrefillPoint]:
    points = []
    for _ in range(24):
        items = tuple(
            (rng.choice([0, 0, 512, 2048]), round(2 ** rng.uniform(4, 13)))
            for _ in range(rng.randint(1, 8))
        )
        elapsed = truth.time_s(items) * (1 + rng.uniform(-noise, noise))
        points.append(PrefillPoint(items, elapsed))
    return points


def test_planted_prefill_coefficients_are_found() -> None:
    truth = Coefficients(alpha_s=0.01, item_s=5e-4, beta_s=2e-5, gamma_s=3e-9)
    fit = fit_prefill(1, prefill_points(random.Random(1), truth, 0.0))
    found = fit.coefficients
    for name in ("alpha_s", "item_s", "beta_s", "gamma_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-6), name
    assert found.floor_s == 0.0
    assert fit.error is not None
    assert fit.error.worst < 1e-6


def test_noise_moves_predictions_little_and_never_below_zero() -> None:
    truth = Coefficients(alpha_s=0.01, item_s=5e-4, beta_s=2e-5, gamma_s=3e-9)
    for seed in range(20):
        rng = random.Random(seed)
        found = fit_prefill(1, prefill_points(rng, truth, 0.03)).coefficients
        assert min(found.alpha_s, found.item_s, found.beta_s, found.gamma_s) >= 0
        for point in prefill_points(rng, truth, 0.0):
            assert found.time_s(point.items) == pytest.approx(point.elapsed_s, rel=0.08)


def test_an_unconstrained_fit_of_short_prompts_would_be_negative_and_ours_is_not() -> None:
    # Time that grows less than linearly, as short prompts do: least squares bends downwards.
    points = [PrefillPoint(((0, n),), 0.01 + 0.001 * math.sqrt(n)) for n in range(10, 100, 10)]
    rows = np.array([(1, point.features[2], point.features[3]) for point in points])
    assert np.linalg.lstsq(rows, np.array([p.elapsed_s for p in points]))[0][2] < 0
    assert fit_prefill(1, points).coefficients.gamma_s == 0.0


def test_the_floor_is_found_where_short_steps_all_take_the_same() -> None:
    truth = Coefficients(alpha_s=0.002, beta_s=2e-5, gamma_s=1e-9, floor_s=0.02)
    points = [
        PrefillPoint(((0, n),), truth.time_s([(0, n)]))
        for n in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    ]
    fit = fit_prefill(1, points)
    assert fit.coefficients.floor_s == pytest.approx(0.02)
    assert fit.error is not None
    assert fit.error.worst < 0.01


def decode_points(truth: DecodeCoefficients, dop: int, masters: int) -> list[DecodePoint]:
    points = []
    for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        for kv in (100, 10_000, 300_000):
            step = {"dop": dop, "num_masters": masters, "batch": batch, "kv_tokens": kv}
            points.append(DecodePoint(batch, kv, truth.time_s(**step)))
    return points


@pytest.mark.parametrize(("dop", "masters"), [(1, 1), (2, 1), (4, 4)])
def test_planted_decode_coefficients_are_found(dop: int, masters: int) -> None:
    truth = DecodeCoefficients(alpha_s=0.004, request_s=2e-5, kv_token_s=1.2e-7)
    fit = fit_decode(dop, masters, decode_points(truth, dop, masters))
    assert fit.coefficients.request_s == pytest.approx(2e-5, rel=1e-5)
    assert fit.coefficients.kv_token_s == pytest.approx(1.2e-7, rel=1e-5)
    assert (fit.max_batch, fit.max_kv_tokens) == (512, 300_000)


def test_the_compute_bound_batch_is_that_of_the_largest_batches() -> None:
    truth = DecodeCoefficients(
        alpha_s=0.004, request_s=2e-6, kv_token_s=1.2e-7, over_s=2e-5, knee=64
    )
    points = decode_points(truth, 1, 1)
    fit = refine_decode(fit_decode(1, 1, points), points, [100, 10_000, 300_000])
    assert fit.grid is not None
    assert compute_bound_batch(fit) == pytest.approx(0.004 / 2.2e-5, rel=0.02)
    line = msgspec.structs.replace(fit, grid=None, coefficients=truth)
    assert compute_bound_batch(line) == pytest.approx(0.004 / 2.2e-5, rel=0.01)


def test_single_prompts_alone_leave_requests_free() -> None:
    truth = Coefficients(alpha_s=0.02, beta_s=2e-5, gamma_s=0.0)
    points = [PrefillPoint(((0, n),), truth.time_s([(0, n)])) for n in (10, 1000, 10_000)]
    fit = fit_prefill(1, points)
    assert (fit.coefficients.item_s, fit.max_items) == (0.0, 1)
    assert fit.coefficients.alpha_s == pytest.approx(0.02)


def test_too_few_points_are_refused() -> None:
    with pytest.raises(ValueError, match="1 points"):
        fit_prefill(1, [PrefillPoint(((0, 10),), 0.1)])


# ---- shipped profiles ----------------------------------------------------------------------------


def test_every_shipped_profile_loads_and_says_where_it_comes_from() -> None:
    found = sorted(PROFILES.glob("*.json"))
    assert len(found) >= 6
    for path in found:
        profile = load(path)
        assert len(profile.source) > 40, path
        assert f"-tp{profile.tp}.json" in path.name


# LoongServe's own measurements on eight A800 (SOSP 2024, artifact, figure 3): batch, length, ms.
A800_TP2_SP4 = [
    (512, 1_000, 5267.1),
    (128, 5_000, 7071.8),
    (64, 10_000, 7701.1),
    (16, 50_000, 15744.4),
    (4, 100_000, 11798.4),
    (1, 500_000, 53605.9),
]


@pytest.mark.parametrize(("batch", "length", "measured_ms"), A800_TP2_SP4)
def test_the_a800_profile_reproduces_the_published_times(
    batch: int, length: int, measured_ms: float
) -> None:
    sib = Sib(load(PROFILES / "a800-llama2-7b-tp2.json"))
    assert sib.prefill_s(4, [(0, length)] * batch) * 1e3 == pytest.approx(measured_ms, rel=0.03)
