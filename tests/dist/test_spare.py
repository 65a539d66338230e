"""Attention that wants rows behind a lone prompt's queries, keys and values gets them; where the
step is a graph, those of the bucket's padding."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cluster_kit import Cluster, Sequence
from torch import Tensor

from loongd.kernels.attention import CpuFlashBackend, Spans
from loongd.kernels.spare import with_spare
from loongd.kernels.triton_backend import TritonBackend
from loongd.worker import prefill_graphs
from loongd.worker.decode_graphs import DecodeGraphs, DecodeParts
from loongd.worker.decoder import Decoder
from loongd.worker.prefill_graphs import PrefillGraphs, PrefillParts
from loongd.worker.prefiller import Prefiller
from loongd.worker.runner import Runner
from loongd.worker.slot_table import SlotTable

PROMPT = [37 * i % 199 for i in range(60)]
LEAST, STEP = 12, 16


class _Rounding(CpuFlashBackend):
    """Squares of `LEAST` tokens and more, alone, are done in multiples of `STEP`; notes them."""

    def __init__(self, scale: float) -> None:
        super().__init__(scale)
        self.planned = self  # type: ignore[assignment]
        self.rounded: list[tuple[int, int]] = []
        self.squares: list[tuple[int, ...]] = []

    def ahead(self, *_: int) -> tuple[float, ...]:
        return ()

    def spare(self, num_tokens: int) -> int:
        return -num_tokens % STEP if num_tokens >= LEAST else 0

    def is_one_call(self, num_tokens: int) -> bool:
        return num_tokens >= LEAST and num_tokens % STEP == 0

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        if not spans.spare:
            self.squares.append(spans.q_lens)
            return super().square_causal(q_TNH, k_TKH, v_TKH, spans)
        (length,) = spans.q_lens
        assert len(q_TNH) == len(k_TKH) == len(v_TKH) == length
        whole = length + spans.spare
        self.rounded.append((length, whole))
        wide = (with_spare(x, spans.spare) for x in (q_TNH, k_TKH, v_TKH))
        rounded = Spans((whole,), (whole,), spans.device)
        out, lse = super().square_causal(*wide, rounded)
        return out[:length], lse[:length]


def tokens_of(cluster: Cluster) -> list[dict[str, int]]:
    """What is drawn in steps of all kinds."""
    a, b, c = (Sequence(name, [*PROMPT[i:], *PROMPT]) for i, name in enumerate("abc"))
    steps = [
        ([0], [(a, 20, None, [(0, 20)])]),  # a lone prompt
        ([0], [(a, 13, None, [(0, 13)])]),  # over older tokens
        ([0], [(a, 16, None, [(0, 16)])]),  # of a good length
        ([0], [(a, 1, 0, [])]),
        ([0], [(b, 20, None, [(0, 20)]), (a, 1, 0, [])]),  # beside decode
        ([0], [(a, 13, None, [(0, 13)]), (b, 14, None, [(0, 14)])]),
        ([0, 1], [(c, 40, None, [(1, 40)])]),  # on a group
        ([1], [(c, 17, None, [(1, 17)])]),
    ]
    drawn = []
    for members, work in steps:
        sampled = cluster.extend(members, work)
        drawn.append({name: one.token for name, one in sampled.items()})
    return drawn


def test_only_lone_prompts_have_rows_behind_them(llama_dir: Path) -> None:
    expected = tokens_of(Cluster(llama_dir, 2))
    cluster = Cluster(llama_dir, 2)
    backends = [_Rounding(cluster.spec.head_dim**-0.5) for _ in cluster.runners]
    for runner, backend in zip(cluster.runners, backends, strict=True):
        runner.parts = replace(runner.parts, backend=backend)
    assert tokens_of(cluster) == expected
    # of the last layer, only the last token's row is computed, by another way, where nothing is old
    first, second = backends
    assert first.rounded == [(20, 32)] * 2 + [(13, 16)] * 3
    assert second.rounded == [(17, 32)] * 3


def test_steps_that_pause_keep_them(llama_dir: Path) -> None:
    tokens, rounded = [], []
    for pauses in ((), (1, 2)):
        cluster = Cluster(llama_dir, 1)
        (runner,), backend = cluster.runners, _Rounding(cluster.spec.head_dim**-0.5)
        runner.parts = replace(runner.parts, backend=backend)
        sequence = Sequence("a", PROMPT)
        drawn = cluster.extend([0], [(sequence, 21, None, [(0, 21)])], pauses=pauses)
        tokens.append(drawn["a"].token)
        rounded.append(backend.rounded)
    assert tokens[0] == tokens[1]
    assert rounded == [[(21, 32)] * 2] * 2


def with_graphs(cluster: Cluster) -> list[_Rounding]:
    """Runners whose small steps run as graphs do, without the capture; their backends."""
    backends = [_Rounding(cluster.spec.head_dim**-0.5) for _ in cluster.runners]
    for rank, backend in enumerate(backends):
        runner, kv = cluster.runners[rank], cluster.pools[rank]
        table = SlotTable(kv)
        small = PrefillParts(cluster._model, cluster.spec, kv, table, backend)
        decoding = DecodeParts(cluster._model, kv, table, None, cluster.spec.head_dim**-0.5)
        cluster.runners[rank] = Runner(
            runner.parts,
            rank,
            runner._pulse,
            decoder=Decoder(DecodeGraphs(decoding), table, kv, rank),
            prefiller=Prefiller(small, PrefillGraphs(small), rank),
        )
    return backends


def test_a_lone_prompt_of_a_graph_is_a_square(llama_dir: Path) -> None:
    """Over its own rows and the bucket's, which come last; everything else goes over the pool."""
    expected = tokens_of(Cluster(llama_dir, 2))
    cluster = Cluster(llama_dir, 2)
    backends = with_graphs(cluster)
    assert tokens_of(cluster) == expected
    assert [backend.squares for backend in backends] == [[(32,)] * 2, []]
    assert not any(backend.rounded for backend in backends)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_padding_is_as_finite_as_the_prompt(llama_dir: Path, bad: float) -> None:
    """A square computes the rows behind the prompt too, and 0 times NaN would not be 0."""
    tokens = []
    for graphs in (False, True):
        cluster = Cluster(llama_dir, 1)
        cluster._model._weights.embed_VD[0] = bad
        backends = with_graphs(cluster) if graphs else []
        sequence = Sequence("a", [token or 1 for token in PROMPT])
        tokens.append(cluster.extend([0], [(sequence, 20, None, [(0, 20)])])["a"].token)
        assert all(backend.squares == [(32,)] * 2 for backend in backends)
    assert tokens[0] == tokens[1]


