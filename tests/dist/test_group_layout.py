"""What small prefill steps on groups are to their members: who takes part, and their numbers."""

from __future__ import annotations

import numpy as np
import torch
from attention_kit import CPU
from graph_kit import make_extend
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loongd.wire import Extend, RunStep, pack_tokens
from loongd.worker.group_layout import (
    MOST_EXCHANGED_PAIRS,
    MOST_EXCHANGED_TOKENS,
    GroupShape,
    GroupWork,
    lay_out_group,
)
from loongd.worker.kvcache import KvCache
from loongd.worker.prefill_layout import BUCKETS, MOST_REQUESTS, PrefillShape
from loongd.worker.slot_table import SlotTable


def _work(*extends: Extend, members: tuple[int, ...] = (0, 1, 2)) -> GroupWork | None:
    return GroupWork.of(RunStep(step_id=1, epoch=1, members=list(members), batch=list(extends)))


def test_work_is_for_those_who_hold_keep_or_draw() -> None:
    kept = [(0, 7)]
    assert _work(make_extend(7, keep=kept)) == GroupWork(16, (), (0,))
    assert _work(make_extend(8, keep=[(0, 8)])) == GroupWork(16, (), (0, 1))
    assert _work(make_extend(7, held={2: 5}, keep=kept)) == GroupWork(16, (2,), (0, 2))
    far = make_extend(7, held={2: 5}, keep=kept), make_extend(17, held={1: 3, 0: 1}, keep=[(1, 17)])
    assert _work(*far, members=(2, 1, 0)) == GroupWork(32, (2, 1, 0), (2, 1, 0))
    assert _work(replace(make_extend(8, keep=[(0, 8)]), sampling=None)) == GroupWork(16, (), (0,))


def test_other_steps_run_another_way() -> None:
    one = make_extend(5, keep=[(1, 5)])
    assert _work(one) is not None
    assert _work(one, members=(1,)) is None
    assert _work() is None
    assert _work(replace(one, master=1, keep=[])) is None
    assert _work(one, *[replace(one, master=1, keep=[])]) is None
    assert _work(*[one] * (MOST_REQUESTS - 1)) is not None
    assert _work(*[one] * MOST_REQUESTS) is None
    most = BUCKETS[-1]
    assert _work(make_extend(most, keep=[(0, most)])) == GroupWork(most, (), (0, 1))
    assert _work(make_extend(most + 1, keep=[(0, most + 1)])) is None
    most = MOST_EXCHANGED_TOKENS
    assert most in BUCKETS
    held = MOST_EXCHANGED_PAIRS // most
    assert _work(make_extend(most, held={1: held, 2: held}, keep=[(0, most)])) is not None
    assert _work(make_extend(most, held={1: held, 2: held + 1}, keep=[(0, most)])) is None
    assert _work(make_extend(most + 1, held={1: 5}, keep=[(0, most + 1)])) is None
    # where older tokens are must be told
    assert _work(replace(make_extend(5, held={1: 3}, keep=[(0, 5)]), holder_tokens=[])) is None
    assert _work(replace(make_extend(5, held={1: 3}, keep=[(0, 5)]), start=4)) is None


@settings(max_examples=30, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 60), st.integers(0, 90), st.integers(0, 60)),
        min_size=1,
        max_size=4,
    ),
    cuts=st.sampled_from([((1, 16, 16), (1, 32, 16)), ((4, 64, 64), (4, 128, 64))]),
)
def test_rows_tiles_and_slots_say_what_the_plan_says(
    requests: list[tuple[int, int, int]], cuts: tuple[tuple[int, int, int], tuple[int, int, int]]
) -> None:
    """(new tokens, older ones here, of the new ones kept here), one older token elsewhere."""
    kv = KvCache(
        num_layers=1, num_slots=2000, num_kv_heads=1, head_dim=8, dtype=torch.float32, device=CPU
    )
    batch = []
    for number, (count, older, kept) in enumerate(requests):
        segment = 2 * number
        if older:
            kv.extend(segment, np.arange(older))
        mine = min(kept, count)
        held = {0: older, 1: 1} if older else {1: 1}
        one = make_extend(count, held=held, keep=[(1, count - mine), (0, mine)])
        batch.append(replace(one, cached=[segment], segment=segment + 1))
    step = RunStep(step_id=1, epoch=1, members=[0, 1], batch=batch)
    work = GroupWork.of(step)
    assert work is not None
    shapes = [PrefillShape(work.bucket, *cut) for cut in cuts]
    shape = GroupShape(0, *shapes, work.holders, (1,))
    table = SlotTable(kv)
    numbers = lay_out_group(step, shape, kv, table, []).numbers
    table.upload()
    assert len(numbers) == sum(shape.sizes)
    parts = np.split(numbers, np.cumsum(shape.sizes)[:-1])
    new, old = _spans(parts[4]), _spans(parts[6]) if shape.holds else {}
    tokens, positions, slots = parts[:3]
    first = 0
    for extend, (count, older, kept) in zip(batch, requests, strict=True):
        last = first + count
        assert pack_tokens(tokens[first:last].tolist()) == extend.tokens
        assert positions[first:last].tolist() == [*range(extend.start, extend.start + count)]
        elsewhere = max(count - kept, 0)
        expected = [-1] * elsewhere + kv.slots_of([extend.segment]).tolist()
        assert slots[first:last].tolist() == expected
        assert new[first] == (count, first, count)
        if shape.holds:
            begin = old[first][1]
            assert old[first] == (count, begin, older)
            here = table.slots_S[begin : begin + older].tolist()
            assert here == kv.slots_of(extend.cached).tolist()
        first = last
    assert (slots[first:] == -1).all()
    if first < work.bucket:
        assert new[first] == (work.bucket - first, 0, 0)
    kv.check()


def _spans(tiles: np.ndarray) -> dict[int, tuple[int, int, int]]:
    """(queries, first key, keys) by first query; padding has no queries."""
    return {q: (n, k, k_len) for q, n, k, k_len, _ in tiles.reshape(-1, 5).tolist() if n}
