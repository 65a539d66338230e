"""Profiling against workers with a formula of their own; files; sizes."""

import asyncio
import dataclasses
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from profile_kit import FACTS, MAX_TOKENS, SHORT, FakeWorkers, make_profiler

from loongd import ctl_speed
from loongd.errors import ConfigError, WorkerError
from loongd.profiling import grid, store
from loongd.profiling.bench import Bench, even
from loongd.profiling.facts import device_key
from loongd.profiling.made import Subject
from loongd.profiling.profiler import ProfileRequest
from loongd.profiling.session import Session
from loongd.sched.sib import Sib, default_profile
from loongd.sched.sib_detail import small_limits
from loongd.wire import PaddedSizes, RunStep, StepDone


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "QUICK", SHORT)


async def run(workers: FakeWorkers, **asked: Any) -> tuple[list[dict[str, Any]], Sib]:
    profiler, sib = make_profiler(workers)
    words = [word async for word in profiler.run(ProfileRequest(quick=True, **asked))]
    return words, sib


@pytest.mark.parametrize("num_instances", [1, 2, 4])
async def test_a_profile_finds_the_formula_of_the_workers(num_instances: int) -> None:
    workers = FakeWorkers(num_instances)
    words, sib = await run(workers, save=False)
    fractions = [word["fraction"] for word in words if "stage" in word]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert words[-1]["path"] is None
    assert workers.num_used == 0
    assert workers.most_used > 100
    assert sib.profile.measured
    assert sib.max_dop == num_instances
    for dop in range(1, num_instances + 1):
        items = [(1000, 300), (0, 77)]
        expected = 0.0012 + (2e-5 * 377 + 1e-9 * (1300**2 - 1000**2 + 77**2)) / dop
        assert sib.prefill_s(dop, items) == pytest.approx(expected, rel=0.02)
        for masters in range(1, dop + 1):
            expected = 0.002 + 2e-4 * ceil(24 / masters) + 5e-7 * 12_345 / dop
            found = sib.decode_s(dop=dop, num_masters=masters, batch=24, kv_tokens=12_345)
            assert found == pytest.approx(expected, rel=0.02)
    read_back = msgspec.convert(words[-1]["profile"], type(sib.profile))
    assert read_back == sib.profile


async def test_steps_spoiled_by_the_machine_do_not_spoil_the_profile() -> None:
    _, sib = await run(FakeWorkers(1, spoil=5.0), save=False)
    assert sib.prefill_s(1, [(0, 1000)]) == pytest.approx(0.0011 + 0.020 + 0.001, rel=0.1)


class Unsteady(FakeWorkers):
    """Every other step takes half as long again."""

    def time_s(self, step: RunStep) -> float:
        return super().time_s(step) * (1.5 if self.num_steps % 2 else 1.0)


async def test_a_profile_of_steps_that_scatter_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    words, sib = await run(Unsteady(1))
    doubt = words[-1]["doubt"]
    assert doubt.startswith("not to be trusted: measured steps typically took ")
    assert doubt in caplog.text
    assert sib.profile.noise > 0.2
    kept = store.load(Path(words[-1]["path"]))
    assert kept.doubt == doubt
    assert doubt in kept.source
    assert kept.versions["attention"] == "cpu-flash"
    shown = ctl_speed.profile(words[-1])
    assert f"{doubt}: profile again when nothing else runs on it" in " ".join(shown.split())
    assert max(map(len, shown.splitlines()[-2:])) <= ctl_speed.WIDTH
    words, sib = await run(Unsteady(1), check=True)
    assert words[-1]["check"]["noise"] > 0.2


async def test_a_profile_of_steady_steps_is_in_no_doubt() -> None:
    words, sib = await run(FakeWorkers(2), save=False)
    assert sib.profile.noise < 0.01
    assert words[-1]["doubt"] == ""
    assert "trusted" not in sib.profile.source
    assert "profile again" not in ctl_speed.profile(words[-1])


async def test_a_check_says_that_the_profile_was_in_doubt() -> None:
    workers = FakeWorkers(1)
    profiler, sib = make_profiler(workers)
    sib.replace(msgspec.structs.replace(sib.profile, noise=0.4))
    words = [w async for w in profiler.run(ProfileRequest(quick=True, check=True))]
    assert "this profile is not to be trusted: " in ctl_speed.check(words[-1]["check"])


class Clocked(FakeWorkers):
    """Knows how long its steps have taken altogether."""

    now_s = 0.0

    def time_s(self, step: RunStep) -> float:
        took_s = super().time_s(step)
        self.now_s += took_s * self.slow
        return took_s


