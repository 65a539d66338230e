"""Decode steps as graphs run them, without the capture: the same tokens as the eager way.

Every instance has a decoder with the torch twins of its kernels; instances are threads that write
into each other's buffers. The oracle is a second cluster without decoders, given the same plans.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cluster_kit import CPU, GREEDY, Cluster, Sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loongd.wire import Extend, RunMigrate, RunStep, Sampled, Sampling, pack_tokens
from loongd.worker import decode_graphs, slot_table
from loongd.worker.decode_graphs import DecodeGraphs, DecodeParts
from loongd.worker.decode_layout import BUCKETS, MAX_EXCHANGED_ROWS, shape_of
from loongd.worker.decoder import Decoder
from loongd.worker.kvcache import KvCache
from loongd.worker.peers import PeerMemory, buffer_bytes
from loongd.worker.runner import Runner
from loongd.worker.slot_table import SlotTable

NUM_INSTANCES = 3
PLAIN = Sampling()
DRAWN = Sampling(temperature=1.0, seed=5, num_logprobs=2)


class DecodingCluster(Cluster):
    """Runners with decoders; `unknown` steps send no tokens, as the scheduler's queued ones."""

    def __init__(self, llama_dir: Path, num_instances: int) -> None:
        super().__init__(llama_dir, num_instances)
        sizes = {
            "max_rows": MAX_EXCHANGED_ROWS,
            "num_heads": self.spec.num_heads,
            "head_dim": self.spec.head_dim,
            "dtype": torch.float32,
        }
        length = buffer_bytes(num_instances, *sizes.values())
        buffers = [torch.zeros(length, dtype=torch.uint8) for _ in range(num_instances)]
        self.unknown = False
        self.graph_steps = 0
        for rank, kv in enumerate(self.pools):
            table = SlotTable(kv)
            peers = PeerMemory(buffers, rank, **sizes)
            parts = DecodeParts(self._model, kv, table, peers, self.spec.head_dim**-0.5)
            decoder = Decoder(DecodeGraphs(parts), table, kv, rank)
            self.runners[rank] = Runner(
                self.runners[rank].parts, rank, self.runners[rank]._pulse, decoder=decoder
            )

    def _all(self, members: list[int], message: RunStep | RunMigrate) -> list[list[Sampled]]:
        if isinstance(message, RunStep):
            self.graph_steps += shape_of(message, members[0]) is not None
            if self.unknown:
                batch = [replace(extend, tokens=b"") for extend in message.batch]
                message = replace(message, batch=batch, follows=message.step_id - 1)
        return super()._all(members, message)


@pytest.fixture(scope="module")
def clusters(llama_dir: Path) -> tuple[DecodingCluster, Cluster]:
    return DecodingCluster(llama_dir, NUM_INSTANCES), Cluster(llama_dir, NUM_INSTANCES)


