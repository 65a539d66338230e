"""Small prefill steps on groups as graphs run them, without the capture: the same tokens as the
eager way, and the same pools.

Every instance has a prefiller with the torch twins of its kernels; instances are threads that write
into each other's buffers. The oracle is a second cluster without, given the same plans. On one GPU
nobody can wait for another, so that there only steps run in which nothing is exchanged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cluster_kit import GREEDY, Cluster
from graph_kit import NUM_INSTANCES, GraphCluster, advance, make_extend, make_pair, same_pools
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loongd.errors import PlanError
from loongd.wire import RunStep, Sampling
from loongd.worker.group_graphs import GroupGraphs, GroupSpace
from loongd.worker.group_layout import GroupShape, GroupWork
from loongd.worker.peers import PartialBoxes
from loongd.worker.prefill_graphs import PrefillGraphs, PrefillParts
from loongd.worker.prefiller import Prefiller

DRAWN = Sampling(temperature=1.0, seed=5, num_logprobs=2)


class GroupCluster(GraphCluster):
    """All members compute all new tokens."""

    def make_prefiller(self, small: PrefillParts, rank: int) -> Prefiller:
        group = GroupGraphs(small, GroupSpace(small, rank, self.partials(rank)))
        return Prefiller(small, PrefillGraphs(small), rank, group)

    def has_graph(self, step: RunStep) -> bool:
        return GroupWork.of(step) is not None


@pytest.fixture(scope="module")
def clusters(llama_dir: Path) -> tuple[GroupCluster, Cluster]:
    return GroupCluster(llama_dir), Cluster(llama_dir, NUM_INSTANCES)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_chunks_on_any_groups(
    clusters: tuple[GroupCluster, Cluster], data: st.DataObject
) -> None:
    """Prompts in chunks kept anywhere, alone and together, with decode between."""
    for cluster in clusters:
        cluster.reset()
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4), label="lengths")
    pairs = [make_pair(number, length) for number, length in enumerate(lengths)]
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        members = list(data.draw(st.permutations(range(NUM_INSTANCES)), label="order"))
        unfinished = [pair for pair in pairs if pair[0].done < len(pair[0].tokens)]
        if not unfinished:
            break
        batch = data.draw(
            st.lists(st.sampled_from(unfinished), min_size=1, unique_by=lambda pair: pair[0].name)
        )
        needed = {holder for pair in batch for holder in pair[0].holders}
        unneeded = [member for member in members if member not in needed]
        left = data.draw(st.integers(0, len(unneeded)), label="left out")
        members = [member for member in members if member not in unneeded[:left]]
        if not members:
            continue
        counts = [
            data.draw(st.integers(1, len(pair[0].tokens) - pair[0].done), label="new tokens")
            for pair in batch
        ]
        cuts = [data.draw(st.integers(0, count), label="cut") for count in counts]
        ends = all(
            pair[0].done + count == len(pair[0].tokens)
            for pair, count in zip(batch, counts, strict=True)
        )
        master = data.draw(st.sampled_from([None, None, members[0]]), label="master")
        if not ends or max(counts) > 1:
            master = None
        work = []
        for pair, count, cut in zip(batch, counts, cuts, strict=True):
            first, second = members[0], members[-1]
            keep = [(member, n) for member, n in ((first, cut), (second, count - cut)) if n]
            work.append((pair, count, master, keep))
        how = data.draw(st.sampled_from([GREEDY, DRAWN]), label="sampling") if ends else None
        advance(clusters, members, work, how)
        same_pools(clusters, pairs)


def test_nothing_travels_for_a_prompt_without_older_tokens(
    clusters: tuple[GroupCluster, Cluster],
) -> None:
    """Whoever keeps or draws computes all of it; a member with nothing to do does nothing."""
    for cluster in clusters:
        cluster.reset()
    ours = clusters[0]
    pair = make_pair(3, 40)
    transports = ours.transports
    before = [one.sent_bytes for one in transports]
    # token 39 of 40 is drawn by the last of four members
    advance(clusters, [2, 0, 3, 1], [(pair, 40, None, [(2, 25), (0, 15)])], GREEDY)
    same_pools(clusters, [pair])
    assert [one.sent_bytes for one in transports] == before
    step = RunStep(
        step_id=5, epoch=1, members=[2, 0, 3, 1], batch=[make_extend(40, keep=[(2, 40)])]
    )
    shapes = [runner._prefiller.shape_of(step) for runner in ours.runners]  # type: ignore[union-attr]
    assert [isinstance(shape, GroupShape) for shape in shapes] == [False, True, True, False]
    assert {shape.sources for shape in shapes if isinstance(shape, GroupShape)} == {()}


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_graph_serves_any_prompts_of_its_size(llama_dir: Path, name: str) -> None:
    """On a GPU after a capture, which leaves all flags as they were."""
    device = torch.device(name)
    ours = GroupCluster(llama_dir, device)
    clusters = ours, Cluster(llama_dir, NUM_INSTANCES, device=device)
    if device.type == "cuda":
        for runner in ours.runners:
            assert runner._prefiller is not None
            assert list(runner._prefiller.capture())[-1] == 1.0
        assert ours.all_empty()
    pairs = [make_pair(number, length) for number, length in enumerate((20, 31, 7, 90))]
    one, two, three, four = pairs
    advance(clusters, [0, 1], [(one, 20, None, [(0, 13), (1, 7)])], GREEDY)
    advance(clusters, [1, 0], [(two, 31, None, [(1, 31)]), (three, 7, None, [(0, 7)])], DRAWN)
    advance(clusters, [2, 3, 0], [(four, 90, None, [(3, 90)])], GREEDY)
    advance(clusters, [0], [(three, 1, 0, [])], GREEDY)
    same_pools(clusters, pairs)


class _Counting(PartialBoxes):
    """Counts what is sent, and what this worker waits for."""

    sent = received = 0

    def send(self, peer: int, partial: torch.Tensor) -> None:
        self.sent += 1
        super().send(peer, partial)

    def await_partial(self, peer: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.received += 1
        return super().await_partial(peer, num_rows)


def test_one_message_a_layer_from_each_holder_to_each_other(
    clusters: tuple[GroupCluster, Cluster],
) -> None:
    for cluster in clusters:
        cluster.reset()
    ours = clusters[0]
    pair = make_pair(1, 50)
    advance(clusters, [0, 1, 2], [(pair, 40, None, [(0, 20), (1, 20)])], None)
    counted = []
    for runner in ours.runners:
        boxes = runner._prefiller._group._space.boxes  # type: ignore[union-attr]
        assert boxes is not None
        boxes.__class__ = _Counting
        counted.append(boxes)
    # 2 draws (token 9 of 10 by the first member of three), 3 has nothing to do
    try:
        advance(clusters, [2, 0, 1, 3], [(pair, 9, None, [(1, 9)])], GREEDY)
    finally:
        for boxes in counted:
            boxes.__class__ = PartialBoxes
    layers = ours.spec.num_layers
    assert [vars(boxes).get("sent", 0) for boxes in counted] == [2 * layers, 2 * layers, 0, 0]
    received = [vars(boxes).get("received", 0) for boxes in counted]
    assert received == [layers, layers, 2 * layers, 0]


def test_a_full_pool_refuses_and_forgets(clusters: tuple[GroupCluster, Cluster]) -> None:
    for cluster in clusters:
        cluster.reset()
    runner = clusters[0].runners[1]
    one = make_extend(85, keep=[(1, 85)])
    runner.run(RunStep(step_id=8, epoch=1, members=[1], batch=[make_extend(400, keep=[(1, 400)])]))
    batch = [replace(one, segment=998), replace(one, segment=997)]
    with pytest.raises(PlanError, match="slots"):
        runner.run(RunStep(step_id=9, epoch=1, members=[0, 1], batch=batch))
    assert runner.parts.kv.num_used == 400
    runner.parts.kv.check()


def test_rows_of_padding_become_zeros(llama_dir: Path) -> None:
    """Whatever memory held before: nothing of it is merged, sent or kept."""
    cluster = GroupCluster(llama_dir)
    pair = make_pair(2, 30)
    cluster.extend([0, 1], [(pair[0], 10, None, [(0, 5), (1, 5)])], sample=False)
    spaces = [runner._prefiller._group._space for runner in cluster.runners]  # type: ignore[union-attr]
    for space in spaces:
        for memory in (space.out_TNH, space.lse_TN, space.partial):
            memory.fill_(torch.nan)
    cluster.extend([0, 1], [(pair[0], 9, None, [(1, 9)])], sample=False)
    for space in spaces[:2]:
        assert bool(space.out_TNH[:16].isfinite().all())
        assert not bool(space.out_TNH[9:16].any())
        assert bool(space.out_TNH[16:].isnan().all())