async def test_a_profile_takes_no_longer_than_it_says() -> None:
    """A clock that only steps move; warm-ups count as well."""
    workers = Clocked(2, slow=40.0)
    subject = Subject(facts=FACTS, device="cpu x", dtype="float32", tp=1, max_tokens=MAX_TOKENS)
    with workers.exclusive() as exclusive:
        bench = Bench(exclusive, vocab_size=300, max_tokens=MAX_TOKENS)
        effort = dataclasses.replace(grid.QUICK, total_s=40.0).on_cpu()
        session = Session(bench, effort, 1, clock=lambda: workers.now_s)
        words = [word async for word in session.profile(subject, quick=True)]
    stages = [word for word in words if "stage" in word]
    assert stages[0]["left_s"] == 120.0
    assert all(a["left_s"] >= b["left_s"] for a, b in pairwise(stages[:-2]))
    assert 60.0 < workers.now_s < 130.0, "176 s for as many runs as are wanted"


async def test_a_check_is_content_with_what_it_measured_and_not_with_other_workers() -> None:
    _, sib = await run(FakeWorkers(2), save=False)
    for slow, good in ((1.0, True), (1.2, False)):
        workers = FakeWorkers(2, slow=slow)
        profiler, _ = make_profiler(workers)
        profiler._sib = sib
        words = [w async for w in profiler.run(ProfileRequest(quick=True, check=True))]
        found = words[-1]["check"]
        assert workers.num_used == 0
        assert found["num_points"] >= 20
        assert {point["phase"] for point in found["points"]} == {"prefill", "decode"}
        assert (found["worst"] < 0.05) == good
        assert (found["mean"] > 0.1) == (not good)


async def test_workers_that_are_too_slow_for_any_batch_are_profiled_all_the_same() -> None:
    _, sib = await run(FakeWorkers(2, slow=300.0), save=False)
    alone, one, two = sib.profile.decode
    assert (alone.max_batch, one.max_batch, two.max_batch) == (4, 4, 8)
    expected = 300 * (0.002 + 2e-4 * 2 + 5e-7 * 500 / 2)
    found = sib.decode_s(dop=2, num_masters=2, batch=4, kv_tokens=500)
    assert found == pytest.approx(expected, rel=0.05)


