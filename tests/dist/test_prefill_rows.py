"""Small prefill steps as graphs run them: the same tokens as the eager way, and the same pool.

On a CPU the torch twins of the kernels are run without a capture; on a GPU the graphs themselves.
The oracle is a second cluster without graphs, given the same plans.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster_kit import CPU, GREEDY, Cluster, Sequence
from graph_kit import same_draws
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from loongd.errors import PlanError
from loongd.kernels.cudnn import LEAST_QUERIES
from loongd.wire import Extend, RunStep, Sampled, Sampling, pack_tokens
from loongd.worker import slot_table
from loongd.worker.decode_graphs import DecodeGraphs, DecodeParts
from loongd.worker.decoder import Decoder
from loongd.worker.kvcache import KvCache
from loongd.worker.prefill_graphs import PrefillGraphs, PrefillParts
from loongd.worker.prefill_layout import (
    BUCKETS,
    MOST_PAIRS,
    MOST_REQUESTS,
    PrefillShape,
    bucket_of,
    lay_out_prefill,
)
from loongd.worker.prefiller import Prefiller
from loongd.worker.runner import Runner
from loongd.worker.slot_table import SlotTable

NUM_INSTANCES = 2
DRAWN = Sampling(temperature=1.0, seed=5, num_logprobs=2)
Pair = tuple[Sequence, Sequence]
RunNow = Callable[[RunStep], list[Sampled]]


class PrefillingCluster(Cluster):
    """Runners with graphs, or with what those would run."""

    def __init__(self, llama_dir: Path, device: torch.device) -> None:
        super().__init__(llama_dir, NUM_INSTANCES, device=device)
        for rank, kv in enumerate(self.pools):
            runner = self.runners[rank]
            if device.type == "cuda":
                runner.capture(1, lambda *_: None)
                continue
            table = SlotTable(kv)
            small = PrefillParts(
                self._model, self.spec, kv, table, self.runners[rank].parts.backend
            )
            parts = DecodeParts(self._model, kv, table, None, self.spec.head_dim**-0.5)
            self.runners[rank] = Runner(
                runner.parts,
                rank,
                runner._pulse,
                decoder=Decoder(DecodeGraphs(parts), table, kv, rank),
                prefiller=Prefiller(small, PrefillGraphs(small), rank),
            )

    def forbid_eager(self) -> None:
        """From now on, a step of one member that runs the eager way fails."""
        for runner in self.runners:

            def guarded(step: RunStep, run_now: RunNow = runner._run_now) -> list[Sampled]:
                assert len(step.members) > 1
                return run_now(step)

            runner._run_now = guarded  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def clusters(request: pytest.FixtureRequest, llama_dir: Path) -> tuple[PrefillingCluster, Cluster]:
    device = torch.device(request.param)
    ours = PrefillingCluster(llama_dir, device)
    ours.forbid_eager()
    return ours, Cluster(llama_dir, NUM_INSTANCES, device=device)


def _advance(
    clusters: tuple[PrefillingCluster, Cluster],
    members: list[int],
    work: list[tuple[Pair, int, int | None]],
    how: Sampling | None,
) -> None:
    """The same step on both, kept by the first member; drawn tokens are compared and appended."""
    results = []
    for side, cluster in enumerate(clusters):
        one = [
            (pair[side], count, master, [(members[0], count)] if master is None else [])
            for pair, count, master in work
        ]
        params = {} if how is None else {pair[side].name: how for pair, *_ in work}
        results.append(cluster.extend(members, one, sample=how is not None, sampling=params))
    same_draws(results, [pair for pair, *_ in work] if how is not None else [])


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_mix_of_chunks(
    clusters: tuple[PrefillingCluster, Cluster], data: st.DataObject
) -> None:
    """Prompts in chunks of any size, alone and together, with decode and migration between."""
    for cluster in clusters:
        cluster.reset()
    pairs: list[Pair] = []
    homes: dict[str, int] = {}
    for number in range(data.draw(st.integers(1, 5), label="requests")):
        length = data.draw(st.integers(1, 40), label="length")
        tokens = [(31 * number + 7 * i) % 199 for i in range(length)]
        pairs.append((Sequence(str(number), list(tokens)), Sequence(str(number), list(tokens))))
        homes[str(number)] = data.draw(st.integers(0, 1), label="home")
    for _ in range(data.draw(st.integers(1, 6), label="steps")):
        home = data.draw(st.integers(0, 1), label="on")
        batch = [
            pair
            for pair in pairs
            if homes[pair[0].name] == home and pair[0].done < len(pair[0].tokens)
        ]
        if not batch:
            continue
        chosen = data.draw(
            st.lists(st.sampled_from(batch), min_size=1, unique_by=lambda pair: pair[0].name)
        )
        counts = [
            data.draw(st.integers(1, len(pair[0].tokens) - pair[0].done), label="new tokens")
            for pair in chosen
        ]
        ends = all(
            len(pair[0].tokens) == pair[0].done + count
            for pair, count in zip(chosen, counts, strict=True)
        )
        how = data.draw(st.sampled_from([GREEDY, DRAWN]), label="sampling") if ends else None
        # a single token of a master draws always
        masters = st.sampled_from([None, home]) if ends else st.none()
        work = [
            (pair, count, data.draw(masters, label="master"))
            for pair, count in zip(chosen, counts, strict=True)
        ]
        _advance(clusters, [home], work, how)
        moved = data.draw(st.sampled_from(chosen), label="moved")
        if data.draw(st.integers(0, 4), label="move") == 0:
            for side, cluster in enumerate(clusters):
                cluster.migrate(moved[side], home, 1 - home, moved[side].on(home))
            homes[moved[0].name] = 1 - home
        if not ends:
            continue
        for side, cluster in enumerate(clusters):
            cluster.check(*(pair[side] for pair in pairs))


def test_decode_goes_on_from_a_prefill(
    clusters: tuple[PrefillingCluster, Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The region that a prefill has written is the one that decode steps lengthen, also when it
    is full; prefills on two instances, which are no graphs, do no harm to it."""
    monkeypatch.setattr(slot_table, "_LEAST_ROOM", 8)
    for cluster in clusters:
        cluster.reset()
    pairs = [
        (Sequence(name, list(tokens)), Sequence(name, list(tokens)))
        for name, tokens in (("a", range(1, 80)), ("b", range(5, 9)), ("c", range(3, 70)))
    ]
    a, b, c = pairs
    _advance(clusters, [0], [(a, 60, None)], None)
    _advance(clusters, [0, 1], [(c, 67, None)], GREEDY)
    _advance(clusters, [0], [(b, 4, None), (a, 19, None)], GREEDY)
    for _ in range(20):
        _advance(clusters, [0], [(a, 1, 0), (b, 1, 0)], GREEDY)
    _advance(clusters, [0], [(c, 1, None)], GREEDY)
    for side, cluster in enumerate(clusters):
        cluster.check(*(pair[side] for pair in pairs))


