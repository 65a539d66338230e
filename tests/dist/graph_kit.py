"""Instances whose small prefill steps on groups run as graphs do, without the capture.

Instances are threads that write into each other's buffers; the kernels are torch twins on a CPU.
The oracle is a second cluster that runs them the eager way, given the same plans.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster_kit import CPU, GREEDY, Cluster, Sequence

from loongd.wire import Extend, RunStep, Sampled, Sampling, pack_tokens
from loongd.worker.decode_graphs import DecodeGraphs, DecodeParts
from loongd.worker.decoder import Decoder
from loongd.worker.peers import Boxes, PartialBoxes, box_bytes, partial_length
from loongd.worker.prefill_graphs import PrefillParts
from loongd.worker.prefiller import Prefiller
from loongd.worker.runner import Runner
from loongd.worker.slot_table import SlotTable
from loongd.worker.striped_layout import MOST_PARTIAL_ROWS

NUM_INSTANCES = 4
Pair = tuple[Sequence, Sequence]
"""The same request on the one cluster and on the other."""
Work = list[tuple[Pair, int, int | None, list[tuple[int, int]]]]
"""Of each request: new tokens, master, what is kept where."""
RunNow = Callable[[RunStep], list[Sampled]]


class GraphCluster(Cluster):
    """Runners with a prefiller each; no step that it can run runs another way."""

    def __init__(self, llama_dir: Path, device: torch.device = CPU) -> None:
        super().__init__(llama_dir, NUM_INSTANCES, device=device)
        sizes = (MOST_PARTIAL_ROWS, self.spec.num_heads, self.spec.head_dim)
        num_bytes = box_bytes(NUM_INSTANCES, partial_length(*sizes), torch.float32)
        self._partial_buffers = self.make_buffers(num_bytes, device)
        for rank, kv in enumerate(self.pools):
            table = SlotTable(kv)
            small = PrefillParts(
                self._model, self.spec, kv, table, self.runners[rank].parts.backend
            )
            parts = DecodeParts(self._model, kv, table, None, self.spec.head_dim**-0.5)
            runner = Runner(
                self.runners[rank].parts,
                rank,
                self.runners[rank]._pulse,
                decoder=Decoder(DecodeGraphs(parts), table, kv, rank),
                prefiller=self.make_prefiller(small, rank),
            )

            def guarded(step: RunStep, run_now: RunNow = runner._run_now) -> list[Sampled]:
                assert not self.has_graph(step)
                return run_now(step)

            runner._run_now = guarded  # type: ignore[method-assign]
            self.runners[rank] = runner

    def make_buffers(self, num_bytes: int, device: torch.device) -> list[torch.Tensor]:
        """One for each instance, all zero."""
        return [
            torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_INSTANCES)
        ]

    @abstractmethod
    def make_prefiller(self, small: PrefillParts, rank: int) -> Prefiller:
        """Of one instance."""

    @abstractmethod
    def has_graph(self, step: RunStep) -> bool:
        """Whether a step on a group has a graph."""

    def partials(self, rank: int) -> PartialBoxes:
        """New ones over the buffers in use."""
        return PartialBoxes(
            self._partial_buffers,
            rank,
            max_rows=MOST_PARTIAL_ROWS,
            num_heads=self.spec.num_heads,
            head_dim=self.spec.head_dim,
        )

    def boxes(self, rank: int) -> list[Boxes]:
        """All kinds of an instance, new ones over the buffers in use."""
        return [self.partials(rank)]

    def all_empty(self) -> bool:
        """Whether every flag of every box is 0 again."""
        every = [one for rank in range(NUM_INSTANCES) for one in self.boxes(rank)]
        rows = [box for one in every for row in one._boxes for box in row]
        return not any(int(box.full) or int(box.taken) for box in rows)


def advance(
    clusters: tuple[GraphCluster, Cluster],
    members: list[int],
    work: Work,
    how: Sampling | None,
) -> None:
    """The same step on both; drawn tokens are compared and appended."""
    results = []
    for side, cluster in enumerate(clusters):
        one = [(pair[side], count, master, keep) for pair, count, master, keep in work]
        params = {} if how is None else {pair[side].name: how for pair, *_ in work}
        results.append(cluster.extend(members, one, sample=how is not None, sampling=params))
    same_draws(results, [pair for pair, *_ in work] if how is not None else [])


def same_draws(results: list[dict[str, Sampled]], pairs: list[Pair]) -> None:
    """Both clusters have drawn the same for these requests alone; the tokens are appended."""
    assert [len(result) for result in results] == [len(pairs)] * 2
    for pair in pairs:
        ours, theirs = (result[pair[0].name] for result in results)
        assert ours.token == theirs.token
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
        for sequence in pair:
            sequence.tokens[sequence.done :] = [ours.token]


def make_extend(
    count: int, *, keep: list[tuple[int, int]], held: dict[int, int] | None = None
) -> Extend:
    """A request of a plan with so many new tokens; `held` are older ones by instance."""
    held = held or {}
    return Extend(
        request_id="r",
        tokens=pack_tokens([i % 199 for i in range(count)]),
        start=sum(held.values()),
        master=None,
        segment=999,
        keep=keep,
        cached=[1] if held else [],
        holders=list(held),
        sampling=GREEDY,
        holder_tokens=list(held.values()),
    )


def make_pair(number: int, length: int) -> Pair:
    """A request of so many tokens."""
    tokens = [(31 * number + 7 * i) % 199 for i in range(length)]
    return Sequence(str(number), list(tokens)), Sequence(str(number), list(tokens))


def same_pools(clusters: tuple[GraphCluster, Cluster], pairs: list[Pair]) -> None:
    """Every member holds the same K and V of every request, wherever its slots are."""
    for side, cluster in enumerate(clusters):
        cluster.check(*(pair[side] for pair in pairs))
    for pools in zip(*(cluster.pools for cluster in clusters), strict=True):
        for pair in pairs:
            (ours, theirs) = (
                (pool.positions_of(one.segments), pool.read(pool.slots_of(one.segments)))
                for pool, one in zip(pools, pair, strict=True)
            )
            np.testing.assert_array_equal(ours[0], theirs[0])
            torch.testing.assert_close(ours[1], theirs[1], atol=1e-3, rtol=1e-3)
    assert clusters[0].all_empty()
