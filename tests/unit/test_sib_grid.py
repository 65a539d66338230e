"""Grids of decode times fitted to a made-up machine, and lines fitted to moves of KV."""

import random
from math import ceil
from pathlib import Path

import pytest

from loongd.profiling import grid
from loongd.sched import sib as sib_module
from loongd.sched.sib import Sib
from loongd.sched.sib_fit import DecodePoint, MigratePoint, fit_decode, fit_migrate
from loongd.sched.sib_fit_grid import refine_decode
from loongd.sim.systems import load_profile

PROFILES = Path(__file__).resolve().parents[2] / "etc" / "profiles"


def captured(busiest: int, kv: float) -> float:
    """A captured step for each range of batches; attention that is all latency below 8K tokens."""
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 512)
    rows = next(size for size in sizes if size >= busiest)
    products_s = max(0.0038, 2.1e-5 * rows)
    return products_s + 4e-6 * rows**0.5 * 10 + max(3e-4, 3.3e-8 * kv)


@pytest.mark.parametrize(("dop", "masters"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_unseen_decode_steps_of_a_made_up_machine_are_foreseen(
    dop: int, masters: int, seed: int
) -> None:
    rng = random.Random(seed)
    block, most_blocks, tiny = 2048, 64, 16

    def kv_tokens(size: grid.DecodeSize) -> int:
        return sum(n * block + 1 if n else tiny + 1 for n in size.blocks)

    def time_s(size: grid.DecodeSize) -> float:
        return captured(ceil(size.batch / masters), kv_tokens(size) / dop)

    points = [
        DecodePoint(size.batch, kv_tokens(size), time_s(size) * (1 + rng.uniform(-0.01, 0.01)))
        for size in grid.decode_sizes(256, masters, most_blocks)
    ]
    plain = fit_decode(dop, masters, points)
    fit = refine_decode(plain, points, grid.levels(block, dop))
    assert fit.grid is not None
    assert fit.grid.fault() == ""
    errors = []
    for size in grid.random_decodes(256, masters, most_blocks, seed=50 + seed, count=80):
        kv = kv_tokens(size) / dop
        found = fit.time_s(busiest=ceil(size.batch / masters), kv_tokens=kv)
        errors.append(abs(found / time_s(size) - 1))
    assert sum(errors) / len(errors) < 0.02
    assert max(errors) < 0.06


def test_a_batch_without_much_kv_learns_from_its_neighbours() -> None:
    points = [
        DecodePoint(batch, batch * 8 + kv, 0.01 + 1e-3 * (batch > 4) + 1e-6 * kv * (1 + batch / 16))
        for batch in (1, 2, 4, 5, 8, 16)
        for kv in (0, 10_000)
        if not (batch in (2, 5) and kv)
    ]
    plain = fit_decode(1, 1, points)
    fit = refine_decode(plain, [*points, *points], [0, 10_000])
    assert fit.grid is not None
    times = dict(zip(fit.grid.batches, fit.grid.times_s, strict=True))
    assert times[2][1] - times[2][0] == pytest.approx(1e-2 * (1 + 2 / 16), rel=0.02)
    assert times[5][1] - times[5][0] == pytest.approx(1e-2 * (1 + 5 / 16), rel=0.05)


def test_one_slow_size_does_not_make_larger_ones_slow() -> None:
    """Three rows take a processor longer than four; they are measured over little KV only."""

    def time_s(batch: int, kv: int) -> float:
        products_s = 0.05 if batch <= 4 else 0.09
        return (products_s + 1e-3 * batch + 1e-6 * kv) * (1.3 if batch == 3 else 1.0)

    points = [
        DecodePoint(batch, kv, time_s(batch, kv))
        for batch in (1, 2, 3, 4, 8, 16, 32)
        for kv in (0, 1000, 4000)
        if not (batch == 3 and kv)
    ]
    fit = refine_decode(fit_decode(1, 1, points), points, [0, 1000, 4000])
    assert fit.grid is not None
    assert fit.grid.fault() == ""
    for point in points:
        found = fit.time_s(busiest=point.batch, kv_tokens=point.kv_tokens)
        error = found / point.elapsed_s - 1
        assert abs(error) < (0.2 if point.batch == 3 else 0.11)


def test_a_planted_migration_is_found() -> None:
    points = [MigratePoint(n, 0.002 + 3e-7 * n) for n in (16, 100, 1000, 16_000)]
    found = fit_migrate(points)
    assert (found.alpha_s, found.token_s) == pytest.approx((0.002, 3e-7))
    assert found.error is not None
    assert found.error.worst < 1e-4
    with pytest.raises(ValueError, match="1 points"):
        fit_migrate(points[:1])


@pytest.mark.parametrize("seed", range(4))
def test_steps_in_a_row_take_what_each_of_them_takes(seed: int) -> None:
    """Inside the measured range, on its lines, and beyond it: to the last bit."""
    profile = load_profile("h200-llama2-7b-tp1", PROFILES)
    sib, rng = Sib(profile), random.Random(seed)
    sib.observe_decode(dop=1, num_masters=1, batch=3, kv_tokens=900, elapsed_s=0.0051)
    for _ in range(200):
        batch = rng.choice((1, 2, 3, 5, 17, 100, 256, 300, 512, 600))
        first, count = rng.choice((1, 400, rng.randrange(1, 300_000))), rng.randrange(40)
        each = [
            sib.decode_s(dop=1, num_masters=1, batch=batch, kv_tokens=first + batch * number)
            for number in range(count)
        ]
        assert sib.decode_run_s(batch, first, count) == each


def test_not_all_prompts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sib_module, "_MOST_REMEMBERED", 4)
    sib = Sib(load_profile("h200-llama2-7b-tp1", PROFILES))
    times = [sib.prefill_s(1, [(0, new)]) for new in range(300, 320)]
    assert len(sib._raw_alone) <= 4
    assert times == [sib.prefill_s(1, [(0, new)]) for new in range(300, 320)]


def test_what_is_remembered_of_a_prompt_ends_with_the_profile() -> None:
    profile = load_profile("h200-llama2-7b-tp1", PROFILES)
    sib, items = Sib(profile), [(4096, 2048)]
    before_s = sib.prefill_s(2, items)
    for _ in range(40):
        sib.observe_prefill(2, items, 1.5 * before_s)
    assert sib.prefill_s(2, items) > 1.2 * before_s
    sib.replace(load_profile("a800-llama2-7b-tp2", PROFILES))
    fresh = Sib(load_profile("a800-llama2-7b-tp2", PROFILES))
    assert sib.prefill_s(2, items) == fresh.prefill_s(2, items)
    assert sib.prefill_s(2, items) != before_s
