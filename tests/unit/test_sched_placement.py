"""Where a prompt's KV goes: on the fewest instances, and evenly where it needs several."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loongd.sched.placement import place


def test_one_instance_keeps_all_that_has_room_there() -> None:
    free, reserved = {0: 90, 1: 100, 2: 50}, {0: 0, 1: 20, 2: 0}
    assert place(70, 10, (0, 1, 2), free=free, reserved=reserved) == ((0, 70),)
    assert place(70, 30, (0, 1, 2), free=free, reserved=reserved) == ((0, 35), (1, 35))


def test_a_chunk_goes_where_less_of_its_prompt_is() -> None:
    """The rest of the prompt needs both instances, so that both should end with as much."""
    free, reserved = {0: 700, 1: 760}, {0: 0, 1: 0}
    held = {0: 100, 1: 40}
    where = {"free": free, "reserved": reserved, "held": held, "later_tokens": 900}
    assert place(50, 0, (0, 1), **where) == ((1, 50),)
    assert place(100, 0, (0, 1), **where) == ((1, 80), (0, 20))


def test_a_prompt_that_needs_more_than_the_members_is_spread_over_all_of_them() -> None:
    where = {"free": {0: 100, 1: 100}, "reserved": {0: 0, 1: 0}, "later_tokens": 500}
    assert place(10, 0, (0, 1), **where) == ((0, 5), (1, 5))
    assert place(10, 0, (0, 1), held={0: 50}, **where) == ((1, 10),)


def test_growth_alone_spreads_nothing() -> None:
    assert place(10, 500, (0, 1), free={0: 100, 1: 100}, reserved={0: 0, 1: 0}) == ((0, 10),)


@given(st.data())
def test_shares_are_as_level_as_room_allows(data: st.DataObject) -> None:
    """No token could move to an instance that has room and holds two fewer; and no instance that
    is not needed has any."""
    members = range(data.draw(st.integers(1, 5)))
    numbers = st.integers(0, 40)
    free = {i: data.draw(numbers) for i in members}
    reserved = {i: data.draw(numbers) for i in members}
    held = {i: data.draw(numbers) for i in members if data.draw(st.booleans())}
    if not sum(free.values()):
        return
    tokens = data.draw(st.integers(1, sum(free.values())))
    growth, later = data.draw(numbers), data.draw(numbers)
    where = {"free": free, "reserved": reserved, "held": held, "later_tokens": later}
    kept = dict(place(tokens, growth, members, **where))
    assert sum(kept.values()) == tokens
    assert all(0 < kept[i] <= free[i] for i in kept)
    room = {i: max(0, free[i] - reserved[i]) for i in members}
    wishes = (tokens + later + growth, tokens + later)
    wanted = next((w for w in wishes if sum(room.values()) >= w), sum(room.values()))
    if sum(room.values()) < tokens:
        wanted, room = tokens, free
    assert all(kept[i] <= room[i] for i in kept)
    most = sorted(room.values(), reverse=True)
    assert sum(most[: len(kept) - 1]) < wanted
    ends = {i: held.get(i, 0) + kept.get(i, 0) for i in members}
    open_to = [i for i in kept if kept[i] < room[i]]
    assert all(ends[a] <= ends[b] + 1 for a in kept for b in open_to)
