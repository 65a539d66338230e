"""Older tokens whose keys travel in rounds: right attention, planned bytes, little memory."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_kit import HEAD_DIM, HEADS, Case, Options, check, make_truths, run_all
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loongd.kernels.attention import CpuFlashBackend
from loongd.kernels.exact_attention import ExactBackend, ExactPartials
from loongd.worker.comm import LoopbackTransport, Pending
from loongd.worker.layout import RowBytes, StepLayout

Message = Sequence[tuple[int, Tensor]]
SCALE = HEAD_DIM**-0.5
SLOW_MATH = 1 << 30
"""Operations a pair at which keys always arrive in time, however few queries there are."""


def eager(heads: tuple[int, int], round_tokens: int) -> RowBytes:
    """Rows of float32 in a world where computing takes long, in rounds of a few tokens."""
    row_bytes = RowBytes.of(*heads, HEAD_DIM, 4)
    return replace(row_bytes, pair_flops=SLOW_MATH, round_tokens=round_tokens)


@st.composite
def chunks(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Case]]:
    """Batches with chunks over older tokens that lie on one member or on few, and decode."""
    members = tuple(draw(st.permutations(range(5)))[: draw(st.integers(2, 4))])
    cases = []
    for _ in range(draw(st.integers(1, 3))):
        cached = draw(st.lists(st.tuples(st.sampled_from(members), st.integers(1, 25)), max_size=3))
        cached_on = tuple(member for member, count in cached for _ in range(count))
        num_new = draw(st.sampled_from((1, 2, 5, 16, 31)))
        decodes = num_new == 1 and draw(st.booleans())
        master = draw(st.sampled_from(members)) if decodes else None
        keep = () if decodes else ((draw(st.sampled_from(members)), num_new),)
        cases.append(Case(cached_on, num_new, master, keep))
    return members, cases


@settings(max_examples=25, deadline=None)
@given(
    chunks(),
    st.sampled_from(HEADS),
    st.sampled_from((2, 5, 16, 50)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1 << 30),
)
def test_rounds_of_any_size_equal_dense_attention(
    case: tuple[tuple[int, ...], list[Case]],
    heads: tuple[int, int],
    round_tokens: int,
    lingers: bool,
    in_ring: bool,
    seed: int,
) -> None:
    members, cases = case
    row_bytes = eager(heads, round_tokens)
    options = Options(row_bytes=row_bytes, num_layers=2, lingers=lingers, in_ring=in_ring)
    check(members, cases, make_truths(cases, seed, *heads), CpuFlashBackend(SCALE), options)


ONE_SIDED = Case((1,) * 50, 24, None, ((1, 24),))


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("dop", [2, 3, 4])
def test_each_older_key_goes_to_each_other_member_once(heads: tuple[int, int], dop: int) -> None:
    """And where computing takes no time, queries and answers go to the holder instead."""
    members, truths = tuple(range(dop)), make_truths([ONE_SIDED], 3, *heads)
    key = 2 * heads[1] * HEAD_DIM * 4
    ring = (dop - 1) * 24 * key
    asking = 24 - len(range(1, 24, dop))
    queries = asking * heads[0] * (HEAD_DIM + HEAD_DIM + 1) * 4
    row_bytes = eager(heads, 7)
    ran = check(members, [ONE_SIDED], truths, CpuFlashBackend(SCALE), Options(row_bytes=row_bytes))
    assert ran.sent == ring + (dop - 1) * 50 * key
    assert ran.sent_bytes[1] == ring // dop + (dop - 1) * 50 * key
    assert [len(layout.rounds) for layout in ran.layouts.values()] == [8] * dop
    few_bytes = replace(row_bytes, pair_flops=0, key=1 << 20)
    ran = check(members, [ONE_SIDED], truths, CpuFlashBackend(SCALE), Options(row_bytes=few_bytes))
    assert ran.sent == ring + queries
    assert not any(layout.rounds for layout in ran.layouts.values())


def test_a_batch_passes_keys_of_one_request_and_queries_of_the_others() -> None:
    """One-sided with many new tokens; spread evenly; a short chunk and a token over much."""
    spread = (0,) * 30 + (1,) * 30 + (2,) * 30
    cases = [
        Case(spread, 9, None, ((2, 9),)),
        Case((2,) * 45 + (0,) * 5, 33, None, ((0, 33),)),
        Case((1,) * 40, 1, 0, ()),
        Case((0,) * 40, 2, 1, ()),
    ]
    heads = (6, 2)
    truths = make_truths(cases, 17, *heads)
    options = Options(row_bytes=replace(eager(heads, 8), key=10_000), num_layers=3)
    ran = check((2, 0, 1), cases, truths, CpuFlashBackend(SCALE), options)
    query = heads[0] * (2 * HEAD_DIM + 1) * 4
    key = 2 * heads[1] * HEAD_DIM * 4
    ring = 2 * (9 + 33) * key
    queries = (2 * 9 + 1 + 2) * query
    assert ran.sent == 3 * (ring + queries + 2 * (45 + 5) * key)
    # two holders send: half of a round each
    pieces = [[count for _, count, _ in one.keys_in] for one in ran.layouts[1].rounds]
    assert pieces == [[4, 4], [4, 1], *[[4]] * 9, [1]]
    slots = [one.keys_out[0][1] for one in ran.layouts[2].rounds]
    assert all(isinstance(run, slice) for run in slots), "a run of slots is sent in place"
    assert sum(run.stop - run.start for run in slots) == 45
    # own older tokens of the others are no rounds
    assert ran.layouts[2].local is not None
    assert ran.layouts[2].local.spans.k_lens == (30,)
    everywhere = [one.local for one in ran.layouts[2].rounds if one.local is not None]
    assert sum(sum(part.spans.k_lens) for part in everywhere) == 45


def test_two_rounds_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a member that takes in all older keys: one in use, one on its way, in every layer."""
    arriving: list[weakref.ref[Tensor]] = []
    most = 0
    post = LoopbackTransport.post

    def counting(self: LoopbackTransport, sends: Message, receives: Message) -> Pending:
        nonlocal most
        if self.rank == 0 and any(len(buffer) <= 4 for _, buffer in receives):
            arriving.extend(weakref.ref(buffer) for _, buffer in receives)
            most = max(most, sum(one() is not None for one in arriving))
        return post(self, sends, receives)

    monkeypatch.setattr(LoopbackTransport, "post", counting)
    case = Case((1,) * 30, 24, None, ((0, 24),))
    options = Options(row_bytes=eager((4, 2), 4), num_layers=3)
    ran = run_all((0, 1), [case], make_truths([case], 5, 4, 2), CpuFlashBackend(SCALE), options)
    assert len(ran.layouts[0].rounds) == 8
    assert len(arriving) == 3 * 8 * 2
    assert most == 2 * 2


