"""Measured details of a profile: their formulas, their guards, and fits of made-up machines.

The machines behave as GPUs do where no line follows: launches that hide small work, tiles,
attention that is slow for short prompts, captured batch sizes. They know nothing of the fitted
formulas.
"""

import random
from collections.abc import Callable
from math import ceil

import msgspec
import pytest
from test_sib import profile

from loongd.errors import ConfigError
from loongd.kernels import cudnn
from loongd.profiling import grid
from loongd.sched.sib import Profile, Sib, dump_profile, parse_profile
from loongd.sched.sib_detail import (
    LONG_CACHED_TOKENS,
    LONG_NEW_TOKENS,
    SMALL_DEALT_TOKENS,
    DecodeGrid,
    HostCosts,
    PrefillDetail,
    SmallLimits,
    SmallSteps,
    look_up,
)
from loongd.sched.sib_fit import (
    PrefillPoint,
    fit_prefill,
)
from loongd.sched.sib_fit_detail import fit_measured

DETAIL = PrefillDetail(
    step_s=0.010,
    item_s=0.001,
    many_s=0.002,
    chunk_s=0.003,
    chunk_token_s=1e-5,
    cached_s=1e-6,
    square_s=1e-8,
    cross_s=2e-8,
    token_s=5e-5,
    rows=((16, 0.001), (100, 0.004), (1000, 0.040)),
    host=HostCosts(step_s=0.020, item_s=0.004, chunk_s=0.001),
)
GRID = DecodeGrid(
    batches=(1, 2, 8),
    kv_tokens=(0, 100, 1000),
    times_s=((0.010, 0.011, 0.020), (0.012, 0.013, 0.022), (0.018, 0.020, 0.034)),
)


def detailed() -> Profile:
    """The profile of `test_sib` with details for one instance and for four with one master."""
    plain = profile()
    replace = msgspec.structs.replace
    first, *others = plain.prefill
    alone, one, four = plain.decode
    return replace(
        plain,
        prefill=[replace(first, detail=DETAIL), *others],
        decode=[alone, replace(one, grid=GRID), four],
    )


# ---- formulas ------------------------------------------------------------------------------------


def test_a_table_is_linear_between_its_rows() -> None:
    table = ((10, 1.0), (20, 3.0))
    found = [look_up(table, at, beyond=0.5) for at in (0, 10, 15, 20, 24)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 5.0])


def test_the_slower_of_host_and_device_counts() -> None:
    sib = Sib(detailed())
    assert sib.prefill_s(1, [(0, 16)]) == pytest.approx(0.024)
    assert sib.prefill_s(1, [(0, 16), (50, 16)]) == pytest.approx(0.020 + 2 * 0.004 + 0.001)
    device = 0.010 + 2 * 0.001 + 0.002 + 0.003 + 400e-5 + 0.040 + 1e-8 * (600**2 + 400**2)
    device += 2e-8 * 2 * 300 * 400 + 300e-6
    assert sib.prefill_s(1, [(0, 600), (300, 400)]) == pytest.approx(device)
    assert sib.prefill_s(1, [(0, 2000)]) == pytest.approx(0.011 + 0.040 + 0.050 + 0.040)


def test_the_formula_stays_for_sums_and_for_degrees_between() -> None:
    plain, sib = Sib(profile()), Sib(detailed())
    assert sib.prefill_coefficients(1) == plain.prefill_coefficients(1)
    for dop in (2, 4):
        assert sib.prefill_s(dop, [(0, 500)]) == plain.prefill_s(dop, [(0, 500)])


def test_decode_is_looked_up_in_the_grid_and_goes_on_by_the_formula() -> None:
    sib = Sib(detailed())

    def time_s(batch: int, kv_tokens: int) -> float:
        return sib.decode_s(dop=4, num_masters=1, batch=batch, kv_tokens=kv_tokens)

    assert time_s(2, 400) == pytest.approx(0.013)
    # Half way from 2 to 8, a third of the way from 100 to 1000: each member reads a quarter.
    at_400 = (0.013 + (0.022 - 0.013) / 3 + 0.020 + (0.034 - 0.020) / 3) / 2
    assert time_s(5, 1600) == pytest.approx(at_400)
    # Beyond: 1e-4 a request and 1e-6 a token, as the coefficients say.
    assert time_s(10, 8000) == pytest.approx(0.034 + 2e-4 + 1e-3)


