"""Elastic attention of any plan equals dense float32 attention, all instances in one process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import attention_kit
import pytest
from attention_kit import (
    HEAD_DIM,
    HEADS,
    Case,
    Options,
    check,
    make_pools,
    make_step,
    make_truths,
    run_all,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loongd.errors import PlanError
from loongd.kernels.attention import CpuFlashBackend, DenseBackend, PoolSlots, Spans
from loongd.wire import Extend, RunStep
from loongd.worker.comm import LoopbackTransport, Pending
from loongd.worker.geometry import lay_out
from loongd.worker.layout import RowBytes

Message = Sequence[tuple[int, Tensor]]


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


@settings(max_examples=100, deadline=None)
@given(steps(), st.sampled_from(HEADS), st.booleans())
def test_any_plan_equals_dense_attention(
    case: tuple[tuple[int, ...], list[Case], int], heads: tuple[int, int], in_ring: bool
) -> None:
    members, cases, seed = case
    options, backend = Options(in_ring=in_ring), CpuFlashBackend(HEAD_DIM**-0.5)
    check(members, cases, make_truths(cases, seed, *heads), backend, options)


@settings(max_examples=40, deadline=None)
@given(steps(), st.integers(1, 12))
def test_any_plan_with_a_sliding_window_equals_dense_attention(
    case: tuple[tuple[int, ...], list[Case], int], window: int
) -> None:
    members, cases, seed = case
    backend = DenseBackend(HEAD_DIM**-0.5)
    check(members, cases, make_truths(cases, seed, 4, 2), backend, Options(window=window))


@st.composite
def chunks_over_own(draw: st.DrawFn, dop: int) -> tuple[tuple[int, ...], list[Case], RowBytes]:
    """A chunk whose queries go to all holders or to those of many tokens, beside requests that
    look at no older tokens, or, now and then, at some."""
    members = tuple(draw(st.permutations(range(5)))[:dop])
    runs = draw(st.lists(st.tuples(st.sampled_from(members), st.integers(1, 20)), min_size=1))
    cached_on = tuple(member for member, count in runs[:6] for _ in range(count))
    num_new = draw(st.sampled_from((8, 17, 40, 4, 2, 1)))
    cases = [Case(cached_on, num_new, None, ((draw(st.sampled_from(members)), num_new),))]
    if draw(st.booleans()):
        where = draw(st.sampled_from(members))
        cases.insert(draw(st.integers(0, 1)), Case((), 6, None, ((where, 6),)))
    if draw(st.booleans()):
        held = draw(st.sampled_from(((), (), (members[0],) * 3)))
        cases.append(Case(held, draw(st.integers(1, 3)), draw(st.sampled_from(members)), ()))
    # a key costs as much as so many queries: above, holders of few tokens send keys
    key = draw(st.sampled_from((1 << 20, 1 << 20, 1)))
    return members, cases, RowBytes(query=1, key=key, round_tokens=7)


@pytest.mark.parametrize("dop", [2, 3, 4])
def test_own_and_others_queries_in_one_equal_dense_attention(dop: int) -> None:
    """Whatever else is in the step."""
    reached = 0

    @settings(max_examples=40, deadline=None)
    @given(chunks_over_own(dop), st.sampled_from(HEADS), st.booleans(), st.sampled_from((0, 0, 16)))
    def equal(
        chunk: tuple[tuple[int, ...], list[Case], RowBytes],
        heads: tuple[int, int],
        in_ring: bool,
        joint_rows: int,
    ) -> None:
        nonlocal reached
        members, cases, row_bytes = chunk
        options = Options(row_bytes=row_bytes, num_layers=2, in_ring=in_ring, joint_rows=joint_rows)
        truths = make_truths(cases, len(cases[0].cached_on), *heads)
        ran = check(members, cases, truths, CpuFlashBackend(HEAD_DIM**-0.5), options)
        reached += sum(one.joint is not None for one in ran.layouts.values())

    equal()
    assert reached > 5


def _joint(
    members: tuple[int, ...], cases: list[Case], me: int, *, windowed: bool = False, most: int = 0
) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Own rows, queries and keys of the joint part of member `me`, when queries travel."""
    pool = make_pools(members, cases, make_truths(cases, 0, 2, 1))[me]
    row_bytes = RowBytes(query=1, key=1 << 20, joint_rows=most)
    step = make_step(members, cases)
    joint = lay_out(step, me, pool, row_bytes=row_bytes, windowed=windowed).joint
    if joint is None:
        return None
    return joint.num_own, joint.part.spans.q_lens, joint.part.spans.k_lens