def test_a_round_of_two_requests_is_gathered_from_their_slots() -> None:
    """Two chunks share a round; the slots of a third request lie between theirs."""
    between = Case((1,) * 5, 1, 1, ())
    cases = [
        Case((1,) * 23, 20, None, ((0, 20),)),
        between,
        Case((1,) * 10, 20, None, ((1, 20),)),
    ]
    truths = make_truths(cases, 29, 4, 2)
    options = Options(row_bytes=eager((4, 2), 16))
    ran = check((0, 1), cases, truths, CpuFlashBackend(SCALE), options)
    assert [_sizes(ran.layouts[m], m) for m in (0, 1)] == [[[16], [7, 9], [1]]] * 2
    slots = [one.keys_out[0][1] for one in ran.layouts[1].rounds]
    assert [isinstance(where, slice) for where in slots] == [True, False, True]


def _sizes(layout: StepLayout, member: int) -> list[list[int]]:
    """Keys of each request in each round, arriving at member 0 or staying at member 1."""
    parts = [one.keys_in[0][2] if member == 0 else one.local for one in layout.rounds]
    return [list(part.spans.k_lens) for part in parts if part is not None]


def _by_position(outs: dict[int, Tensor], members: tuple[int, ...], num_new: int) -> Tensor:
    """Attention of the first request's new tokens, whoever computed them."""
    some = outs[members[0]]
    prompt = some.new_empty((num_new, *some.shape[1:]))
    for index, member in enumerate(members):
        share = len(range(index, num_new, len(members)))
        prompt[index :: len(members)] = outs[member][:share]
    return prompt


@pytest.mark.parametrize("members", [(0, 1), (1, 3, 0, 2)])
def test_exact_partials_keep_their_bits_whatever_travels(members: tuple[int, ...]) -> None:
    """Queries or keys, in rounds of any size, new keys in a ring or at once, over any group: not
    one bit differs."""
    cached = np.random.default_rng(4).choice((0, 0, 0, 1), 37)
    cases = [Case(tuple(cached.tolist()), 18, None, ((1, 18),)), Case((1,) * 9, 1, 0, ())]
    truths = make_truths(cases, 31, 3, 1)
    partials = ExactPartials(torch.float32, SCALE)
    rows = []
    ways = [(RowBytes(1, 1 << 20), False), (RowBytes(1, 1 << 20), True)]
    ways += [(eager((3, 1), 2), False), (eager((3, 1), 99), True)]
    for row_bytes, in_ring in ways:
        options = Options(row_bytes=row_bytes, partials=partials, in_ring=in_ring)
        outs = run_all(members, cases, truths, ExactBackend(partials), options).outs
        rows.append((_by_position(outs, members, 18), outs[0][-1]))
    alone_case = [replace(case, cached_on=(0,) * len(case.cached_on)) for case in cases]
    alone_case[0] = replace(alone_case[0], keep=((0, 18),))
    alone = run_all((0,), alone_case, truths, ExactBackend(partials), Options(partials=partials))
    for prompt, token in rows:
        assert torch.equal(prompt, alone.outs[0][:18])
        assert torch.equal(token, alone.outs[0][18])


@pytest.mark.parametrize("members", [(0, 1), (2, 1, 0), (1, 3, 0, 2)])
def test_exact_partials_keep_their_bits_when_queries_are_joined(members: tuple[int, ...]) -> None:
    """Own and others' queries in one, or apart, with one holder's keys travelling beside or not."""
    cached = (0,) * 20 + (1,) * 14 + (0,) * 7
    case = Case(cached, 19, None, ((1, 19),))
    truths = make_truths([case], 13, 6, 2)
    partials = ExactPartials(torch.float32, SCALE)
    backend = ExactBackend(partials)
    alone_case = Case((0,) * len(cached), 19, None, ((0, 19),))
    alone = run_all((0,), [alone_case], truths, backend, Options(partials=partials)).outs[0]
    of_all = RowBytes(1, 1 << 20)
    # 14 tokens are fewer bytes than a member's queries, and 27 are not
    of_most = RowBytes(20, len(range(0, 19, len(members))), round_tokens=5)
    for row_bytes, holders in ((of_all, [0, 1]), (of_most, [0])):
        for joint_rows in (0, 19):
            options = Options(row_bytes=row_bytes, partials=partials, joint_rows=joint_rows)
            ran = run_all(members, [case], truths, backend, options)
            joined = [m for m in sorted(members) if ran.layouts[m].joint is not None]
            assert joined == ([] if joint_rows else holders)
            assert bool(ran.layouts[0].rounds) == (len(holders) == 1)
            assert torch.equal(_by_position(ran.outs, members, 19), alone)