def test_masters_without_a_request_cost_nothing() -> None:
    sib = Sib(profile())
    step = {"dop": 4, "kv_tokens": 1000}
    one = sib.decode_s(**step, num_masters=1, batch=1)
    assert sib.decode_s(**step, num_masters=4, batch=1) == one
    two = sib.decode_s(**step, num_masters=2, batch=2)
    assert one < two == sib.decode_s(**step, num_masters=3, batch=2)


def test_no_detailed_prediction_falls_when_work_is_added() -> None:
    rng = random.Random(5)
    sib = Sib(detailed())
    for _ in range(500):
        items = [(rng.choice([0, 700]), rng.randint(1, 900)) for _ in range(rng.randint(1, 5))]
        base = sib.prefill_s(1, items)
        cached, new = items[0]
        assert sib.prefill_s(1, [*items, (0, 1)]) >= base
        assert sib.prefill_s(1, [(cached, new + rng.randint(1, 50)), *items[1:]]) >= base
        assert sib.prefill_s(1, [(cached + 1, new), *items[1:]]) >= base
        batch, kv = rng.randint(1, 30), rng.randrange(9000)
        decode = sib.decode_s(dop=4, num_masters=1, batch=batch, kv_tokens=kv)
        assert sib.decode_s(dop=4, num_masters=1, batch=batch + 1, kv_tokens=kv) >= decode
        assert sib.decode_s(dop=4, num_masters=1, batch=batch, kv_tokens=kv + 90) >= decode


SMALL = SmallSteps(
    limits=SmallLimits(
        most_items=2, most_tokens=256, most_pairs=90_000, least_paired=40, own_paired=True
    ),
    detail=msgspec.structs.replace(
        DETAIL, host=None, step_s=0.004, padded_sizes=(64, 256), tile_tokens=32
    ),
)


def test_replayed_steps_have_times_of_their_own() -> None:
    first, *others = detailed().prefill
    both = msgspec.structs.replace(first, small=(SMALL,))
    sib = Sib(msgspec.structs.replace(detailed(), prefill=[both, *others]))
    small, large = SMALL.detail.time_s, DETAIL.time_s
    replayed = [[(0, 256)], [(0, 100), (0, 100)], [(500, 128)], [(0, 20), (2500, 39)]]
    others_ = [[(0, 257)], [(0, 9)] * 3, [(600, 129)], [(0, 39), (2500, 40)]]
    assert [sib.prefill_s(1, items) for items in replayed] == [small(i) for i in replayed]
    assert [sib.prefill_s(1, items) for items in others_] == [large(i) for i in others_]
    # queries of chunks come in tiles, rows in sizes, and nothing larger is faster
    assert sib.prefill_s(1, [(500, 97)]) - sib.prefill_s(1, [(500, 96)]) > 2e-8 * 2 * 500 * 31
    slow = msgspec.structs.replace(SMALL, detail=msgspec.structs.replace(DETAIL, step_s=1.0))
    assert msgspec.structs.replace(first, small=(slow,)).time_s([(0, 257)]) == slow.most_s > 1.0


def test_queries_that_are_dealt_out_come_in_a_tile_of_each_member() -> None:
    shared = msgspec.structs.replace(DETAIL, host=None, few_s=0.0, tile_tokens=32, dealt=2)

    def pairs(new: int) -> float:
        """Queries that are paired with 10,000 older tokens, beyond 5,000 ones."""
        more_s = shared.time_s([(10_000, new)]) - shared.time_s([(5_000, new)])
        return (more_s / 5_000 - shared.cached_s) / (2 * shared.cross_s)

    assert pairs(SMALL_DEALT_TOKENS - 1) == pytest.approx(256)
    assert pairs(SMALL_DEALT_TOKENS) == pytest.approx(320)
    assert pairs(33) == pytest.approx(64)
    assert pairs(321) == pytest.approx(384)


