"""What small prefills that are dealt out are to their members: which they are, their numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from attention_kit import CPU
from graph_kit import make_extend
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loongd.wire import Extend, RunStep
from loongd.worker.group_layout import MOST_EXCHANGED_PAIRS
from loongd.worker.kvcache import KvCache
from loongd.worker.prefill_layout import MOST_REQUESTS, PrefillShape
from loongd.worker.slot_table import SlotTable
from loongd.worker.striped_layout import (
    LEAST_TOKENS,
    ROWS,
    StripedShape,
    StripedWork,
    lay_out_striped,
    most_rows,
    padded_sizes,
)


def _work(*extends: Extend, members: tuple[int, ...] = (0, 1)) -> StripedWork | None:
    step = RunStep(step_id=1, epoch=1, members=list(members), batch=list(extends))
    return StripedWork.of(step)


def test_which_steps_are_dealt_out() -> None:
    least = make_extend(LEAST_TOKENS, keep=[(0, LEAST_TOKENS)])
    assert _work(least) == StripedWork(192, (0, 1))
    assert _work(least, members=(3, 1, 0)) == StripedWork(128, (3, 1, 0))
    assert _work(least, members=(0,)) is None
    assert _work() is None
    assert _work(make_extend(LEAST_TOKENS - 1, keep=[(0, LEAST_TOKENS - 1)])) is None
    over = make_extend(500, keep=[(0, 500)], held={1: 3})
    assert _work(over) == StripedWork(256, (0, 1), (1,))
    assert _work(over, replace(over, holders=[0])) == StripedWork(512, (0, 1), (0, 1))
    # where older tokens are must be told
    assert _work(replace(over, holder_tokens=[])) is None
    held = MOST_EXCHANGED_PAIRS // 512
    for more in (0, 1):
        most = make_extend(512, keep=[(0, 512)], held={0: held + more, 1: held})
        assert (_work(most) is None) == (more == 1)
        assert (_work(most, members=(1, 2, 0)) is None) == (more == 1)
    assert _work(replace(least, master=1, keep=[])) is None
    short = make_extend(20, keep=[(0, 20)])
    assert _work(*[short] * (MOST_REQUESTS - 1)) == StripedWork(384, (0, 1))
    assert _work(*[short] * MOST_REQUESTS) is None
    for rows in (rows for rows in ROWS if rows >= 192):
        for more, wanted in ((0, rows), (-2, rows)):
            one = make_extend(2 * rows + more, keep=[(0, 2 * rows + more)], held={1: 3})
            assert _work(one) == StripedWork(wanted, (0, 1), (1,))
    for dop, older in itertools.product((2, 3, 4, 8), (False, True)):
        members, held = tuple(range(dop)), {0: 3} if older else {}
        most = dop * most_rows(dop, older=older)
        for more in (0, 1):
            one = make_extend(most + more, keep=[(0, most + more)], held=held)
            assert (_work(one, members=members) is None) == (more == 1)
        sizes = padded_sizes(dop, older=older)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == most
    assert most_rows(2, older=True) > most_rows(2, older=False)


@dataclass
class Seen:
    """What all members look at, store and draw, by request and position."""

    step: RunStep
    pairs: list[tuple[int, int, int]] = field(default_factory=list)
    """(request, query, key)"""
    drawn: list[int] = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [len(one.tokens) // 4 for one in self.step.batch]

    def rows(self, member: int) -> list[tuple[int, int]]:
        """(request, position) of each row of a member, by index."""
        dop = len(self.step.members)
        return [
            (r, one.start + i)
            for r, one in enumerate(self.step.batch)
            for i in range(member, self.lengths[r], dop)
        ]

    def add(self, shape: StripedShape, kv: KvCache) -> None:
        """One member's numbers."""
        table = SlotTable(kv)
        laid = lay_out_striped(self.step, shape, kv, table, [])
        table.upload()
        assert all(size % 4 == 0 for size in shape.sizes)
        assert len(laid.numbers) == sum(shape.sizes)
        parts = np.split(laid.numbers, np.cumsum(shape.sizes))[:-1]
        dop = len(shape.members)
        mine = self.rows(shape.me)
        starts = [one.start for one in self.step.batch]
        assert parts[0][: len(mine)].tolist() == [(i - starts[r]) % 199 for r, i in mine]
        assert parts[1][: len(mine)].tolist() == [i for _, i in mine]
        for at, source in enumerate(shape.sources):
            theirs = self.rows(source)
            self._stored(parts[2 + at], theirs, kv)
            self._new(parts[3 + dop + 2 * at : 5 + dop + 2 * at], mine, theirs, shape.new)
            if shape.holds:
                tables = parts[3 + 3 * dop + 2 * at : 5 + 3 * dop + 2 * at]
                self._older(tables, theirs, shape.older, table, kv)
        for row, one in zip(parts[2 + dop], laid.sampled, strict=False):
            request, last = mine[row]
            assert (one.segment, last) == (request, one.start + self.lengths[request] - 1)
            self.drawn.append(request)
        kv.check()

    def _stored(
        self, slots: npt.NDArray[np.int32], rows: list[tuple[int, int]], kv: KvCache
    ) -> None:
        for slot, (request, position) in zip(slots, rows, strict=False):
            where = kv.positions_of([request]).tolist()
            there = kv.slots_of([request]).tolist()
            assert (there[where.index(position)] if position in where else -1) == slot
        assert (slots[len(rows) :] == -1).all()

    def _new(
        self,
        tables: list[npt.NDArray[np.int32]],
        mine: list[tuple[int, int]],
        theirs: list[tuple[int, int]],
        cut: PrefillShape,
    ) -> None:
        for query, key in _looked_at(*tables, cut, causal=True):
            (request, position), (other, earlier) = mine[query], theirs[key]
            assert request == other
            self.pairs.append((request, position, earlier))

    def _older(
        self,
        tables: list[npt.NDArray[np.int32]],
        theirs: list[tuple[int, int]],
        cut: PrefillShape,
        table: SlotTable,
        kv: KvCache,
    ) -> None:
        """Every row is written, those of padding too."""
        for query, key in _looked_at(*tables, cut, causal=False):
            request, position = theirs[query]
            cached = self.step.batch[request].cached
            at = kv.slots_of(cached).tolist().index(int(table.slots_S[key]))
            self.pairs.append((request, position, int(kv.positions_of(cached)[at])))
        spans = dict.fromkeys((first, num) for first, num, *_ in tables[0].reshape(-1, 5).tolist())
        rows = sorted(row for first, num in spans for row in range(first, first + num))
        assert rows == list(range(cut.bucket))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_tiles_and_slots_say_what_the_plan_says(data: st.DataObject) -> None:
    """Every pair of a token and one not after it is in a tile of one member; nothing else is."""
    dop = data.draw(st.integers(2, 5), label="dop")
    members = list(data.draw(st.permutations(range(dop)), label="members"))
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5), label="lengths")
    where = st.dictionaries(st.sampled_from(members), st.integers(1, 40))
    held = [data.draw(where, label="held") for _ in lengths]
    batch = []
    for number, (count, older) in enumerate(zip(lengths, held, strict=True)):
        kept = data.draw(st.integers(0, count), label="kept")
        one = make_extend(count, keep=[(0, kept), (1, count - kept)], held=older)
        batch.append(replace(one, segment=number, cached=[100 + number]))
    block = data.draw(st.sampled_from([16, 64]), label="block")
    cuts = (PrefillShape(256, 1, block, 16), PrefillShape(256, 1, 16, block))
    holders = tuple(member for member in members if any(member in older for older in held))
    seen = Seen(RunStep(step_id=1, epoch=1, members=members, batch=batch))
    for rank in members:
        kv = KvCache(
            num_layers=1, num_slots=900, num_kv_heads=1, head_dim=8, dtype=torch.float32, device=CPU
        )
        for number, older in enumerate(held):
            first = 0
            for member, count in older.items():
                if member == rank:
                    kv.extend(100 + number, first + np.arange(count))
                first += count
        seen.add(StripedShape(rank, tuple(members), holders, *cuts), kv)
    wanted = [
        (number, one.start + i, key)
        for number, one in enumerate(batch)
        for i in range(lengths[number])
        for key in range(one.start + i + 1)
    ]
    assert sorted(seen.pairs) == wanted
    assert sorted(seen.drawn) == list(range(len(lengths)))


def _looked_at(
    tiles: npt.NDArray[np.int32],
    ends: npt.NDArray[np.int32],
    cut: PrefillShape,
    *,
    causal: bool,
) -> Iterator[tuple[int, int]]:
    """(query, key) rows that the kernel looks at."""
    for number, (q_first, num_q, k_first, num_k, row) in enumerate(tiles.reshape(-1, 5).tolist()):
        for query in range(row, min(row + cut.block_m, num_q)):
            visible = min(num_k - num_q + query + 1, num_k) if causal else num_k
            blocks = int(ends[number + 1] - ends[number])
            assert visible <= blocks * cut.block_k
            for key in range(visible):
                yield q_first + query, k_first + key
