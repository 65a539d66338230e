"""Slots: never twice, never lost, and long prompts in one run however short ones come and go."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongd.errors import PlanError
from loongd.worker.slots import ANYWHERE, GROWTH, LONG, SlotAllocator


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
            owned.append(slots.allocate_each(np.array([ANYWHERE if after is None else after])))
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
            short = np.append(short, slots.allocate_each(short[-1:]))
        shorts.append(short)
        for which in (0, 1):
            more = slots.allocate(2048, after=int(long[which][-1]))
            long[which] = np.append(long[which], more)
    for run in (*long, *shorts):
        assert np.all(np.diff(run) == 1)


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=30),
    frees=st.sets(st.integers(0, 29)),
    room=st.integers(0, 40),
)
def test_one_slot_each_stands_behind_where_it_can(
    lengths: list[int], frees: set[int], room: int
) -> None:
    """Whoever has a free slot right behind gets it; the others get any, and nobody gets two."""
    slots = SlotAllocator(sum(lengths) + room)
    owned = [slots.allocate(count) for count in lengths]
    for number in frees & set(range(len(owned))):
        slots.free(owned[number])
    live = [one for number, one in enumerate(owned) if number not in frees]
    last = np.array([one[-1] if len(one) else ANYWHERE for one in live], np.int64)
    used = {slot for one in live for slot in one.tolist()}
    free = set(range(slots.total)) - used
    if len(last) > slots.num_free:
        with pytest.raises(PlanError):
            slots.allocate_each(last)
        assert slots.num_free == len(free)
        return
    given = slots.allocate_each(last).tolist()
    slots.check()
    assert len(set(given)) == len(given)
    assert set(given) <= free
    for slot, before in zip(given, last.tolist(), strict=True):
        assert slot == before + 1 or before + 1 not in free


def test_a_full_pool_gives_what_is_left() -> None:
    slots = SlotAllocator(2 * GROWTH)
    first = slots.allocate(GROWTH + 1)
    assert len(slots.allocate(GROWTH - 1)) == GROWTH - 1
    assert slots.num_free == 0
    slots.free(first)
    assert len(slots.allocate(GROWTH + 1)) == GROWTH + 1
    slots.check()