def test_few_queries_count_as_half_a_tile() -> None:
    """A half tile's own kernel takes them, whatever it costs; one more needs a whole tile."""
    halves = msgspec.structs.replace(DETAIL, tile_tokens=128, half_tokens=80)
    whole = msgspec.structs.replace(halves, half_tokens=0)
    for new, tokens in ((1, 80), (64, 80), (65, 128), (128, 128), (129, 256)):
        cost_s = 2 * 5000 * (halves.cross_s + halves.few_s) * (-(-new // 128) * 128 - tokens)
        saved_s = whole.time_s([(5000, new)]) - halves.time_s([(5000, new)])
        assert saved_s == pytest.approx(cost_s, abs=1e-12)
    assert halves.cross_s > 0
    assert halves.fault() == ""
    less = msgspec.structs.replace(halves, half_tokens=63)
    assert less.fault() == "half_tokens must be half of tile_tokens or more, or 0"


def test_the_first_cached_tokens_cost_more() -> None:
    early = msgspec.structs.replace(DETAIL, host=None, early_s=1e-8, early_tokens=300)
    plain = msgspec.structs.replace(DETAIL, host=None)
    for cached, counted in ((0, 0), (200, 200), (300, 300), (900, 300)):
        items = [(cached, 50), (0, 7)]
        more = early.time_s(items) - plain.time_s(items)
        assert more == pytest.approx(1e-8 * 2 * counted * 50, abs=1e-12)


# ---- files ---------------------------------------------------------------------------------------


def test_details_survive_their_file_which_people_can_read() -> None:
    text = dump_profile(detailed())
    assert parse_profile(text, where="x") == detailed()
    first, *others = detailed().prefill
    small = msgspec.structs.replace(first, small=(SMALL,))
    both = msgspec.structs.replace(detailed(), prefill=[small, *others])
    assert parse_profile(dump_profile(both), where="x") == both
    bad = msgspec.json.decode(dump_profile(both))
    bad["prefill"][0]["small"][0]["detail"]["tile_tokens"] = 0
    with pytest.raises(ConfigError, match="x: dop 1: tile_tokens must be 1 or more"):
        parse_profile(msgspec.json.encode(bad), where="x")
    assert "[ 0.012, 0.013, 0.022 ]" in text
    assert len(text.splitlines()) < 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"square_s": -1.0}, r"x: dop 1: \['square_s'\] must not be negative"),
        ({"host": {"step_s": 1, "item_s": -1, "chunk_s": 0}}, r"dop 1: \['host item_s'\] must"),
        ({"rows": [[10, 2.0], [20, 1.0]]}, "dop 1: rows must be ascending"),
        ({"rows": [[20, 1.0], [10, 2.0]]}, "dop 1: rows must be ascending"),
        ({"rows": []}, "dop 1: rows must be ascending"),
    ],
)
def test_a_prefill_detail_that_would_fall_is_refused(
    change: dict[str, object], message: str
) -> None:
    data = msgspec.json.decode(dump_profile(detailed()))
    data["prefill"][0]["detail"] |= change
    with pytest.raises(ConfigError, match=message):
        parse_profile(msgspec.json.encode(data), where="x")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": [1, 8, 2]}, "batches and kv_tokens must be ascending"),
        ({"kv_tokens": [0, 100]}, "a time for each"),
        ({"times_s": [[1, 2, 3], [1, 2, 3]]}, "a time for each"),
        ({"times_s": [[1, 2, 3], [1, 2, 2.5], [2, 3, 4]]}, "not fall"),
        ({"times_s": [[0, 2, 3], [1, 2, 3], [2, 3, 4]]}, "above 0"),
    ],
)
def test_a_grid_that_would_fall_is_refused(change: dict[str, object], message: str) -> None:
    data = msgspec.json.decode(dump_profile(detailed()))
    data["decode"][1]["grid"] |= change
    with pytest.raises(ConfigError, match=f"x: dop 4: .*{message}"):
        parse_profile(msgspec.json.encode(data), where="x")


# ---- fits of made-up machines --------------------------------------------------------------------

Prefill = Callable[[grid.Items], float]
LONGEST, BLOCK, MOST_CACHED = 32_768, 1024, 98_304


def gpu_alone(items: grid.Items, warmth: float = 1.0) -> float:
    """Tiles of 128 rows, attention that needs 200 tokens to be half as fast as it can be."""
    new = sum(n for _, n in items)
    launch_s = (0.0175 + 4e-4 * len(items)) / warmth
    linear_s = 0.004 + 2.1e-5 * 128 * ceil(new / 128)
    attention_s = sum(4.5e-10 * n * (n + 2 * c) * (1 + 200 / n) for c, n in items)
    return max(launch_s, linear_s + attention_s + 5e-5 * len(items))


