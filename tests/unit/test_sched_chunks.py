"""Sizes of chunks where a profile knows more than the formula."""

import msgspec
import pytest
from sched_kit import make_sib

from loongd.sched.chunks import Pace, aligned_up, in_one_step, left_s, next_chunk
from loongd.sched.policy import Limits
from loongd.sched.sib import Sib
from loongd.sched.sib_detail import PrefillDetail

LIMITS = Limits(max_prefill_wait_s=0.3)
DETAIL = PrefillDetail(
    step_s=0.004,
    item_s=0.0,
    many_s=0.0,
    chunk_s=0.0,
    chunk_token_s=0.0,
    cached_s=0.0,
    square_s=5e-10,
    cross_s=5e-10,
    token_s=2e-5,
    rows=((0, 0.0), (1_000_000, 20.0)),
    few_tokens=1024,
)


def sib_of(few_s: float) -> Sib:
    """With what the first new tokens of a chunk cost more, for each cached token."""
    plain = make_sib(fixed_s=0.004, token_s=2e-5, square_s=5e-10, max_dop=1).profile
    (fit,) = plain.prefill
    detail = msgspec.structs.replace(DETAIL, few_s=few_s)
    fits = [msgspec.structs.replace(fit, detail=detail)]
    return Sib(msgspec.structs.replace(plain, prefill=fits))


def chunk(sib: Sib, cached: int) -> int:
    return next_chunk(sib, 1, cached=cached, left=1_000_000, pace=in_one_step(LIMITS))


@pytest.mark.parametrize("cached", [0, 40_000, 160_000])
def test_a_chunk_adds_its_fixed_time_where_nothing_else_is_known(cached: int) -> None:
    sib = sib_of(0.0)
    halves_s = left_s(sib, 1, cached=cached, left=2048, pace=Pace(0.3, 1024))
    assert halves_s == pytest.approx(sib.prefill_s(1, [(cached, 2048)]) + 0.004)
    assert 0.2 < sib.prefill_s(1, [(cached, chunk(sib, cached))]) <= 0.3


@pytest.mark.parametrize("few_s", [0.0, 1e-11, 1e-10, 1e-9])
@pytest.mark.parametrize("cached", [0, 40_000, 160_000, 640_000])
def test_a_chunk_is_the_largest_within_the_bound_by_all_that_is_known(
    few_s: float, cached: int
) -> None:
    """But at least half of what the formula says, however slow few queries are."""
    sib, by_formula = sib_of(few_s), chunk(sib_of(0.0), cached)
    size = chunk(sib, cached)
    assert aligned_up(size, 1) == size
    assert by_formula / 2 - 512 < size <= by_formula
    takes_s, longer_s = (
        sib.prefill_s(1, [(cached, one)]) for one in (size, aligned_up(size + 1, 1))
    )
    assert longer_s > 0.3
    assert takes_s <= 0.3 or size <= aligned_up(by_formula // 2 + 512, 1)


def test_a_profile_that_is_faster_than_its_formula_makes_chunks_larger() -> None:
    slow = sib_of(0.0).profile
    (fit,) = slow.prefill
    halved = {
        name: getattr(DETAIL, name) / 2 for name in ("step_s", "square_s", "cross_s", "token_s")
    }
    rows = tuple((place, seconds / 2) for place, seconds in DETAIL.rows)
    detail = msgspec.structs.replace(DETAIL, rows=rows, **halved)
    sib = Sib(msgspec.structs.replace(slow, prefill=[msgspec.structs.replace(fit, detail=detail)]))
    size = chunk(sib, 40_000)
    assert size > 1.5 * chunk(Sib(slow), 40_000)
    assert sib.prefill_s(1, [(40_000, size)]) <= 0.3
    assert sib.prefill_s(1, [(40_000, aligned_up(size + 1, 1))]) > 0.3


def test_what_chunks_add_is_foreseen() -> None:
    sib = sib_of(1e-10)
    total, left, spent_s = 200_000, 200_000, 0.0
    while left:
        size = next_chunk(sib, 1, cached=total - left, left=left, pace=in_one_step(LIMITS))
        spent_s += sib.prefill_s(1, [(total - left, size)])
        left -= size
    assert spent_s > 1.05 * sib.prefill_s(1, [(0, total)])
    all_s = left_s(sib, 1, cached=0, left=total, pace=in_one_step(LIMITS))
    assert all_s == pytest.approx(spent_s, rel=0.05)