def test_prompts_that_no_library_takes_go_over_the_pool(llama_dir: Path) -> None:
    cluster = Cluster(llama_dir, 1)
    (backend,) = with_graphs(cluster)
    backend.is_one_call = lambda _: False  # type: ignore[method-assign]
    cluster.extend([0], [(Sequence("a", PROMPT), 20, None, [(0, 20)])])
    assert backend.squares == []


def test_graphs_of_lone_prompts_are_captured_ahead(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(llama_dir, 1)
    backend, kv = _Rounding(cluster.spec.head_dim**-0.5), cluster.pools[0]
    monkeypatch.setattr(backend, "is_one_call", lambda num_tokens: num_tokens in (32, 64))
    monkeypatch.setattr(prefill_graphs, "BUCKETS", (16, 32, 64))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    graphs = PrefillGraphs(PrefillParts(cluster._model, cluster.spec, kv, SlotTable(kv), backend))
    captured: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        graphs._graphs, "graph", lambda shape: captured.append((shape.bucket, shape.is_square))
    )
    with torch.inference_mode():
        fractions = list(graphs.capture())
    assert captured == [(64, False), (64, True), (32, False), (32, True), (16, False)]
    assert fractions[-1] == 1.0


def _on_gpu(wide_dir: Path, *, planned: bool) -> Cluster:
    """One instance in bfloat16; with cuDNN, and small prompts as graphs, if `planned`."""
    device = torch.device("cuda")
    cluster = Cluster(wide_dir, 1, num_slots=20_000, dtype=torch.bfloat16, device=device)
    (runner,), (kv,), spec = cluster.runners, cluster.pools, cluster.spec
    if not planned:
        runner.parts = replace(runner.parts, backend=TritonBackend(spec.head_dim**-0.5))
        return cluster
    small = PrefillParts(cluster._model, spec, kv, SlotTable(kv), runner.parts.backend)
    graphs = PrefillGraphs(small)
    with torch.inference_mode():
        for bucket, is_lone in itertools.product((1024, 1280, 2048), (False, True)):
            shape = graphs.shape_of(bucket, is_lone=is_lone)
            assert shape.is_square == is_lone
            graphs._step(shape).run()  # compiles and plans
            graphs._graphs.graph(shape)  # here, not on a thread that knows no library yet
    cluster.runners[0] = Runner(
        runner.parts, 0, runner._pulse, prefiller=Prefiller(small, graphs, 0)
    )
    return cluster


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1024, 1100, 2048, 2300, 5003])
def test_lone_prompts_on_a_gpu(wide_dir: Path, count: int) -> None:
    """Graphs and launches with cuDNN leave the same K and V as own kernels, and so had the same
    attention; the second chunk has older tokens."""
    clusters = [_on_gpu(wide_dir, planned=planned) for planned in (True, False)]
    tokens = [37 * i * i % 199 for i in range(2 * count)]
    sequences = [Sequence("a", list(tokens)) for _ in clusters]
    for _ in range(2):
        for cluster, sequence in zip(clusters, sequences, strict=True):
            cluster.extend([0], [(sequence, count, None, [(0, count)])])
        ours, theirs = (torch.stack((c.pools[0].k_LSKH, c.pools[0].v_LSKH)) for c in clusters)
        assert torch.equal(ours.isnan(), theirs.isnan())
        held = ~theirs[0, 0, :, 0, 0].isnan()
        assert int(held.sum()) == sequences[0].done
        for layer in range(ours.shape[1]):
            ours_F, theirs_F = (x[:, layer, held].float() for x in (ours, theirs))
            error = (ours_F - theirs_F).norm(dim=-1) / theirs_F.norm(dim=-1)
            assert error.max() < 0.1, f"layer {layer}"