def _advance(
    clusters: tuple[DecodingCluster, Cluster],
    members: list[int],
    work: list[tuple[tuple[Sequence, Sequence], int, int | None, list[tuple[int, int]]]],
    how: Sampling,
    *,
    unknown: bool = False,
) -> None:
    """The same step on both; drawn tokens are compared and appended."""
    clusters[0].unknown = unknown
    results = []
    for side, cluster in enumerate(clusters):
        one = [(pair[side], count, master, keep) for pair, count, master, keep in work]
        params = {pair[side].name: how for pair, *_ in work}
        results.append(cluster.extend(members, one, sampling=params))
    for pair, *_ in work:
        ours, theirs = (result[pair[0].name] for result in results)
        assert ours.token == theirs.token
        if how.num_logprobs:
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
        for side in pair:
            side.tokens.append(ours.token)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_masters_and_holders(
    clusters: tuple[DecodingCluster, Cluster], data: st.DataObject
) -> None:
    for cluster in clusters:
        cluster.reset()
    pairs = []
    for number in range(data.draw(st.integers(1, 5), label="requests")):
        length = data.draw(st.integers(1, 9), label="length")
        tokens = [(31 * number + 7 * i) % 199 for i in range(length)]
        pair = (Sequence(str(number), list(tokens)), Sequence(str(number), list(tokens)))
        cut = data.draw(st.integers(0, length), label="cut")
        first, second = data.draw(st.permutations(range(NUM_INSTANCES)), label="kept on")[:2]
        keep = [(i, n) for i, n in ((first, cut), (second, length - cut)) if n]
        _advance(clusters, [0, 1, 2], [(pair, length, None, keep)], GREEDY)
        pairs.append(pair)
    before: list[tuple[str, int]] = []
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        batch = data.draw(
            st.lists(st.sampled_from(pairs), min_size=1, unique_by=lambda p: p[0].name)
        )
        masters = [data.draw(st.integers(0, NUM_INSTANCES - 1), label="master") for _ in batch]
        how = data.draw(st.sampled_from([PLAIN, GREEDY, DRAWN]), label="sampling")
        members = data.draw(st.permutations(range(NUM_INSTANCES)), label="members")
        plan = [(pair[0].name, master) for pair, master in zip(batch, masters, strict=True)]
        work = [(pair, 1, master, []) for pair, master in zip(batch, masters, strict=True)]
        unknown = plan == before and data.draw(st.booleans(), label="queued")
        _advance(clusters, list(members), work, how, unknown=unknown)
        before = plan
        if data.draw(st.integers(0, 5), label="move") == 0:
            pair = data.draw(st.sampled_from(pairs), label="moved")
            source = data.draw(st.sampled_from(pair[0].holders), label="source")
            target = (source + 1) % NUM_INSTANCES
            count = data.draw(st.integers(1, pair[0].on(source)), label="count")
            for side, cluster in enumerate(clusters):
                cluster.migrate(pair[side], source, target, count)
            before = []
        for side, cluster in enumerate(clusters):
            cluster.check(*(pair[side] for pair in pairs))
    assert clusters[0].graph_steps


@pytest.mark.parametrize("most_fresh", [0, decode_graphs.MOST_FRESH])
def test_the_same_step_again_and_again(
    clusters: tuple[DecodingCluster, Cluster], monkeypatch: pytest.MonkeyPatch, most_fresh: int
) -> None:
    """Steps that follow each other take their tokens from the device, across a full region; new
    keys are stored by attention, or ahead of it."""
    monkeypatch.setattr(slot_table, "_LEAST_ROOM", 8)
    monkeypatch.setattr(decode_graphs, "MOST_FRESH", most_fresh)
    for cluster in clusters:
        cluster.reset()
    pair = (Sequence("a", [3, 1, 4]), Sequence("a", [3, 1, 4]))
    other = (Sequence("b", [1, 5, 9, 2]), Sequence("b", [1, 5, 9, 2]))
    _advance(clusters, [0, 1], [(pair, 3, None, [(0, 2), (1, 1)])], PLAIN)
    _advance(clusters, [0, 1], [(other, 4, None, [(1, 4)])], PLAIN)
    for step in range(25):
        work = [(pair, 1, 0, []), (other, 1, 1, [])]
        _advance(clusters, [0, 1], work, PLAIN, unknown=step > 0)
    for side, cluster in enumerate(clusters):
        cluster.check(pair[side], other[side])


def test_freed_requests_leave_nothing(clusters: tuple[DecodingCluster, Cluster]) -> None:
    for cluster in clusters:
        cluster.reset()
    for number in range(30):
        tokens = [(number + i) % 199 for i in range(1 + number)]
        pair = (Sequence(str(number), list(tokens)), Sequence(str(number), list(tokens)))
        _advance(clusters, [0], [(pair, len(tokens), None, [(0, len(tokens))])], PLAIN)
        _advance(clusters, [0, 2], [(pair, 1, 2, [])], PLAIN)
        for side, cluster in enumerate(clusters):
            cluster.free(pair[side])
            cluster.check()


