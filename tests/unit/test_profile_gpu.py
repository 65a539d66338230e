"""From measuring to predicting, on workers that behave as GPUs do where no line follows.

Small steps are replayed, padded to a few sizes; others wait for a host to launch them. Queries come
in tiles. A decode step is padded, has a floor, and costs a host a lot when it is the first of its
requests. All times are noisy, and some far off. The fits know nothing of these workers.
"""

import random
from collections import Counter
from math import ceil

import pytest
from profile_kit import MAX_TOKENS, SHORT, FakeWorkers, lengths_of, make_profiler

from loongd.profiling import grid
from loongd.profiling.bench import even
from loongd.profiling.profiler import ProfileRequest
from loongd.sched.sib import Sib
from loongd.sched.sib_detail import SMALL_DEALT_TOKENS, small_limits
from loongd.wire import Extend, PaddedSizes, RunStep, Sampling
from loongd.worker import prefill_layout, striped_layout
from loongd.worker.group_layout import MOST_EXCHANGED_TOKENS, GroupWork
from loongd.worker.striped_layout import StripedWork

SIZES = [16, 32, 64, *range(128, 1025, 128)]
DEALT = [16, 32, 64, 128, *range(256, 1537, 256)]
"""On two members, which compute half of the larger ones each."""
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
Items = list[tuple[int, int]]


def prefill_s(dop: int, items: Items) -> float:
    """Replayed as on an H200 with 8B weights; a group's launches take 40 ms and more."""
    new, cached = sum(n for _, n in items), sum(c for c, _ in items)
    tiled = sum(c * 32 * ceil(n / 32) for c, n in items)
    squares = sum(n * n for _, n in items)
    sizes = SIZES if dop == 1 else DEALT
    if new <= sizes[-1]:  # there is not enough KV here for more pairs than can be replayed
        size = next(size for size in sizes if size >= new)
        rows = size // dop if sizes is DEALT and size >= 256 else size
        products_s = max(0.005, 0.003 + 2e-5 * rows + 0.001 * (rows % 256 == 128))
        return products_s + 5e-10 * squares + (6e-9 * tiled + 2e-8 * cached) / dop
    host_s = 0.012 * dop + 0.001 * len(items) + (0.004 * dop if cached else 0.0)
    device_s = 0.004 + (2.2e-5 * new + 4e-10 * squares + 4e-9 * sum(c * n for c, n in items)) / dop
    return max(host_s, device_s)


def decode_s(dop: int, busiest: int, kv_tokens: int) -> float:
    """Padded products, and attention that is all latency over little KV."""
    rows = next(size for size in ROWS if size >= busiest)
    return max(0.0048, 0.004 + 3e-5 * rows) + max(3e-4, 4e-7 * kv_tokens / dop)


class Gpus(FakeWorkers):
    """Times within 2 % of what they should be, and one in 40 half as long again."""

    def __init__(self, num_instances: int, seed: int) -> None:
        super().__init__(num_instances)
        self.padded_sizes = {1: PaddedSizes(SIZES, SIZES), 2: PaddedSizes(DEALT, DEALT)}
        self._rng = random.Random(seed)

    def time_s(self, step: RunStep) -> float:
        items, dop = lengths_of(step), len(step.members)
        noise = self._rng.uniform(0.98, 1.02) * (1.5 if self._rng.random() < 1 / 40 else 1.0)
        if step.batch[0].master is None:
            return prefill_s(dop, items) * noise
        busiest = max(Counter(extend.master for extend in step.batch).values())
        first_s = 0.0 if step.follows else 0.002 + 2e-4 * len(items)
        return decode_s(dop, busiest, sum(c + n for c, n in items)) * noise + first_s


async def profiled(num_instances: int, monkeypatch: pytest.MonkeyPatch) -> Sib:
    monkeypatch.setattr(grid, "QUICK", SHORT)
    profiler, sib = make_profiler(Gpus(num_instances, seed=1), "gpu x")
    async for _ in profiler.run(ProfileRequest(quick=True, save=False)):
        pass
    return sib


