"""Small prefills on groups that deal out their rows, as graphs run them, without the capture: the
same tokens as the eager way, and the same pools. On one GPU nobody can wait for another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cluster_kit import CPU, GREEDY, Cluster, Sequence
from graph_kit import (
    NUM_INSTANCES,
    GraphCluster,
    advance,
    make_extend,
    make_pair,
    same_pools,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loongd.errors import PlanError
from loongd.wire import PaddedSizes, RunStep, Sampling
from loongd.worker import striped_layout
from loongd.worker.group_graphs import GroupGraphs, GroupSpace
from loongd.worker.group_layout import GroupShape
from loongd.worker.peers import Boxes, PartialBoxes, box_bytes
from loongd.worker.prefill_graphs import PrefillGraphs, PrefillParts
from loongd.worker.prefill_layout import BUCKETS
from loongd.worker.prefiller import Prefiller
from loongd.worker.striped_graphs import StripedGraphs, StripedSpace
from loongd.worker.striped_layout import (
    LEAST_TOKENS,
    MOST_SENT_ROWS,
    ROWS,
    StripedShape,
    StripedWork,
    message_length,
    padded_sizes,
)

DRAWN = Sampling(temperature=1.0, seed=5, num_logprobs=2)


class StripedCluster(GraphCluster):
    """Members deal out the rows of all steps that are large enough."""

    def __init__(self, llama_dir: Path, device: torch.device = CPU) -> None:
        self.buffers: list[torch.Tensor] = []
        super().__init__(llama_dir, device)

    def make_prefiller(self, small: PrefillParts, rank: int) -> Prefiller:
        if not self.buffers:
            length = message_length(small.spec, MOST_SENT_ROWS)
            num_bytes = box_bytes(NUM_INSTANCES, length, small.kv.k_LSKH.dtype)
            self.buffers = self.make_buffers(num_bytes, small.kv.device)
        group = GroupSpace(small, rank, self.partials(rank))
        space = StripedSpace(small, self.messages(rank), group)
        graphs = StripedGraphs(small, space, rank)
        return Prefiller(small, PrefillGraphs(small), rank, striped=graphs)

    def has_graph(self, step: RunStep) -> bool:
        return StripedWork.of(step) is not None

    def messages(self, rank: int) -> Boxes:
        length, dtype = message_length(self.spec, MOST_SENT_ROWS), self.pools[0].k_LSKH.dtype
        return Boxes(self.buffers, rank, length=length, dtype=dtype)

    def boxes(self, rank: int) -> list[Boxes]:
        return [*super().boxes(rank), self.messages(rank)]

    def graphs(self, rank: int) -> StripedGraphs:
        """Those of one instance."""
        prefiller = self.runners[rank]._prefiller
        assert prefiller is not None
        assert prefiller._striped is not None
        return prefiller._striped


@pytest.fixture(scope="module")
def clusters(llama_dir: Path) -> tuple[StripedCluster, Cluster]:
    return StripedCluster(llama_dir), Cluster(llama_dir, NUM_INSTANCES)


@pytest.fixture(scope="module")
def mha_clusters(mha_dir: Path) -> tuple[StripedCluster, Cluster]:
    return StripedCluster(mha_dir), Cluster(mha_dir, NUM_INSTANCES)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_steps_on_any_groups(
    clusters: tuple[StripedCluster, Cluster],
    mha_clusters: tuple[StripedCluster, Cluster],
    data: st.DataObject,
) -> None:
    """However many and short, kept anywhere, some of them ending elsewhere than others; what is
    kept, by any of the members, serves the tokens after, which are dealt out too."""
    clusters = data.draw(st.sampled_from([clusters, mha_clusters]), label="heads")
    for cluster in clusters:
        cluster.reset()
    lengths = data.draw(
        st.lists(st.one_of(st.integers(1, 9), st.integers(1, 90)), min_size=1, max_size=5),
        label="lengths",
    )
    pairs = [make_pair(number, length) for number, length in enumerate(lengths)]
    for _ in range(data.draw(st.integers(1, 4), label="steps")):
        unfinished = [pair for pair in pairs if pair[0].done < len(pair[0].tokens)]
        if not unfinished:
            break
        batch = data.draw(
            st.lists(st.sampled_from(unfinished), min_size=1, unique_by=lambda pair: pair[0].name)
        )
        members = _members(data, {holder for pair in batch for holder in pair[0].holders})
        work = [(pair, *_part(data, pair[0], members)) for pair in batch]
        ends = all(pair[0].done + count == len(pair[0].tokens) for pair, count, *_ in work)
        how = data.draw(st.sampled_from([GREEDY, DRAWN]), label="sampling") if ends else None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(striped_layout, "LEAST_TOKENS", 1)
            advance(clusters, members, work, how)
        same_pools(clusters, pairs)


def _members(data: st.DataObject, needed: set[int]) -> list[int]:
    """Two or more, the needed ones among them."""
    members = list(data.draw(st.permutations(range(NUM_INSTANCES)), label="order"))
    unneeded = [member for member in members if member not in needed]
    left = data.draw(st.integers(0, min(len(unneeded), NUM_INSTANCES - 2)), label="left out")
    return [member for member in members if member not in unneeded[:left]]


def _part(
    data: st.DataObject, sequence: Sequence, members: list[int]
) -> tuple[int, None, list[tuple[int, int]]]:
    """Of a request: new tokens, and up to three runs of them kept by any members."""
    count = data.draw(st.integers(1, len(sequence.tokens) - sequence.done), label="new tokens")
    cuts = sorted(data.draw(st.integers(0, count), label="cut") for _ in range(2))
    runs = np.diff([0, *cuts, count]).tolist()
    places = data.draw(st.permutations(members), label="places")
    return count, None, [(m, n) for m, n in zip(places * 2, runs, strict=False) if n]


def test_each_member_computes_its_rows_and_sends_them_once_a_layer(
    clusters: tuple[StripedCluster, Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries go to those who hold older tokens alone, and a partial result comes back."""
    for cluster in clusters:
        cluster.reset()
    sent: list[tuple[int, int, int]] = []
    answered: list[tuple[int, int, int]] = []
    send = Boxes.send

    def counted(boxes: Boxes, peer: int, message: torch.Tensor) -> None:
        kind = answered if isinstance(boxes, PartialBoxes) else sent
        kind.append((boxes._rank, peer, len(message)))
        send(boxes, peer, message)

    monkeypatch.setattr(Boxes, "send", counted)
    before = [one.sent_bytes for one in clusters[0].transports]
    pair, members = make_pair(3, 580), [2, 0, 3]
    others = [(a, b) for a in members for b in members if a != b]
    spec = clusters[0].spec
    for count, keep, holders in (
        (300, [(2, 80), (0, 220)], []),
        (280, [(3, 280)], [2, 0]),
    ):
        how = GREEDY if count == 280 else None
        advance(clusters, members, [(pair, count, None, keep)], how)
        same_pools(clusters, [pair])
        lengths = [
            (a, b, 128 * spec.head_dim * (2 * spec.num_kv_heads + spec.num_heads * (b in holders)))
            for a, b in others
        ]
        assert sorted(sent) == sorted(lengths * spec.num_layers)
        back = [(a, b, 128 * spec.num_heads * (spec.head_dim + 1)) for a, b in others]
        wanted = [one for one in back if one[0] in holders]
        assert sorted(answered) == sorted(wanted * spec.num_layers)
        sent.clear()
        answered.clear()
    assert [one.sent_bytes for one in clusters[0].transports] == before


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_every_kernel_runs_before_the_first_step(llama_dir: Path, name: str) -> None:
    """With the worker as its own peer; all flags are as they were, and nothing is stored."""
    cluster = StripedCluster(llama_dir, torch.device(name))
    for rank, runner in enumerate(cluster.runners):
        graphs = cluster.graphs(rank)
        runner.parts.kv.k_LSKH.fill_(7.0)
        kinds = graphs._kinds()
        assert kinds[0].rows == ROWS[-1]
        cuts = {_cuts(graphs._shape(rows, (), ())) for rows in ROWS}
        assert {_cuts(kind) for kind in kinds} == cuts
        if name == "cpu":
            for shape in kinds:
                graphs._step(shape).run()
        else:
            assert list(graphs.capture())[-1] == 1.0
        assert bool((runner.parts.kv.k_LSKH == 7.0).all())
    assert cluster.all_empty()


