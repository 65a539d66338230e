"""Sizes of chunks where a profile knows more than the formula."""

import msgspec
import pytest
from sched_kit import make_sib

from loongd.sched.chunks import (
    HOST_S,
    OVERHEAD_SHARE,
    PATIENCE,
    added_s,
    aligned_up,
    left_s,
    next_chunk,
)
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
    return next_chunk(sib, 1, cached=cached, left=1_000_000, limits=LIMITS)


@pytest.mark.parametrize("cached", [0, 40_000, 160_000])
def test_a_chunk_adds_its_fixed_time_where_nothing_else_is_known(cached: int) -> None:
    sib = sib_of(0.0)
    assert added_s(sib, 1, cached=cached, size=1024) == pytest.approx(0.004)
    assert 0.2 < sib.prefill_s(1, [(cached, chunk(sib, cached))]) <= 0.3


@pytest.mark.parametrize("few_s", [1e-11, 1e-10, 1e-9])
@pytest.mark.parametrize("cached", [40_000, 160_000, 640_000])
def test_a_chunk_that_loses_much_is_longer_by_as_much(few_s: float, cached: int) -> None:
    """As long as it loses more than its share, and twice the lost share beyond the bound at most;
    the next size would lose too little to be worth it, or take too long."""
    sib = sib_of(few_s)
    size = chunk(sib, cached)

    def lost(of: int) -> float:
        more_s = added_s(sib, 1, cached=cached, size=of) + HOST_S
        return min(more_s / sib.prefill_s(1, [(cached, of)]), 1.0)

    assert size >= chunk(sib_of(0.0), cached)
    if lost(size) > OVERHEAD_SHARE * 1.01:
        longer_s = sib.prefill_s(1, [(cached, aligned_up(size + 1, 1))])
        assert longer_s > 0.3 * (1 + PATIENCE * lost(size))
    if size > chunk(sib_of(0.0), cached):
        assert sib.prefill_s(1, [(cached, size)]) <= 0.3 * (1 + PATIENCE)


def test_what_chunks_add_is_foreseen() -> None:
    sib = sib_of(1e-10)
    total, left, spent_s = 200_000, 200_000, 0.0
    while left:
        size = next_chunk(sib, 1, cached=total - left, left=left, limits=LIMITS)
        spent_s += sib.prefill_s(1, [(total - left, size)])
        left -= size
    assert spent_s > 1.05 * sib.prefill_s(1, [(0, total)])
    assert left_s(sib, 1, cached=0, left=total, limits=LIMITS) == pytest.approx(spent_s, rel=0.05)