@pytest.mark.parametrize("num_instances", [1, 2])
async def test_unseen_batches_are_foreseen(
    num_instances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The goal of `tools/bench_sib.py`, and that its own check says so."""
    sib = await profiled(num_instances, monkeypatch)
    for dop in range(1, num_instances + 1):
        errors = [
            abs(sib.prefill_s(dop, items) / prefill_s(dop, list(items)) - 1)
            for items in grid.random_prefills(4000, 60, 4000, seed=11, count=60)
        ]
        assert sum(errors) / len(errors) < 0.03
        assert max(errors) < 0.10
        errors = []
        for masters in range(1, dop + 1):
            for size in grid.random_decodes(48, masters, 128, seed=12, count=40):
                kv = sum(60 * blocks + 17 for blocks in size.blocks)
                step = {"dop": dop, "num_masters": masters, "batch": size.batch, "kv_tokens": kv}
                expected = decode_s(dop, ceil(size.batch / masters), kv)
                errors.append(abs(sib.decode_s(**step) / expected - 1))
        assert sum(errors) / len(errors) < 0.02
        assert max(errors) < 0.10
    profiler, _ = make_profiler(Gpus(num_instances, seed=2), "gpu x")
    profiler._sib = sib
    words = [w async for w in profiler.run(ProfileRequest(quick=True, check=True, seed=5))]
    found = words[-1]["check"]
    assert found["num_points"] >= 20 * num_instances
    assert found["mean"] < 0.04
    assert found["worst"] < 0.10


async def test_replayed_steps_are_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sib = await profiled(2, monkeypatch)
    for fit in sib.profile.prefill:
        assert fit.detail is not None
        kinds = [SIZES] if fit.dop == 1 else [DEALT, DEALT]
        assert [list(small.detail.padded_sizes) for small in fit.small] == kinds
        assert fit.small[-1].detail.tile_tokens == 32
        assert fit.detail.padded_sizes == ()
    # a token more is a step of another kind, and never a shorter one
    assert sib.prefill_s(2, [(0, 1537)]) == pytest.approx(2 * 0.012 + 0.001, rel=0.10)
    for dop in (1, 2):
        times = [sib.prefill_s(dop, [(0, new)]) for new in range(1, MAX_TOKENS, 8)]
        assert times == sorted(times)


def step_of(items: Items, dop: int) -> RunStep:
    """As the daemon would send it, older tokens spread evenly."""
    members = list(range(dop))
    batch = [
        Extend(
            request_id=str(number),
            tokens=bytes(4 * new),
            start=cached,
            master=None,
            segment=number,
            keep=even(new, members),
            cached=[100 + number] if cached else [],
            holders=members if cached else [],
            sampling=Sampling(),
            holder_tokens=[count for _, count in even(cached, members)],
        )
        for number, (cached, new) in enumerate(items)
    ]
    return RunStep(step_id=1, epoch=1, members=members, batch=batch)


@pytest.mark.parametrize("dop", [1, 2, 4])
def test_the_limits_of_replayed_steps_are_those_of_the_workers(dop: int) -> None:
    """So that steps are foreseen as what they are; asked of both for steps around each limit."""
    prompts, chunks = (
        prefill_layout.BUCKETS if dop == 1 else striped_layout.padded_sizes(dop, older=older)
        for older in (False, True)
    )
    kinds = small_limits(dop, prompts[-1], chunks[-1])
    edges = [size + more for size in (prompts[-1], chunks[-1]) for more in (0, 1)]
    rng = random.Random(dop)
    steps: list[Items] = [[(0, 1)] * count for count in (1, 30, 31, 32, 33)]
    steps += [[(0, 512), (0, new)] for new in (511, 512, 513)]
    for _ in range(400):
        new = rng.choice([100, 256, 257, 319, 320, 513, 700, 2048, 2049, *edges])
        cached = rng.choice([0, rng.randrange(dop, 400_000)])
        steps.append([(cached, new)] + [(0, 9)] * rng.choice([0, 0, 3]))
    most = prompts[-1]
    for _ in range(100):  # ragged ones, of which the first member has more than its share
        count = rng.randint(2, 31)
        each = [rng.randint(max(1, most // count - 40), most // count) for _ in range(count)]
        steps.append([(0, new) for new in each])
    assert SMALL_DEALT_TOKENS == striped_layout.LEAST_TOKENS
    found = set()
    for items in steps:
        step = step_of(items, dop)
        alone = dop == 1 and prefill_layout.bucket_of(step, 0) is not None
        few = sum(new for _, new in items) <= MOST_EXCHANGED_TOKENS
        work = GroupWork.of(step) if few else StripedWork.of(step)
        together = dop > 1 and work is not None
        held = [
            sum(
                n * dict(zip(e.holders, e.holder_tokens, strict=True)).get(member, 0)
                for e, (_, n) in zip(step.batch, items, strict=True)
            )
            for member in range(dop)
        ]
        if len(set(held)) == 1:  # spread as evenly as is assumed
            replayed = any(limits.covers(items) for limits in kinds)
            assert replayed == (alone or together), items
            found.add(alone or together)
    assert found == {True, False}