def gpu_group(items: grid.Items, warmth: float = 1.0) -> float:
    """Two of them: launches for each request and exchange, queries of chunks that travel, and
    attention of long chunks in pieces."""
    new = sum(n for _, n in items)
    chunks = [(c, n) for c, n in items if c]
    pieces = sum(c >= 4096 and n >= 1024 for c, n in chunks)
    launch_s = (0.031 + 1.6e-3 * len(items) + 1e-2 * len(chunks) + 3e-2 * pieces) / warmth
    linear_s = 0.005 + 1.05e-5 * 64 * ceil(new / 128)
    attention_s = sum(2.4e-10 * n * (n + 2.4 * c) * (1 + 300 / n) for c, n in items)
    travel_s = 3e-6 * sum(n for _, n in chunks)
    return max(launch_s, 2 * linear_s / 1.0 + attention_s + travel_s)


def cpu(items: grid.Items, warmth: float = 1.0) -> float:
    """No launches to speak of; products of few rows are slow, and one row is not."""
    del warmth
    new = sum(n for _, n in items)
    rows_s = 8e-4 * new if new < 64 else 0.05 + 2.5e-4 * (new - 64)
    return 0.02 + rows_s + 1e-3 * len(items) + sum(2e-8 * n * (n + 3 * c) for c, n in items)


def launch_points(machine: Prefill, dop: int, rng: random.Random) -> list[PrefillPoint]:
    sizes = grid.launch_sizes(LONGEST, 128 * dop, MOST_CACHED, dop)
    return [PrefillPoint(i, machine(i) * (1 + rng.uniform(-0.01, 0.01))) for i in sizes]


@pytest.mark.parametrize(("machine", "dop"), [(gpu_alone, 1), (gpu_group, 2), (cpu, 1)])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("warmth", [1.0, 0.95])
def test_unseen_prefills_of_a_made_up_machine_are_foreseen(
    machine: Callable[..., float], dop: int, seed: int, warmth: float
) -> None:
    """Also where the host was slower while the larger steps were measured."""
    rng = random.Random(seed)
    sizes = grid.prefill_sizes(LONGEST, BLOCK, MOST_CACHED)
    points = [PrefillPoint(i, machine(i, warmth) * (1 + rng.uniform(-0.01, 0.01))) for i in sizes]
    plain = fit_prefill(dop, points)
    fit = fit_measured(dop, points, launch_points(machine, dop, rng))
    assert fit.detail is not None
    assert fit.detail.fault() == ""
    assert (fit.detail.host is None) == (machine is cpu)
    assert fit.error is not None
    assert plain.error is not None
    assert fit.error.mean < plain.error.mean
    unseen = grid.random_prefills(LONGEST, BLOCK, MOST_CACHED, seed=100 + seed, count=60)
    errors = [abs(fit.time_s(items) / machine(items) - 1) for items in unseen]
    assert sum(errors) / len(errors) < 0.03
    assert max(errors) < 0.10


PADDED = (16, 32, 64, *range(128, 1025, 128), 1280, 1536, 1792, 2048)


def gpu_replaying(items: grid.Items, _warmth: float = 1.0) -> float:
    """Small steps are replayed, padded; some sizes are slower than the next one, and attention
    over older tokens is dear for the first 512 new ones."""
    new = sum(n for _, n in items)
    new = next((size for size in PADDED if size >= new), new)
    rows_s = max(5e-3, 2.4e-5 * new) * (1.15 if new % 256 == 128 else 1.0)
    squares = sum(5e-10 * n * (n + 2 * c) for c, n in items)
    return rows_s + squares + sum(c * (4e-8 + 8e-10 * min(n, 512)) for c, n in items)


