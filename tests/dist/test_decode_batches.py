"""Decode steps of a batch that stays are laid out from what the step before has left.

The oracle lays out each step anew, from messages that it sees for the first time, over a pool that
has had the same life; and the pool itself says which slots a request has.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loongd.errors import PlanError
from loongd.wire import Extend, RunStep, Sampling, pack_tokens
from loongd.worker import slot_table
from loongd.worker.decode_layout import (
    BEGIN,
    ENTRY,
    NUM_COLUMNS,
    SLOT,
    DecodeBatch,
    DecodeRows,
    lay_out_rows,
    shape_of,
    what_stays,
)
from loongd.worker.kvcache import KvCache
from loongd.worker.slot_table import SlotTable

RANK, OTHER = 0, 1
NUM_SLOTS = 150


@dataclass
class Request:
    """As a scheduler knows it; `here` tokens of `length` are on instance 0."""

    number: int
    master: int
    length: int
    here: int
    cached: list[int]

    @property
    def open_segment(self) -> int:
        return 2 * self.number + 1

    def extend(self, token: int | None) -> Extend:
        elsewhere = self.here < self.length
        holders = [RANK] * (self.here > 0) + [OTHER] * elsewhere
        return Extend(
            request_id=str(self.number),
            tokens=b"" if token is None else pack_tokens([token]),
            start=self.length,
            master=self.master,
            segment=self.open_segment,
            keep=[],
            cached=list(self.cached),
            holders=holders,
            sampling=Sampling(),
        )


@dataclass
class Side:
    """A pool with its table; `keeps` lets batches last."""

    keeps: bool
    kv: KvCache = field(init=False)
    table: SlotTable = field(init=False)
    batch: DecodeBatch | None = None
    num_kept: int = 0

    def __post_init__(self) -> None:
        sizes = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8}
        device = torch.device("cpu")
        self.kv = KvCache(num_slots=NUM_SLOTS, dtype=torch.float32, device=device, **sizes)
        self.table = SlotTable(self.kv)
        self.table._end = self.table._most - 100  # full soon, and then all regions are dropped

    def lay_out(self, step: RunStep, drawn_rows: dict[str, int]) -> DecodeRows:
        last, same = self.batch, what_stays(step)
        if self.keeps and last is not None and last.goes_on(step, same):
            self.num_kept += 1
        else:
            shape = shape_of(step, RANK)
            assert shape is not None
            self.batch = DecodeBatch.of(step, RANK, shape, same)
        assert self.batch is not None
        rows = lay_out_rows(step, self.batch, self.table, drawn_rows=drawn_rows)
        self.table.upload()
        slots = torch.from_numpy(rows.columns[SLOT])
        self.table.slots_S[torch.from_numpy(rows.columns[ENTRY]).long()] = slots
        return rows


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_a_batch_that_stays_gives_the_same_numbers(data: st.DataObject) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_table, "_LEAST_ROOM", 3)  # regions fill up soon
        patch.setattr(slot_table, "_MAX_REQUESTS", 12)  # and so does the table
        sides = Side(keeps=True), Side(keeps=False)
        _live(data, sides)


def _live(data: st.DataObject, sides: tuple[Side, Side]) -> None:
    requests: list[Request] = []
    batch: list[Request] = []
    names: list[str] = []
    what_happens = st.sampled_from(["step"] * 6 + ["join", "leave", "move", "chunk", "fail", "mix"])
    for number in range(data.draw(st.integers(1, 40), label="length")):
        what = data.draw(what_happens, label="what")
        chosen = data.draw(st.sampled_from(requests), label="which") if requests else None
        if what == "join" or chosen is None:
            requests.append(_join(data, sides, number))
            batch = list(requests)
        elif what == "leave":  # at its end, or preempted
            requests.remove(chosen)
            batch = [request for request in batch if request is not chosen]
            for side in sides:
                side.kv.free([*chosen.cached, chosen.open_segment])
                side.table.forget([*chosen.cached, chosen.open_segment])
        elif what == "move" and chosen.here:
            _move(data, sides, chosen)
        elif what == "chunk":
            if sides[0].kv.num_free >= 8:
                requests.append(_join(data, sides, number))  # runs, but does not decode yet
        elif what == "mix":
            batch = data.draw(st.permutations(requests), label="order")
            chosen.master = data.draw(st.sampled_from([RANK, OTHER]), label="master")
        elif batch:
            queued = names == [str(request.number) for request in batch] and what == "step"
            names = _decode(sides, batch, None if queued else number, fails=what == "fail")


def _join(data: st.DataObject, sides: tuple[Side, Side], number: int) -> Request:
    length = data.draw(st.integers(1, 8), label="prompt")
    here = min(data.draw(st.integers(0, length), label="here"), sides[0].kv.num_free)
    master = data.draw(st.sampled_from([RANK, RANK, OTHER]), label="master")
    if here:
        for side in sides:
            side.kv.extend(2 * number, np.arange(here))
    return Request(number, master, length, here, [2 * number])


def _move(data: st.DataObject, sides: tuple[Side, Side], request: Request) -> None:
    """Tokens of the newest segment with any go to the other instance, or come from it."""
    kv = sides[0].kv
    segment = next(s for s in reversed(request.cached) if kv.length_of(s))
    if data.draw(st.booleans(), label="comes") and request.here < request.length and kv.num_free:
        for side in sides:
            side.kv.adopt(segment, np.array([0]))
        request.here += 1
    else:
        for side in sides:
            side.kv.truncate(segment, 1)
        request.here -= 1


def _decode(
    sides: tuple[Side, Side], batch: list[Request], token: int | None, *, fails: bool
) -> list[str]:
    """A step of both sides; returns the names of its requests, in order."""
    own = [request for request in batch if request.master == RANK]
    asked = [request for request in batch if request.master != RANK]
    extends = [request.extend(token) for request in batch]
    step = RunStep(step_id=1, epoch=1, members=[RANK, OTHER], batch=extends)
    drawn_rows = {str(request.number): row for row, request in enumerate(own)}
    free = sides[0].kv.num_free
    if free < len(own):
        for side in sides:
            with pytest.raises(PlanError, match=f"{len(own)} KV slots needed, {free} of"):
                side.lay_out(step, drawn_rows)
            assert side.kv.num_free == free
        return []
    kept, anew = (side.lay_out(replace(step), drawn_rows) for side in sides)
    np.testing.assert_array_equal(kept.columns, anew.columns)
    assert kept.positions == anew.positions == [request.length for request in own]
    _check(sides[0], kept, own, BEGIN, grown=True)
    if kept.shape.answers:
        _check(sides[0], kept, asked, NUM_COLUMNS, grown=False)
    if fails:
        for one in sides:
            for request in own:
                one.kv.truncate(request.open_segment, 1)
        return []
    for request in batch:
        request.cached = list(dict.fromkeys([*request.cached, request.open_segment]))
        request.length += 1
        request.here += request.master == RANK
    for one in sides:
        one.kv.check()
    return [str(request.number) for request in batch]


def _check(
    side: Side, rows: DecodeRows, requests: list[Request], begin_column: int, *, grown: bool
) -> None:
    """The table lists the requests' slots as the pool has them."""
    begins, ends = rows.columns[begin_column : begin_column + 2]
    for row, request in enumerate(requests):
        segments = dict.fromkeys([*request.cached, *[request.open_segment] * grown])
        known = side.table.slots_S[begins[row] : ends[row]].tolist()
        assert known == side.kv.slots_of(list(segments)).tolist()


def test_a_batch_lasts_from_its_third_step_on() -> None:
    """The segment of new tokens is new in the first and old in the second."""
    side = Side(keeps=True)
    request = Request(0, RANK, 4, 4, [0])
    side.kv.extend(0, np.arange(4))
    for number in range(10):
        step = RunStep(step_id=number, epoch=1, members=[RANK], batch=[request.extend(7)])
        side.lay_out(step, {})
        request.cached, request.length = [0, 1], request.length + 1
        request.here += 1
    assert side.num_kept == 8