def test_which_queries_are_joined() -> None:
    """Those of one striped request, if they are many, where nothing else looks at this pool."""
    held = Case((0,) * 9 + (2,) * 5, 20, None, ((0, 20),))
    members = (2, 0, 1)
    assert _joint(members, [held], 2) == (7, (20,), (5,))
    assert _joint(members, [held], 0) == (7, (20,), (9,))
    assert _joint(members, [held], 1) is None
    assert _joint(members, [held], 0, most=19) == (7, (20,), (9,))
    assert _joint(members, [held], 0, most=20) is None
    assert _joint(members, [held], 0, windowed=True) is None
    fresh, decoding = Case((), 4, None, ((1, 4),)), Case((1,) * 3, 1, 1, ())
    assert _joint(members, [fresh, held, decoding], 0) == (7, (20,), (9,))
    for other in (held, Case((0,), 1, 1, ()), Case((0,), 1, 0, ())):
        assert _joint(members, [held, other], 0) is None
    only_asked = Case((0,) * 9, 20, 1, ())
    assert _joint(members, [only_asked], 0) is None
    assert _joint((0,), [Case((0,) * 9, 20, None, ((0, 20),))], 0) is None
    too_few = Case((1,) * 9, 2, None, ((1, 2),))
    assert _joint(members, [too_few], 1) is None


@pytest.mark.parametrize("in_ring", [True, False])
@pytest.mark.parametrize("keep", [((0, 40),), ((3, 40),), ((1, 13), (2, 27)), ((2, 1), (0, 39))])
def test_retention_moves_no_byte(keep: tuple[tuple[int, int], ...], *, in_ring: bool) -> None:
    """Proactive scale-down: whatever the placement, the ring sends the same bytes, and so do
    members who send to all at once."""
    members = (0, 1, 2, 3)
    case = Case((), 40, None, keep)
    truths = make_truths([case], 7, 4, 2)
    ran = run_all(members, [case], truths, CpuFlashBackend(0.25), Options(in_ring=in_ring))
    whole_ring = 3 * 40 * 2 * 2 * HEAD_DIM * 4
    assert ran.sent == whole_ring


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"members": [1, 1]}, "bad members"),
        ({"members": [0, 2]}, "bad members"),
        ({"keep": [(1, 3)]}, "keep"),
        ({"keep": [(2, 4)]}, "keep"),
        ({"keep": [(0, 5), (1, -1)]}, "keep"),
        ({"holders": [5]}, "holders"),
        ({"master": 7, "keep": []}, "master"),
        ({"tokens": b""}, "new tokens"),
    ],
)
def test_contradicting_plans_are_refused(change: dict[str, object], words: str) -> None:
    case = Case((), 4, None, ((1, 4),))
    pools = make_pools((0, 1), [case], make_truths([case], 0, 2, 1))
    step = make_step((0, 1), [case])
    fields = {name: getattr(step.batch[0], name) for name in step.batch[0].__struct_fields__}
    members = change.pop("members", step.members)
    broken = RunStep(step_id=1, epoch=0, members=members, batch=[Extend(**{**fields, **change})])
    with pytest.raises(PlanError, match=words):
        lay_out(broken, 1, pools[1], row_bytes=RowBytes(1, 1), windowed=False)
    assert pools[1].num_free == pools[1].total


def test_a_step_that_does_not_fit_leaves_the_pool_as_it_was() -> None:
    cases = [Case((), 200, 0, ()), Case((), 200, 0, ())]
    pools = make_pools((0,), cases, make_truths(cases, 0, 2, 1))
    with pytest.raises(PlanError, match="200 KV slots needed, 56 of 256 free"):
        lay_out(make_step((0,), cases), 0, pools[0], row_bytes=RowBytes(1, 1), windowed=False)
    assert pools[0].num_free == 256
    pools[0].check()