@pytest.mark.parametrize("seed", range(3))
def test_padded_steps_are_foreseen_by_their_size(seed: int) -> None:
    rng = random.Random(seed)
    sizes = grid.prefill_sizes(LONGEST, BLOCK, MOST_CACHED, padded_sizes=PADDED)
    points = [PrefillPoint(i, gpu_replaying(i) * (1 + rng.uniform(-0.01, 0.01))) for i in sizes]
    launches = launch_points(gpu_replaying, 1, rng)
    fit = fit_measured(1, points, launches, PADDED, PADDED)
    assert fit.detail is not None
    assert fit.detail.fault() == ""
    shortest, longest, next_size = (fit.time_s([(0, n)]) for n in (257, 384, 385))
    assert longest < 1.01 * shortest
    assert next_size > 1.10 * longest
    unseen = grid.random_prefills(LONGEST, BLOCK, MOST_CACHED, seed=100 + seed, count=60)
    errors = [abs(fit.time_s(items) / gpu_replaying(items) - 1) for items in unseen]
    assert sum(errors) / len(errors) < 0.03
    assert max(errors) < 0.10


def gpu_in_pieces(items: grid.Items) -> float:
    """Keys that are attended to in small pieces cost a quarter more than others."""
    new = sum(n for _, n in items)
    attention_s = sum(4e-10 * n * n + 9e-10 * n * (c + min(c, 16_384) / 4) for c, n in items)
    return 0.005 + 2.2e-5 * new + attention_s


@pytest.mark.parametrize("seed", range(3))
def test_long_chunks_over_little_kv_are_foreseen(seed: int) -> None:
    rng = random.Random(seed)
    sizes = grid.prefill_sizes(LONGEST, BLOCK, MOST_CACHED)
    points = [PrefillPoint(i, gpu_in_pieces(i) * (1 + rng.uniform(-0.005, 0.005))) for i in sizes]
    fit = fit_measured(1, points)
    for items in (((14_336, 6648),), ((13_312, 7045),), ((60_416, 12_000),), ((4096, 9000),)):
        assert fit.time_s(items) == pytest.approx(gpu_in_pieces(items), rel=0.015)


@pytest.mark.parametrize("half", [64, 80, 112])
def test_half_tiles_are_told_from_whole_ones(half: int) -> None:
    """Few queries over a long prefix, by a kernel of smaller tiles that takes as long as `half`."""

    def queries_s(items: grid.Items) -> float:
        return 0.005 + sum(
            2e-5 * n + 2e-9 * c * (half if n <= 64 else -(-n // 128) * 128) for c, n in items
        )

    rng = random.Random(half)
    news = (10, 33, 60, 70, 100, 128, 190, 250, 410, 600)
    points = [
        PrefillPoint(items, queries_s(items) * (1 + rng.uniform(-0.005, 0.005)))
        for items in [((c, n),) for n in news for c in (2000, 9000, 40_000, 80_000)]
        + [((0, n),) for n in news]
    ]
    detail = fit_measured(1, points).detail
    assert detail is not None
    assert (detail.tile_tokens, detail.half_tokens) == (128, half)
    for items in (((30_000, 20),), ((50_000, 90),), ((70_000, 300),)):
        assert detail.time_s(items) == pytest.approx(queries_s(items), rel=0.03)


def test_a_formula_that_is_right_gets_no_detail() -> None:
    plain = profile().prefill[0]
    sizes = grid.prefill_sizes(4096, 128, 8192)
    points = [PrefillPoint(items, plain.coefficients.time_s(items)) for items in sizes]
    formula = plain.coefficients.time_s
    launches = launch_points(formula, 1, random.Random(1))
    assert fit_measured(1, points, launches).detail is None
    usual = [p for p in points if all(16 * new >= cached for cached, new in p.items)]
    assert fit_measured(1, points) == fit_prefill(1, usual)
    assert fit_measured(1, points[:8]).detail is None


def test_a_long_chunk_is_one_that_the_kernels_cut_into_pieces() -> None:
    assert cudnn.QUERY_SIZES[-1] == LONG_NEW_TOKENS
    assert cudnn.KEY_SIZES[-1] == LONG_CACHED_TOKENS
    sib = Sib(detailed())
    extra = msgspec.structs.replace(DETAIL.host, long_s=0.5)
    long = msgspec.structs.replace(DETAIL, host=extra)
    for items, is_long in (([(2048, 512)], True), ([(2047, 512)], False), ([(2048, 511)], False)):
        more = long.time_s(items) - sib.prefill_s(1, items)
        assert (more > 0.4) == is_long