def test_a_full_pool_refuses_and_forgets(clusters: tuple[PrefillingCluster, Cluster]) -> None:
    for cluster in clusters:
        cluster.reset()
    pair = (Sequence("a", list(range(100))), Sequence("a", list(range(100))))
    _advance(clusters, [0], [(pair, 50, None)], None)
    ours = clusters[0]
    one = _extend(300, start=0)
    step = RunStep(step_id=9, epoch=1, members=[0], batch=[replace(one, segment=998), one])
    with pytest.raises(PlanError, match="slots"):
        ours.runners[0].run(step)
    ours.check(pair[0])
    _advance(clusters, [0], [(pair, 50, None)], GREEDY)


# ---- the layout alone -------------------------------------------------------------------------


def _extend(count: int, *, start: int, segment: int = 999) -> Extend:
    return Extend(
        request_id=str(segment),
        tokens=pack_tokens([(segment + i) % 199 for i in range(count)]),
        start=start,
        master=None,
        segment=segment,
        keep=[(0, count)],
        cached=[],
        holders=[0] if start else [],
        sampling=GREEDY,
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[KvCache, RunStep]:
    """A pool with older tokens of some requests, and a step that extends them and others."""
    kv = KvCache(
        num_layers=1, num_slots=3000, num_kv_heads=1, head_dim=8, dtype=torch.float32, device=CPU
    )
    batch = []
    for segment in range(1, 2 * draw(st.integers(1, 12)), 2):
        older = draw(st.integers(0, 90))
        if older:
            kv.extend(segment, np.arange(older))
        one = _extend(draw(st.integers(1, 60)), start=older, segment=segment + 1)
        batch.append(replace(one, cached=[segment], holder_tokens=[older] if older else []))
    return kv, RunStep(step_id=1, epoch=1, members=[0], batch=batch)


def _parts(
    kv: KvCache, step: RunStep, cut: tuple[int, int, int]
) -> tuple[SlotTable, list[np.ndarray]]:
    """The table as it is after the step's first kernel, and the parts of the step's numbers."""
    table = SlotTable(kv)
    bucket = bucket_of(step, 0)
    assert bucket is not None
    shape = PrefillShape(bucket, *cut)
    numbers = lay_out_prefill(step, 0, shape, table, []).numbers
    assert len(numbers) == sum(shape.sizes)
    table.upload()
    parts = np.split(numbers, np.cumsum(shape.sizes)[:-1])
    table.slots_S[torch.from_numpy(parts[3]).long()] = torch.from_numpy(parts[2])
    return table, parts


@settings(max_examples=30, deadline=None)
@given(given_batch=batches())
def test_rows_and_regions_say_what_the_pool_says(given_batch: tuple[KvCache, RunStep]) -> None:
    kv, step = given_batch
    table, parts = _parts(kv, step, (3, 32, 16))
    tokens, positions, slots, entries, rows, begins, ends, tiles, _ = parts
    listed = tiles.reshape(-1, 5).tolist()
    spans = {q: (q_len, k, k_len) for q, q_len, k, k_len, _ in listed if q_len}
    first = 0
    for number, extend in enumerate(step.batch):
        last = first + len(extend.tokens) // 4
        at = kv.slots_of([*extend.cached, extend.segment])
        q_len, begin, k_len = spans[first]
        assert (q_len, k_len) == (last - first, len(at))
        assert len(at) == extend.start + q_len
        assert table.slots_S[begin : begin + k_len].tolist() == at.tolist()
        assert slots[first:last].tolist() == at[extend.start :].tolist()
        assert positions[first:last].tolist() == [*range(extend.start, k_len)]
        assert pack_tokens(tokens[first:last].tolist()) == extend.tokens
        assert (rows[number], begins[number], ends[number]) == (last - 1, begin, begin + k_len)
        first = last
    assert (slots[first:] == -1).all()
    assert (entries[first:] == table.scratch).all()
    assert not (ends - begins)[len(step.batch) :].any()


@settings(max_examples=30, deadline=None)
@given(
    given_batch=batches(),
    cut=st.sampled_from([(1, 16, 16), (3, 32, 16), (4, 128, 64), (7, 64, 32)]),
)
def test_tiles_cover_each_row_and_all_it_sees(
    given_batch: tuple[KvCache, RunStep], cut: tuple[int, int, int]
) -> None:
    """By hand: each (token, head) is in one tile, which ends with the last key that it sees."""
    group, block_m, block_k = cut
    *_, tiles, ends = _parts(*given_batch, cut)[1]
    num_tokens = sum(len(extend.tokens) // 4 for extend in given_batch[1].batch)
    seen = np.zeros((num_tokens, group), int)
    blocks = 0
    for tile, (q_start, q_len, _, k_len, row0) in enumerate(tiles.reshape(-1, 5)):
        assert ends[tile] == blocks
        live = np.arange(row0, min(row0 + block_m, q_len * group))
        seen[q_start + live // group, live % group] += 1
        if len(live):
            last_key = k_len - q_len + live[-1] // group
            blocks += last_key // block_k + 1
    assert ends[-1] == blocks
    assert (seen == 1).all()


def test_no_graph_for_other_steps() -> None:
    one = _extend(5, start=0)
    step = RunStep(step_id=1, epoch=1, members=[0], batch=[one])
    assert bucket_of(step, 0) == BUCKETS[0]
    assert bucket_of(replace(step, members=[0, 1]), 0) is None
    assert bucket_of(replace(step, batch=[one] * MOST_REQUESTS), 0) == 256
    assert bucket_of(replace(step, batch=[one] * (MOST_REQUESTS + 1)), 0) is None
    assert bucket_of(replace(step, batch=[_extend(2048, start=0)]), 0) == BUCKETS[-1]
    assert bucket_of(replace(step, batch=[_extend(2049, start=0)]), 0) is None
    assert bucket_of(replace(step, batch=[]), 0) is None
    long = MOST_PAIRS // 512 - 512
    assert bucket_of(replace(step, batch=[_extend(512, start=long)]), 0) == 512
    assert bucket_of(replace(step, batch=[_extend(512, start=long + 1)]), 0) is None
    assert bucket_of(replace(step, batch=[_extend(LEAST_QUERIES - 1, start=1 << 20)]), 0) == 384