@pytest.mark.parametrize(("num_cached", "num_new"), [(2, 30), (30, 2), (9, 3), (200, 1)])
def test_older_tokens_cost_the_fewer_bytes_of_queries_and_keys(
    num_cached: int, num_new: int
) -> None:
    """One owner of queries, one holder: pass-Q or pass-KV, whichever is smaller."""
    case = Case((1,) * num_cached, num_new, 0, ())
    truths = make_truths([case], 3, 4, 2)
    ran = check((0, 1), [case], truths, CpuFlashBackend(HEAD_DIM**-0.5))
    queries = num_new * (4 * HEAD_DIM * 4 + 4 * (HEAD_DIM + 1) * 4)
    keys = num_cached * 2 * 2 * HEAD_DIM * 4
    assert ran.sent == min(queries, keys)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("backend", [CpuFlashBackend, DenseBackend])
def test_every_head_size(
    head_dim: int, backend: type[CpuFlashBackend | DenseBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_kit, "HEAD_DIM", head_dim)
    cases = [
        Case((0, 2, 2, 1, 0), 11, None, ((2, 4), (0, 7))),
        Case((1, 1, 0), 1, 2, ()),
        Case((), 2, None, ((1, 2),)),
    ]
    check((2, 0, 1), cases, make_truths(cases, 11, 6, 2), backend(head_dim**-0.5))


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
    check(members, cases, make_truths(cases, dop, 3, 1), CpuFlashBackend(HEAD_DIM**-0.5))


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
    truths = make_truths(cases, 5, 2, 1)
    check(members, cases, truths, backend, Options(num_slots=200_000), every=97)


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
    truths = make_truths([case], 7, 4, 2)
    ran = run_all((0, 1, 2, 3), [case], truths, CpuFlashBackend(0.25), Options(in_ring=True))
    assert ran.sent == 3 * 60 * 2 * 2 * HEAD_DIM * 4
    assert len(arrived) == 3 * 2
    assert most == 2 * 2


class _CountingFlash(CpuFlashBackend):
    """Counts calls of all instances."""

    squares = 0
    pools = 0

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        self.squares += 1
        return super().square_causal(q_TNH, k_TKH, v_TKH, spans)

    def over_pool(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, slots: PoolSlots, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        self.pools += 1
        return super().over_pool(q_TNH, k_SKH, v_SKH, slots, spans)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("dop", "in_ring", "exchanges", "messages", "squares"),
    [(2, True, 2, 4, 2), (2, False, 2, 3, 1), (4, True, 4, 10, 4), (4, False, 2, 7, 1)],
)
def test_exchanges_and_launches_of_a_layer(
    dop: int,
    exchanges: int,
    messages: int,
    squares: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    in_ring: bool,
    apart: bool,
) -> None:
    """A small chunk over older tokens on members 0 and 1: what member 0 posts and sends. Queries
    leave with the first blocks; blocks that are gathered are one message and one launch, and so are
    own and others' queries, unless they stay apart."""
    posted: list[int] = []
    post = LoopbackTransport.post

    def counting(self: LoopbackTransport, sends: Message, receives: Message) -> Pending:
        if self.rank == 0 and (sends or receives):
            posted.append(len(sends))
        return post(self, sends, receives)

    monkeypatch.setattr(LoopbackTransport, "post", counting)
    case = Case((0,) * 200 + (1,) * 200, 40, None, ((0, 40),))
    truths = make_truths([case], 7, 4, 2)
    backend = _CountingFlash(HEAD_DIM**-0.5)
    options = Options(num_slots=512, in_ring=in_ring, joint_rows=40 if apart else 39)
    check(tuple(range(dop)), [case], truths, backend, options)
    assert (len(posted), sum(posted)) == (exchanges, messages)
    assert backend.squares == squares * dop
    assert backend.pools == 2 * (dop if apart else 1)


def test_a_ring_reads_queries_and_blocks_in_place() -> None:
    """A prompt alone is one square a block; several share one span list over slices."""
    for lengths in ((50,), (50, 1, 31)):
        cases = [Case((), length, None, ((1, length),)) for length in lengths]
        pool = make_pools((1,), cases, make_truths(cases, 0, 2, 1))[1]
        step = make_step((0, 1, 2), cases)
        for part in lay_out(step, 1, pool, row_bytes=RowBytes(1, 1), windowed=False).ring:
            spans = list(zip(part.spans.q_lens, part.spans.k_lens, strict=True))
            assert all(q == k or not q or not k for q, k in spans)
            rows = [part.q_rows, part.k_rows]
            assert [sum(n) for n in zip(*spans, strict=True)] == [r.stop - r.start for r in rows]
            assert len(lengths) > 1 or len(spans) == 1