def _cuts(shape: StripedShape) -> tuple[tuple[int, int], ...]:
    return tuple((cut.block_m, cut.block_k) for cut in (shape.new, shape.older))


def test_rows_of_padding_become_zeros(clusters: tuple[StripedCluster, Cluster]) -> None:
    """Whatever memory held before: nothing of it is merged, sent or kept."""
    for cluster in clusters:
        cluster.reset()
    spaces = [clusters[0].graphs(rank)._space for rank in range(NUM_INSTANCES)]
    pair = make_pair(2, 621)
    for count, keep, how in ((320, [(1, 100), (0, 220)], None), (301, [(1, 301)], GREEDY)):
        for space in spaces:
            for memory in (*space.own, *space.other, space.message, space.partial):
                memory.fill_(torch.nan)
        advance(clusters, [1, 0], [(pair, count, None, keep)], how)
        same_pools(clusters, [pair])
    for space in spaces[:2]:
        assert bool(space.own[0][:192].isfinite().all())
        assert not bool(space.own[0][151:192].any())
        assert bool(space.own[0][192:].isnan().all())


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


def test_prompts_are_dealt_out_from_where_that_pays(
    clusters: tuple[StripedCluster, Cluster],
) -> None:
    """Where members can also compute all rows each; and sizes are told as they are."""
    prefillers = []
    for rank, runner in enumerate(clusters[0].runners):
        assert runner._prefiller is not None
        small, alone = runner._prefiller._parts, runner._prefiller._graphs
        group = GroupGraphs(small, GroupSpace(small, rank, clusters[0].partials(rank)))
        striped = clusters[0].graphs(rank)
        prefillers.append(Prefiller(small, alone, rank, group, striped, num_instances=3))
    for count, kind in ((LEAST_TOKENS - 1, GroupShape), (LEAST_TOKENS, StripedShape)):
        for held in ({}, {1: 7}):
            one = make_extend(count, keep=[(0, 1), (1, count - 1)], held=held)
            step = RunStep(step_id=1, epoch=1, members=[1, 0], batch=[one])
            assert all(isinstance(prefillers[member].shape_of(step), kind) for member in (0, 1))
    # too many for a member, not for all of them: nobody computes all
    ragged = [make_extend(66, keep=[(0, 66)])] * 31
    step = RunStep(step_id=1, epoch=1, members=list(range(8)), batch=ragged)
    assert prefillers[0].shape_of(step) is None
    sizes = {
        dop: PaddedSizes(padded_sizes(dop, older=False), padded_sizes(dop, older=True))
        for dop in (2, 3)
    }
    sizes[1] = PaddedSizes(list(BUCKETS), list(BUCKETS))
    assert prefillers[0].padded_sizes() == sizes