# ---- the table alone --------------------------------------------------------------------------


def _extend(cached: list[int], segment: int, start: int) -> Extend:
    return Extend(
        request_id="r",
        tokens=pack_tokens([1]),
        start=start,
        master=0,
        segment=segment,
        keep=[],
        cached=cached,
        holders=[0],
        sampling=None,
    )


def _pool(num_slots: int) -> KvCache:
    return KvCache(
        num_layers=1,
        num_slots=num_slots,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.float32,
        device=CPU,
    )


def _grown(table: SlotTable, extend: Extend, count: int | None) -> tuple[int, int]:
    """The region after a step with `count` new tokens, or a decode step, has written into it."""
    if count is None:
        slots, begins, ends = table.grow([extend], [extend.start])
        begin, end = int(begins[0]), int(ends[0])
    else:
        slots, begin, end = table.grow_by(extend, count)
    table.upload()
    table.slots_S[end - len(slots) : end] = torch.from_numpy(slots).int()
    return begin, end


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_table_says_what_the_pool_says(data: st.DataObject) -> None:
    """Whatever happens in between, a region lists the request's slots, oldest first."""
    kv = _pool(400)
    table = SlotTable(kv)
    table._most = 3 * 400  # reached soon: all regions are dropped
    requests: dict[int, tuple[list[int], int | None, int]] = {}
    next_segment = 0
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["new", "decode", "chunk", "eager", "undo", "free"]))
        if what == "new" and kv.num_free >= 20:
            next_segment += 2
            count = data.draw(st.integers(0, 20))
            if count:
                kv.extend(next_segment, np.arange(count))
            requests[next_segment] = ([next_segment], None, count)
        elif requests and kv.num_free:
            key = data.draw(st.sampled_from(sorted(requests)))
            cached, open_segment, length = requests[key]
            segment = open_segment if open_segment is not None else key + 1
            extend = _extend(cached, segment, length)
            count = data.draw(st.integers(1, min(20, kv.num_free))) if what == "chunk" else 1
            table.begin_step(1, count)
            begin, end = table.older([extend])[:, 0].tolist()
            table.upload()
            assert table.slots_S[begin:end].tolist() == kv.slots_of(cached).tolist()
            if what == "free":
                kv.free([*cached, segment])
                table.forget([*cached, segment])
                del requests[key]
                continue
            grown = cached if segment in cached else [*cached, segment]
            if what == "eager":
                kv.extend(segment, np.array([length]), after=cached)
            else:
                begin, end = _grown(table, extend, count if what == "chunk" else None)
                assert table.slots_S[begin:end].tolist() == kv.slots_of(grown).tolist()
            if what == "undo":
                kv.truncate(segment, 1)
                continue
            requests[key] = (grown, segment, length + count)
        kv.check()


def test_no_graph_for_other_steps() -> None:
    one = _extend([1], 2, 5)
    step = RunStep(step_id=1, epoch=1, members=[0, 1], batch=[one])
    shape = shape_of(step, 0)
    assert shape is not None
    assert (shape.bucket, shape.owns, shape.exchanges) == (1, True, False)
    many = replace(one, tokens=pack_tokens([1, 2]))
    assert shape_of(replace(step, batch=[many]), 0) is None
    assert shape_of(replace(step, batch=[replace(one, master=None)]), 0) is None
    assert shape_of(replace(step, batch=[one] * (BUCKETS[-1] + 1)), 0) is None
    # exchanged rows are fewer
    far = replace(one, holders=[1])
    assert shape_of(replace(step, batch=[far] * (MAX_EXCHANGED_ROWS + 1)), 0) is None
    answers = shape_of(replace(step, batch=[far] * 3), 1)
    assert answers is not None
    assert (answers.bucket, answers.owns, answers.answers) == (4, False, (0,))