async def test_a_profile_measures_every_pair_of_instances() -> None:
    words, sib = await run(FakeWorkers(4), save=False)
    migrate = sib.profile.migrate
    assert [link.instances for link in migrate.links] == [
        *((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
    ]
    for link in migrate.links:
        slower = 2 if 3 in link.instances else 1
        assert link.alpha_s == pytest.approx(0.003 * slower, rel=0.01)
        bytes_per_s = FACTS.kv_bytes_per_token / (2e-6 * slower)
        assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)
    assert 0.003 + 2e-6 * 1000 < sib.migrate_s(1000) < 2 * (0.003 + 2e-6 * 1000)
    phases = {point["phase"] for point in words[-1]["points"]}
    assert phases == {"prefill", "launch", "decode", "migrate"}


async def test_one_instance_has_no_link_to_measure() -> None:
    _, sib = await run(FakeWorkers(1), save=False)
    assert sib.profile.migrate.links == []
    assert "derived from constants" in sib.profile.source


async def test_a_profile_is_saved_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    words, sib = await run(FakeWorkers(1))
    path = Path(words[-1]["path"])
    assert path.parent == tmp_path / "profiles"
    found = store.find(store.places({"STATE_DIRECTORY": str(tmp_path)}), **match())
    assert found == (path, sib.profile)


async def test_a_failing_step_ends_the_profile_in_words_and_frees_everything() -> None:
    workers = FakeWorkers(2)
    workers.fail_step = 40
    with pytest.raises(WorkerError, match="instance 0: out of slots"):
        await run(workers, save=False)
    assert workers.num_used == 0


async def test_a_lost_worker_ends_the_profile_in_words() -> None:
    workers = FakeWorkers(2)
    workers.lose_at = 40
    with pytest.raises(WorkerError, match="instance 0 is lost: killed by signal 9"):
        await run(workers, save=False)


async def test_a_reader_that_goes_away_leaves_an_empty_pool() -> None:
    workers = FakeWorkers(1)
    profiler, _ = make_profiler(workers)
    words = profiler.run(ProfileRequest(quick=True, save=False))
    async for word in words:
        if "steps" in word["stage"]:
            break
    assert workers.num_used > 0
    await words.aclose()
    assert workers.num_used == 0


async def test_reports_of_other_steps_are_skipped() -> None:
    workers = FakeWorkers(1)
    with workers.exclusive() as exclusive:
        bench = Bench(exclusive, vocab_size=300, max_tokens=100)
        bench.group(1)
        exclusive.put(StepDone(0, 12, 99.0, []))
        assert await asyncio.wait_for(bench.prefill([(0, 10)]), 5) < 1.0


# ---- pure parts ----------------------------------------------------------------------------------


def match() -> dict[str, Any]:
    return {"shape": FACTS.key, "device": "cpu x", "tp": 1}


def test_even_spreads_all_tokens() -> None:
    assert even(7, [3, 5, 9]) == [(3, 3), (5, 2), (9, 2)]
    assert even(1, [3, 5]) == [(3, 1)]


def test_the_typical_time_is_neither_the_first_nor_a_slow_nor_the_fastest_one() -> None:
    assert grid.typical([5.0]) == 5.0
    assert grid.typical([60.0, 9.0]) == 9.0
    assert grid.typical([60.0, 1.2, 1.0]) == 1.0
    assert grid.typical([1.0, 1.2, 1.1, 50.0, 60.0, 1.0, 1.3]) == 1.2
    assert grid.spread([9.0, 2.0, 1.0, 3.0]) == 1.0


def test_rounds_grow_with_short_steps_and_never_fall_below_the_fewest() -> None:
    effort = dataclasses.replace(grid.QUICK, min_rounds=2, max_rounds=7, point_s=0.5)
    assert [effort.rounds(s) for s in (0.001, 0.1, 0.2, 10.0)] == [7, 5, 2, 2]
    assert [effort.on_cpu().rounds(s) for s in (0.001, 0.1, 0.2, 10.0)] == [14, 10, 5, 5]


@pytest.mark.parametrize("longest", [16, 100, 8192])
def test_prefill_sizes_stay_inside_what_is_asked(longest: int) -> None:
    most_cached = 3 * longest
    block = max(longest * 3 // 4 // grid.NUM_BLOCKS, 1)
    seen = grid.prefill_sizes(longest, block, most_cached)
    assert len(seen) == len(set(seen))
    assert 0.8 * longest <= max(sum(new for _, new in items) for items in seen) <= max(longest, 64)
    unseen = grid.random_prefills(longest, block, most_cached, seed=2, count=60)
    for items in [*seen, *unseen]:
        assert all(cached % block == 0 and cached <= most_cached for cached, _ in items)
        assert all(cached <= grid.NUM_BLOCKS * block for cached, _ in items)
        assert all(new > 0 for _, new in items)
        assert sum(new for _, new in items) <= max(longest, 64)
    assert grid.prefill_sizes(longest, block, 0)
    more = grid.prefill_sizes(longest, block, most_cached, limit=2 * longest)
    (beyond,) = set(more) - set(seen)
    assert longest < beyond[0][1] <= 2 * longest


@pytest.mark.parametrize("dop", [1, 2, 4])
def test_small_steps_stay_inside_what_is_asked(dop: int) -> None:
    for longest, block, limit in ((32_768, 128 * dop, 131_072), (200, dop, 150), (16, dop, 20)):
        sizes = grid.launch_sizes(longest, block, limit, dop)
        assert sizes
        for items in sizes:
            assert sum(new for _, new in items) <= longest
            assert all(cached + new <= limit and cached % block == 0 for cached, new in items)
            assert all(cached <= grid.NUM_BLOCKS * block for cached, _ in items)
    kinds = [(len(items), items[0][0] > 0) for items in sizes_of_gpu(dop)]
    assert {(1, False), (1, True)} < set(kinds)
    long = [items for items in sizes_of_gpu(dop) if items[0][1] >= 512 * dop]
    assert [items[0][0] >= 2048 * dop for items in long] == [True, True]


@pytest.mark.parametrize("dop", [1, 2, 4])
def test_small_steps_are_measured_beside_replayed_ones_too(dop: int) -> None:
    """Prompts, batches and chunks that are long or not, on both sides of what is replayed."""
    replayed = [16, 256, 2048 if dop == 1 else 5120]
    padded = PaddedSizes(replayed, replayed)
    ways = small_limits(dop, padded.prompts[-1], padded.chunks[-1])

    def is_replayed(items: grid.Items) -> bool:
        return any(limits.covers(items) for limits in ways)

    sizes = grid.launch_sizes(32_768, 1024, 131_072, dop, padded)
    assert len(sizes) == len(set(sizes)) > 20
    plain = set(grid.launch_sizes(32_768, 1024, 131_072, dop))
    # on a group long chunks that are no replays are longer ones
    assert {items for items in plain if dop == 1 or items[0][1] < 512 * dop} < set(sizes)
    kinds = set()
    for items in sizes:
        assert max(map(sum, items)) <= 131_072
        is_long = items[0][0] >= 2048 * dop and items[0][1] >= 512 * dop
        kinds.add((is_replayed(items), len(items) > 1, items[0][0] > 0, is_long))
    batch, prompt, chunk = (True, False, False), (False, False, False), (False, True, False)
    long = (False, True, True)
    assert {(False, *kind) for kind in (batch, prompt, chunk, long)} < kinds
    assert {(True, *kind) for kind in (batch, prompt, chunk)} < kinds
    # chunks up to the largest ones, and some that have too many pairs
    chunks = [items[0] for items in sizes if items[0][0]]
    inside = [one for one in chunks if is_replayed((one,))]
    assert max(new for _, new in inside) >= 0.85 * replayed[-1]
    outside = [new for cached, new in chunks if not is_replayed(((cached, new),))]
    assert dop == 4 or min(outside) < replayed[-1] < max(outside)


def sizes_of_gpu(dop: int) -> list[grid.Items]:
    return grid.launch_sizes(32_768, 128 * dop, 131_072, dop)


@pytest.mark.parametrize("masters", [1, 2, 4])
def test_decode_sizes_stay_inside_what_is_asked(masters: int) -> None:
    seen = grid.decode_sizes(64, masters, most_blocks=40)
    batches = {size.batch for size in seen}
    assert {masters, 2 * masters, 64} == batches & {masters, 2 * masters, 64}
    uneven = {batch for batch in batches if batch % masters}
    assert uneven == ({masters + 1, 2 * masters + 1, 3 * masters + 1} if masters > 1 else set())
    assert max(batches) == 64
    assert {sum(size.blocks) for size in seen} == {0, 8, 32, 128}
    for size in [*seen, *grid.random_decodes(64, masters, 40, seed=3, count=100)]:
        assert masters <= size.batch <= 64
        assert all(0 <= blocks <= 40 for blocks in size.blocks)
        assert sum(size.blocks) <= grid.NUM_BLOCKS


def test_unseen_batches_are_the_same_each_time_and_not_those_of_the_profile() -> None:
    seen = set(grid.prefill_sizes(1024, 4, 2048))
    unseen = grid.random_prefills(1024, 4, 2048, seed=5, count=9)
    assert unseen == grid.random_prefills(1024, 4, 2048, seed=5, count=9)
    assert not seen & set(unseen)
    assert {len(items) for items in grid.random_prefills(1024, 4, 2048, 5, 40)} > {1, 2, 3}
    decodes = grid.random_decodes(64, 1, 128, seed=5, count=9)
    assert decodes == grid.random_decodes(64, 1, 128, seed=5, count=9)
    assert any(len(set(size.blocks)) > 2 for size in decodes)


def test_a_cpu_is_named_by_processor_and_share() -> None:
    assert device_key("NVIDIA H200", num_cores=2, num_workers=2) == "NVIDIA H200"
    assert device_key("cpu", num_cores=8, num_workers=2).endswith(", 4 cores a worker")
    assert device_key("cpu", num_cores=2, num_workers=4).endswith(", 2 cores for 4 workers")
    assert device_key("cpu", num_cores=2, num_workers=2).startswith("cpu ")


def test_the_newest_match_of_the_best_directory_wins(tmp_path: Path) -> None:
    old = default_profile(FACTS, "cpu x", date="2026-01-01")
    new = msgspec.structs.replace(old, date="2026-02-01", model="again")
    other = msgspec.structs.replace(old, device="cpu y", date="2027-01-01")
    best, worse = tmp_path / "a", tmp_path / "b"
    store.save(worse, new)
    assert store.find([best, worse], **match()) is not None
    for profile in (old, new, other):
        store.save(best, profile)
    found = store.find([best, worse], **match())
    assert found is not None
    assert found[0].parent == best
    assert found[1] == new
    assert store.find([best], shape=FACTS.key, device="cpu z", tp=1) is None


def test_a_broken_file_is_said_and_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = default_profile(FACTS, "cpu x", date="2026-01-01")
    store.save(tmp_path, good)
    (tmp_path / "broken.json").write_text("{")
    found = store.find([tmp_path], **match())
    assert found is not None
    assert found[1] == good
    assert "broken.json: not a profile" in caplog.text
    with pytest.raises(ConfigError, match=r"profile .*none\.json: cannot be read: No such file"):
        store.load(tmp_path / "none.json")


def test_places_begin_with_the_state_directory() -> None:
    assert store.places({"STATE_DIRECTORY": "/var/lib/loongd:/x"})[0] == Path(
        "/var/lib/loongd/profiles"
    )
    assert store.state_dir({"XDG_STATE_HOME": "/s"}) == Path("/s/loongd/profiles")


def test_blocks_are_dealt_evenly_and_in_no_order() -> None:
    """A batch whose short requests all stand at its end is slower than any that is served."""
    for total, batch in ((128, 256), (40, 7), (300, 64)):
        blocks = grid.deal(total, batch)
        assert (len(blocks), sum(blocks)) == (batch, total)
        assert max(blocks) - min(blocks) == 1
        assert list(blocks) not in (sorted(blocks), sorted(blocks, reverse=True))
        assert blocks == grid.deal(total, batch)
