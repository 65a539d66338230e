"""Small prefills of new prompts on groups as graphs run them, without the capture: the same tokens
as the eager way, and the same pools. On one GPU nobody can wait for another."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cluster_kit import CPU, GREEDY, Cluster
from graph_kit import (
    NUM_INSTANCES,
    GraphCluster,
    Work,
    advance,
    make_extend,
    make_pair,
    same_pools,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loongd.errors import PlanError
from loongd.wire import Extend, PaddedSizes, RunStep, Sampling
from loongd.worker import striped_layout
from loongd.worker.group_graphs import GroupGraphs, GroupSpace
from loongd.worker.group_layout import GROUP_BUCKETS, GroupShape
from loongd.worker.kvcache import KvCache
from loongd.worker.peers import Boxes, box_bytes
from loongd.worker.prefill_graphs import PrefillGraphs, PrefillParts
from loongd.worker.prefill_layout import BUCKETS, MOST_REQUESTS, PrefillShape
from loongd.worker.prefiller import Prefiller
from loongd.worker.striped_graphs import StripedGraphs, StripedSpace, block_sizes
from loongd.worker.striped_layout import (
    LEAST_TOKENS,
    ROWS,
    StripedShape,
    StripedWork,
    lay_out_striped,
    most_rows,
    padded_sizes,
)

DRAWN = Sampling(temperature=1.0, seed=5, num_logprobs=2)


class StripedCluster(GraphCluster):
    """Members deal out the rows of new prompts."""

    def __init__(self, llama_dir: Path, device: torch.device = CPU) -> None:
        self.buffers: list[torch.Tensor] = []
        self._length = 0
        super().__init__(llama_dir, device)

    def make_prefiller(self, small: PrefillParts, rank: int) -> Prefiller:
        if not self.buffers:
            self._length = ROWS[-1] * prod(block_sizes(small))
            num_bytes = box_bytes(NUM_INSTANCES, self._length, small.kv.k_LSKH.dtype)
            self.buffers = self.make_buffers(num_bytes, small.kv.device)
        space = StripedSpace(small, self.boxes(rank), ROWS[-1])
        graphs = StripedGraphs(small, space, rank)
        return Prefiller(small, PrefillGraphs(small), rank, striped=graphs)

    def has_graph(self, step: RunStep) -> bool:
        return StripedWork.of(step) is not None

    def boxes(self, rank: int) -> Boxes:
        return Boxes(self.buffers, rank, length=self._length, dtype=self.pools[0].k_LSKH.dtype)


@pytest.fixture(scope="module")
def clusters(llama_dir: Path) -> tuple[StripedCluster, Cluster]:
    return StripedCluster(llama_dir), Cluster(llama_dir, NUM_INSTANCES)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_prompts_on_any_groups(
    clusters: tuple[StripedCluster, Cluster], data: st.DataObject
) -> None:
    """However many and short, kept anywhere, some of them ending elsewhere than others; what is
    kept serves the tokens after."""
    for cluster in clusters:
        cluster.reset()
    members = list(data.draw(st.permutations(range(NUM_INSTANCES)), label="order"))
    members = members[: data.draw(st.integers(2, NUM_INSTANCES), label="dop")]
    lengths = data.draw(
        st.lists(st.one_of(st.integers(1, 9), st.integers(1, 120)), min_size=1, max_size=6),
        label="lengths",
    )
    pairs = [make_pair(number, length) for number, length in enumerate(lengths)]
    work: Work = []
    for pair, length in zip(pairs, lengths, strict=True):
        count = data.draw(st.integers(1, length), label="new tokens")
        cut = data.draw(st.integers(0, count), label="cut")
        places = data.draw(st.permutations(members), label="places")
        keep = [(m, n) for m, n in zip(places, (cut, count - cut), strict=False) if n]
        work.append((pair, count, None, keep))
    ends = all(count == len(pair[0].tokens) for pair, count, _, _ in work)
    how = data.draw(st.sampled_from([GREEDY, DRAWN]), label="sampling") if ends else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(striped_layout, "LEAST_TOKENS", 1)
        advance(clusters, members, work, how)
    same_pools(clusters, pairs)
    for pair in pairs:
        if rest := len(pair[0].tokens) - pair[0].done:
            advance(clusters, members, [(pair, rest, None, [(members[-1], rest)])], GREEDY)
    same_pools(clusters, pairs)


def test_each_member_computes_its_rows_and_sends_them_once_a_layer(
    clusters: tuple[StripedCluster, Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cluster in clusters:
        cluster.reset()
    sent: list[tuple[int, int, int]] = []
    send = Boxes.send

    def counted(boxes: Boxes, peer: int, message: torch.Tensor) -> None:
        sent.append((boxes._rank, peer, len(message)))
        send(boxes, peer, message)

    monkeypatch.setattr(Boxes, "send", counted)
    before = [one.sent_bytes for one in clusters[0].transports]
    pair = make_pair(3, 300)
    advance(clusters, [2, 0, 3], [(pair, 300, None, [(2, 200), (0, 100)])], GREEDY)
    same_pools(clusters, [pair])
    layers = clusters[0].spec.num_layers
    pairs = {(a, b, 128) for a in (2, 0, 3) for b in (2, 0, 3) if a != b}
    assert set(sent) == pairs
    assert len(sent) == layers * len(pairs)
    assert [one.sent_bytes for one in clusters[0].transports] == before


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_kernel_runs_before_the_first_step(llama_dir: Path, name: str) -> None:
    """With the worker as its own peer; all flags are as they were, and nothing is stored."""
    cluster = StripedCluster(llama_dir, torch.device(name))
    for runner in cluster.runners:
        assert runner._prefiller is not None
        assert runner._prefiller._striped is not None
        runner.parts.kv.k_LSKH.fill_(7.0)
        if name == "cpu":
            for rows in (ROWS[0], ROWS[-1]):
                shape = runner._prefiller._striped._shape(rows, (runner._instance,) * 2)
                runner._prefiller._striped._step(shape).run()
        else:
            assert list(runner._prefiller._striped.capture())[-1] == 1.0
        assert bool((runner.parts.kv.k_LSKH == 7.0).all())
    assert cluster.all_empty()


def test_rows_of_padding_become_zeros(clusters: tuple[StripedCluster, Cluster]) -> None:
    """Whatever memory held before: nothing of it is merged, sent or kept."""
    for cluster in clusters:
        cluster.reset()
    spaces = [runner._prefiller._striped._space for runner in clusters[0].runners]  # type: ignore[union-attr]
    for space in spaces:
        for memory in (*space.states[0], *space.states[1], space.block):
            memory.fill_(torch.nan)
    pair = make_pair(2, 301)
    advance(clusters, [1, 0], [(pair, 301, None, [(1, 301)])], GREEDY)
    same_pools(clusters, [pair])
    for space in spaces[:2]:
        assert bool(space.states[0][0][:192].isfinite().all())
        assert not bool(space.states[0][0][151:192].any())
        assert bool(space.states[0][0][192:].isnan().all())


def test_a_full_pool_refuses_and_forgets(clusters: tuple[StripedCluster, Cluster]) -> None:
    for cluster in clusters:
        cluster.reset()
    one = make_extend(400, keep=[(1, 400)])
    step = RunStep(step_id=9, epoch=1, members=[0, 1], batch=[replace(one, segment=998), one])
    with pytest.raises(PlanError, match="slots"):
        clusters[0].runners[1].run(step)
    clusters[0].check()


def test_a_plan_of_others_is_refused(clusters: tuple[StripedCluster, Cluster]) -> None:
    for cluster in clusters:
        cluster.reset()
    one = make_extend(300, keep=[(1, 300)])
    with pytest.raises(PlanError, match="bad members"):
        clusters[0].runners[0].run(RunStep(step_id=9, epoch=1, members=[1, 2], batch=[one]))
    clusters[0].check()


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
    assert _work(make_extend(500, keep=[(0, 500)], held={1: 3})) is None
    assert _work(replace(least, master=1, keep=[])) is None
    short = make_extend(20, keep=[(0, 20)])
    assert _work(*[short] * (MOST_REQUESTS - 1)) == StripedWork(384, (0, 1))
    assert _work(*[short] * MOST_REQUESTS) is None
    for dop in (2, 3, 4, 8):
        members = tuple(range(dop))
        most = dop * most_rows(dop)
        assert _work(make_extend(most, keep=[(0, most)]), members=members) is not None
        assert _work(make_extend(most + 1, keep=[(0, most + 1)]), members=members) is None
        assert padded_sizes(dop) == sorted(set(padded_sizes(dop)))
        assert padded_sizes(dop)[-1] == most


def test_prompts_are_dealt_out_from_where_that_pays(
    clusters: tuple[StripedCluster, Cluster],
) -> None:
    """Where members can also compute all rows each; and sizes are told as they are."""
    prefillers = []
    for rank, runner in enumerate(clusters[0].runners):
        assert runner._prefiller is not None
        small, alone = runner._prefiller._parts, runner._prefiller._graphs
        group = GroupGraphs(small, GroupSpace(small, rank, None))
        striped = runner._prefiller._striped
        prefillers.append(Prefiller(small, alone, rank, group, striped, num_instances=3))
    for count, kind in ((LEAST_TOKENS - 1, GroupShape), (LEAST_TOKENS, StripedShape)):
        one = make_extend(count, keep=[(0, 1), (1, count - 1)])
        step = RunStep(step_id=1, epoch=1, members=[1, 0], batch=[one])
        assert all(isinstance(prefillers[member].shape_of(step), kind) for member in (0, 1))
    sizes = {dop: PaddedSizes(padded_sizes(dop), list(GROUP_BUCKETS)) for dop in (2, 3)}
    sizes[1] = PaddedSizes(list(BUCKETS), list(BUCKETS))
    assert prefillers[0].padded_sizes() == sizes


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_tiles_and_slots_say_what_the_plan_says(data: st.DataObject) -> None:
    """Every pair of a token and one not after it is in a tile of one member; nothing else is."""
    dop = data.draw(st.integers(2, 5), label="dop")
    members = tuple(data.draw(st.permutations(range(dop)), label="members"))
    lengths = data.draw(st.lists(st.integers(1, 70), min_size=1, max_size=5), label="lengths")
    kept = [data.draw(st.integers(0, n), label="kept") for n in lengths]
    block = data.draw(st.sampled_from([16, 64]), label="block")
    batch = [
        replace(make_extend(n, keep=[(0, k), (1, n - k)]), segment=number)
        for number, (n, k) in enumerate(zip(lengths, kept, strict=True))
    ]
    step = RunStep(step_id=1, epoch=1, members=list(members), batch=batch)
    pairs: list[tuple[int, int, int]] = []
    drawn: list[int] = []
    for rank in members:
        shape = StripedShape(rank, members, PrefillShape(256, 1, block, 16))
        kv = KvCache(
            num_layers=1, num_slots=500, num_kv_heads=1, head_dim=8, dtype=torch.float32, device=CPU
        )
        laid = lay_out_striped(step, shape, kv, [])
        assert all(size % 4 == 0 for size in shape.sizes)
        parts = np.split(laid.numbers, np.cumsum(shape.sizes))[:-1]
        # (request, token) of each row of each member
        rows = [
            [(r, i) for r, n in enumerate(lengths) for i in range(member, n, dop)]
            for member in range(dop)
        ]
        mine = rows[shape.me]
        assert parts[0][: len(mine)].tolist() == [i % 199 for _, i in mine]
        assert parts[1][: len(mine)].tolist() == [i for _, i in mine]
        for at, source in enumerate(shape.sources):
            tiles, ends = parts[3 + dop + 2 * at : 5 + dop + 2 * at]
            for query, key in _seen(tiles.reshape(-1, 5), ends, shape.cut):
                (request, i), (other, j) = mine[query], rows[source][key]
                assert request == other
                pairs.append((request, i, j))
            for slot, (request, i) in zip(parts[2 + at], rows[source], strict=False):
                there = kv.slots_of([request]).tolist()
                where = kv.positions_of([request]).tolist()
                assert (there[where.index(i)] if i in where else -1) == slot
            assert (parts[2 + at][len(rows[source]) :] == -1).all()
        for number, one in enumerate(laid.sampled):
            request, last = mine[parts[2 + dop][number]]
            assert (one.segment, last) == (request, lengths[request] - 1)
            drawn.append(request)
    wanted = [(r, i, j) for r, n in enumerate(lengths) for i in range(n) for j in range(i + 1)]
    assert sorted(pairs) == wanted
    assert sorted(drawn) == list(range(len(lengths)))


def _seen(
    tiles: npt.NDArray[np.int32], ends: npt.NDArray[np.int32], cut: PrefillShape
) -> Iterator[tuple[int, int]]:
    """(query, key) rows that the causal kernel looks at."""
    for number, (q_first, num_q, k_first, num_k, row) in enumerate(tiles.tolist()):
        for query in range(row, min(row + cut.block_m, num_q)):
            visible = min(num_k - num_q + query + 1, num_k)
            blocks = int(ends[number + 1] - ends[number])
            assert visible <= blocks * cut.block_k
            for key in range(visible):
                yield q_first + query, k_first + key
