"""Slots: never twice, never lost, and long prompts in one run however short ones come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongd.errors import PlanError
from loongd.worker.slots import GROWTH, LONG, SlotAllocator


@given(
    total=st.integers(0, 3 * LONG),
    moves=st.lists(st.tuples(st.integers(0, 2 * LONG), st.booleans(), st.integers(0, 99))),
)
def test_every_slot_has_one_owner(total: int, moves: list[tuple[int, bool, int]]) -> None:
    slots = SlotAllocator(total)
    owned: list[np.ndarray] = []
    for count, grows, which in moves:
        if owned and count % 3 == 0:
            slots.free(owned.pop(which % len(owned)))
        after = int(owned[which % len(owned)][-1]) if owned and grows else None
        if count > slots.num_free:
            with pytest.raises(PlanError):
                slots.allocate(count, after=after)
        elif count == 1:
            owned.append(np.array([slots.allocate_one(after=after)]))
        elif count:
            owned.append(slots.allocate(count, after=after))
        slots.check()
        everyones = np.concatenate([*owned, np.empty(0, np.int64)])
        assert len(set(everyones.tolist())) == len(everyones) == total - slots.num_free
        assert all(0 <= slot < total for slot in everyones.tolist())


def test_chunks_of_two_long_prompts_stay_runs_among_short_ones() -> None:
    """Short prompts come and answer between the chunks; two long ones grow at a time."""
    slots = SlotAllocator(200_000)
    long = [slots.allocate(8192), slots.allocate(8192)]
    shorts = []
    for number in range(20):
        short = slots.allocate(100 + 37 * number)
        for _ in range(50):
            one = slots.allocate_one(after=int(short[-1]))
            short = np.append(short, one)
        shorts.append(short)
        for which in (0, 1):
            more = slots.allocate(2048, after=int(long[which][-1]))
            long[which] = np.append(long[which], more)
    for run in (*long, *shorts):
        assert np.all(np.diff(run) == 1)


def test_a_full_pool_gives_what_is_left() -> None:
    slots = SlotAllocator(2 * GROWTH)
    first = slots.allocate(GROWTH + 1)
    assert len(slots.allocate(GROWTH - 1)) == GROWTH - 1
    assert slots.num_free == 0
    slots.free(first)
    assert len(slots.allocate(GROWTH + 1)) == GROWTH + 1
    slots.check()
