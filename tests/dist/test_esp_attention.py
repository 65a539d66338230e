"""Elastic attention of any plan equals dense float32 attention, all instances in one process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loongd.errors import PlanError
from loongd.kernels.attention import (
    AttentionBackend,
    CpuFlashBackend,
    DenseBackend,
    dense_attention,
)
from loongd.wire import Extend, RunStep, pack_tokens
from loongd.worker.attention import EspAttention
from loongd.worker.comm import LoopbackTransport, LoopbackWorld, Pending
from loongd.worker.geometry import lay_out
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import RowBytes, StepLayout

HEAD_DIM = 16
HEADS = ((4, 2), (3, 1), (3, 3), (6, 2), (5, 1), (7, 7))
CPU = torch.device("cpu")
Message = Sequence[tuple[int, Tensor]]


@dataclass(frozen=True)
class Case:
    """One request of a step: where its older tokens lie, how many are new, who works on them."""

    cached_on: tuple[int, ...]
    num_new: int
    master: int | None
    keep: tuple[tuple[int, int], ...]


@dataclass
class Truth:
    """Random q, k, v of all positions of one request."""

    q: Tensor
    k: Tensor
    v: Tensor


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Case], int]:
    world = draw(st.integers(1, 8))
    members = tuple(draw(st.permutations(range(world)))[: draw(st.integers(1, world))])
    cases = []
    for _ in range(draw(st.integers(1, 4))):
        num_cached = draw(st.sampled_from((0, 0, 1, 2, 5, 17)))
        cached_on = tuple(draw(st.sampled_from(members)) for _ in range(num_cached))
        num_new = draw(st.sampled_from((1, 1, 2, 3, 4, 5, 7, 8, 9, 23)))
        master = draw(st.none() | st.sampled_from(members))
        keep: tuple[tuple[int, int], ...] = ()
        if master is None:
            cuts = sorted(draw(st.lists(st.integers(0, num_new), max_size=3)))
            ends = [*cuts, num_new]
            keep = tuple(
                (draw(st.sampled_from(members)), hi - lo)
                for lo, hi in zip([0, *cuts], ends, strict=True)
            )
        cases.append(Case(cached_on, num_new, master, keep))
    return members, cases, draw(st.integers(0, 1 << 30))


def _truths(cases: list[Case], seed: int, num_heads: int, num_kv_heads: int) -> list[Truth]:
    generator = torch.Generator().manual_seed(seed)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=generator)

    totals = [len(case.cached_on) + case.num_new for case in cases]
    return [
        Truth(random(n, num_heads), random(n, num_kv_heads), random(n, num_kv_heads))
        for n in totals
    ]


def _pools(
    members: tuple[int, ...], cases: list[Case], truths: list[Truth], num_slots: int = 256
) -> dict[int, KvCache]:
    pools = {
        m: KvCache(
            num_layers=1,
            num_slots=num_slots,
            num_kv_heads=truths[0].k.shape[1],
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=CPU,
        )
        for m in members
    }
    for pool in pools.values():
        pool.k_LSKH.fill_(torch.nan)
        pool.v_LSKH.fill_(torch.nan)
    for number, (case, truth) in enumerate(zip(cases, truths, strict=True)):
        cached_on = np.array(case.cached_on, dtype=np.int64)
        for holder in np.unique(cached_on).tolist():
            positions = np.flatnonzero(cached_on == holder)
            slots = pools[holder].extend(2 * number, positions)
            pools[holder].k_LSKH[0, slots] = truth.k[positions]
            pools[holder].v_LSKH[0, slots] = truth.v[positions]
    return pools


def _step(members: tuple[int, ...], cases: list[Case]) -> RunStep:
    batch = [
        Extend(
            request_id=str(number),
            tokens=pack_tokens(list(range(case.num_new))),
            start=len(case.cached_on),
            master=case.master,
            segment=2 * number + 1,
            keep=list(case.keep),
            cached=[2 * number] if case.cached_on else [],
            holders=[m for m in members if m in case.cached_on],
            sampling=None,
            holder_tokens=[case.cached_on.count(m) for m in members if m in case.cached_on],
        )
        for number, case in enumerate(cases)
    ]
    return RunStep(step_id=1, epoch=0, members=list(members), batch=batch)


def _rows_of(layout: StepLayout, member: int, members: tuple[int, ...], cases: list[Case]):
    """(case number, positions) of the packed rows of one member, striped cases first."""
    index, dop = members.index(member), len(members)
    order = [n for n, c in enumerate(cases) if c.master is None]
    order += [n for n, c in enumerate(cases) if c.master is not None]
    for number in order:
        case = cases[number]
        start = len(case.cached_on)
        if case.master is None:
            yield number, list(range(start + index, start + case.num_new, dop))
        elif case.master == member:
            yield number, list(range(start, start + case.num_new))


def _run_all(
    members: tuple[int, ...],
    cases: list[Case],
    truths: list[Truth],
    backend: AttentionBackend,
    window: int | None,
    num_slots: int = 256,
) -> tuple[dict[int, Tensor], dict[int, StepLayout], dict[int, KvCache], int]:
    pools, step = _pools(members, cases, truths, num_slots), _step(members, cases)
    row_bytes = RowBytes.of(truths[0].q.shape[1], truths[0].k.shape[1], HEAD_DIM, 4)
    world = LoopbackWorld(8, timeout_s=2 if num_slots == 256 else 60)
    outs: dict[int, Tensor] = {}
    layouts: dict[int, StepLayout] = {}
    transports: dict[int, LoopbackTransport] = {m: world.transport(m) for m in members}

    def run(member: int) -> None:
        layout = lay_out(
            step, member, pools[member], row_bytes=row_bytes, windowed=window is not None
        )
        layouts[member] = layout
        parts = list(_rows_of(layout, member, members, cases))

        def pick(name: str) -> Tensor:
            rows = [getattr(truths[n], name)[positions] for n, positions in parts]
            return torch.cat(rows) if rows else getattr(truths[0], name)[:0]

        attention = EspAttention(
            layout,
            pools[member],
            transports[member],
            backend,
            scale=HEAD_DIM**-0.5,
            windows=(window,),
        )
        outs[member] = attention(0, pick("q"), pick("k"), pick("v"))

    threads = [threading.Thread(target=run, args=(m,)) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sent = sum(transport.sent_bytes for transport in transports.values())
    return outs, layouts, pools, sent


def _check(
    members: tuple[int, ...],
    cases: list[Case],
    truths: list[Truth],
    backend: AttentionBackend,
    window: int | None = None,
    *,
    num_slots: int = 256,
    every: int = 1,
) -> None:
    """Compares every `every`-th row of each request, from its last row on."""
    outs, layouts, pools, _ = _run_all(members, cases, truths, backend, window, num_slots)
    assert set(outs) == set(members), "a member failed or hung"
    for member in members:
        row = 0
        for number, positions in _rows_of(layouts[member], member, members, cases):
            truth = truths[number]
            rows = torch.arange(len(positions) - 1, -1, -every)
            chosen = torch.tensor(positions, dtype=torch.int64)[rows]
            expected, _ = dense_attention(
                truth.q[chosen],
                truth.k,
                truth.v,
                scale=HEAD_DIM**-0.5,
                q_positions=chosen,
                k_positions=torch.arange(len(truth.k)),
                window=window,
            )
            got = outs[member][row : row + len(positions)][rows]
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
            row += len(positions)
        assert row == len(outs[member])
        pools[member].check()
    _check_kept(cases, truths, pools)


def _check_kept(cases: list[Case], truths: list[Truth], pools: dict[int, KvCache]) -> None:
    for number, (case, truth) in enumerate(zip(cases, truths, strict=True)):
        keep = case.keep if case.master is None else ((case.master, case.num_new),)
        position = len(case.cached_on)
        expected: dict[int, list[int]] = {}
        for holder, count in keep:
            expected.setdefault(holder, []).extend(range(position, position + count))
            position += count
        for holder, pool in pools.items():
            slots = pool.slots_of([2 * number + 1])
            positions = pool.positions_of([2 * number + 1])
            assert positions.tolist() == expected.get(holder, [])
            assert torch.equal(pool.k_LSKH[0, slots], truth.k[positions])
            assert torch.equal(pool.v_LSKH[0, slots], truth.v[positions])


@settings(max_examples=150, deadline=None)
@given(steps(), st.sampled_from(HEADS))
def test_any_plan_equals_dense_attention(
    case: tuple[tuple[int, ...], list[Case], int], heads: tuple[int, int]
) -> None:
    members, cases, seed = case
    _check(members, cases, _truths(cases, seed, *heads), CpuFlashBackend(HEAD_DIM**-0.5))


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 12))
def test_any_plan_with_a_sliding_window_equals_dense_attention(
    case: tuple[tuple[int, ...], list[Case], int], window: int
) -> None:
    members, cases, seed = case
    backend = DenseBackend(HEAD_DIM**-0.5)
    _check(members, cases, _truths(cases, seed, 4, 2), backend, window)


@pytest.mark.parametrize("keep", [((0, 40),), ((3, 40),), ((1, 13), (2, 27)), ((2, 1), (0, 39))])
def test_retention_moves_no_byte(keep: tuple[tuple[int, int], ...]) -> None:
    """Proactive scale-down: whatever the placement, the ring sends the same bytes."""
    members = (0, 1, 2, 3)
    case = Case((), 40, None, keep)
    truths = _truths([case], 7, 4, 2)
    *_, sent = _run_all(members, [case], truths, CpuFlashBackend(0.25), None)
    whole_ring = 3 * 40 * 2 * 2 * HEAD_DIM * 4
    assert sent == whole_ring


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"members": [1, 1]}, "bad members"),
        ({"members": [0, 2]}, "bad members"),
        ({"keep": [(1, 3)]}, "keep"),
        ({"keep": [(2, 4)]}, "keep"),
        ({"holders": [5]}, "holders"),
        ({"master": 7, "keep": []}, "master"),
        ({"tokens": b""}, "new tokens"),
    ],
)
def test_contradicting_plans_are_refused(change: dict[str, object], words: str) -> None:
    case = Case((), 4, None, ((1, 4),))
    pools = _pools((0, 1), [case], _truths([case], 0, 2, 1))
    step = _step((0, 1), [case])
    fields = {name: getattr(step.batch[0], name) for name in step.batch[0].__struct_fields__}
    members = change.pop("members", step.members)
    broken = RunStep(step_id=1, epoch=0, members=members, batch=[Extend(**{**fields, **change})])
    with pytest.raises(PlanError, match=words):
        lay_out(broken, 1, pools[1], row_bytes=RowBytes(1, 1), windowed=False)
    assert pools[1].num_free == pools[1].total


def test_a_step_that_does_not_fit_leaves_the_pool_as_it_was() -> None:
    cases = [Case((), 200, 0, ()), Case((), 200, 0, ())]
    pools = _pools((0,), cases, _truths(cases, 0, 2, 1))
    with pytest.raises(PlanError, match="200 KV slots needed, 56 of 256 free"):
        lay_out(_step((0,), cases), 0, pools[0], row_bytes=RowBytes(1, 1), windowed=False)
    assert pools[0].num_free == 256
    pools[0].check()


@pytest.mark.parametrize(("num_cached", "num_new"), [(2, 30), (30, 2), (9, 3), (200, 1)])
def test_older_tokens_cost_the_fewer_bytes_of_queries_and_keys(
    num_cached: int, num_new: int
) -> None:
    """One owner of queries, one holder: pass-Q or pass-KV, whichever is smaller."""
    case = Case((1,) * num_cached, num_new, 0, ())
    truths = _truths([case], 3, 4, 2)
    *_, sent = _run_all((0, 1), [case], truths, CpuFlashBackend(HEAD_DIM**-0.5), None)
    queries = num_new * (4 * HEAD_DIM * 4 + 4 * (HEAD_DIM + 1) * 4)
    keys = num_cached * 2 * 2 * HEAD_DIM * 4
    assert sent == min(queries, keys)
    _check((0, 1), [case], truths, CpuFlashBackend(HEAD_DIM**-0.5))


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("backend", [CpuFlashBackend, DenseBackend])
def test_every_head_size(
    head_dim: int, backend: type[CpuFlashBackend | DenseBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "HEAD_DIM", head_dim)
    cases = [
        Case((0, 2, 2, 1, 0), 11, None, ((2, 4), (0, 7))),
        Case((1, 1, 0), 1, 2, ()),
        Case((), 2, None, ((1, 2),)),
    ]
    _check((2, 0, 1), cases, _truths(cases, 11, 6, 2), backend(head_dim**-0.5))


@pytest.mark.parametrize("dop", range(1, 9))
def test_lengths_around_the_degree_of_parallelism(dop: int) -> None:
    """1, DoP - 1, DoP, DoP + 1 and 2 DoP + 1 tokens side by side, each kept by another member."""
    members = tuple((3 * i + 1) % 8 for i in range(dop))
    lengths = (1, dop - 1, dop, dop + 1, 2 * dop + 1)
    cases = [
        Case((), length, None, ((members[n % dop], length),))
        for n, length in enumerate(lengths)
        if length
    ]
    _check(members, cases, _truths(cases, dop, 3, 1), CpuFlashBackend(HEAD_DIM**-0.5))


def test_one_token_beside_a_hundred_thousand() -> None:
    """Prompts of 1 and 12,000 tokens, and 1 and 7 new tokens over 100,000 cached ones."""
    members, many = (2, 0, 1), 100_000
    spread = (0,) * 40_000 + (2,) * 7 + (1,) * (many - 40_007)
    cases = [
        Case(spread, 7, None, ((1, 7),)),
        Case((), 1, None, ((0, 1),)),
        Case((), 12_000, None, ((1, 5_001), (2, 6_999))),
        Case((1,) * many, 1, 0, ()),
        Case((), 1, 2, ()),
    ]
    backend = CpuFlashBackend(HEAD_DIM**-0.5)
    _check(members, cases, _truths(cases, 5, 2, 1), backend, num_slots=200_000, every=97)


def test_a_ring_holds_two_blocks_whatever_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention takes no buffer: beside the block at hand only the one that is arriving exists."""
    arrived: list[weakref.ref[Tensor]] = []
    most = 0
    post = LoopbackTransport.post

    def counting(self: LoopbackTransport, sends: Message, receives: Message) -> Pending:
        nonlocal most
        if self.rank == 3:
            arrived.extend(weakref.ref(buffer) for _, buffer in receives)
            most = max(most, sum(one() is not None for one in arrived))
        return post(self, sends, receives)

    monkeypatch.setattr(LoopbackTransport, "post", counting)
    case = Case((), 60, None, ((3, 60),))
    *_, sent = _run_all((0, 1, 2, 3), [case], _truths([case], 7, 4, 2), CpuFlashBackend(0.25), None)
    assert sent == 3 * 60 * 2 * 2 * HEAD_DIM * 4
    assert len(arrived) == 3 * 2
    assert most == 2 * 2


def test_a_ring_reads_queries_and_blocks_in_place() -> None:
    """A prompt alone is one square a block; several share one span list over slices."""
    for lengths in ((50,), (50, 1, 31)):
        cases = [Case((), length, None, ((1, length),)) for length in lengths]
        pool = _pools((1,), cases, _truths(cases, 0, 2, 1))[1]
        step = _step((0, 1, 2), cases)
        for part in lay_out(step, 1, pool, row_bytes=RowBytes(1, 1), windowed=False).ring:
            spans = list(zip(part.spans.q_lens, part.spans.k_lens, strict=True))
            assert all(q == k or not q or not k for q, k in spans)
            rows = [part.q_rows, part.k_rows]
            assert [sum(n) for n in zip(*spans, strict=True)] == [r.stop - r.start for r in rows]
            assert len(lengths) > 1 or len(spans) == 1
