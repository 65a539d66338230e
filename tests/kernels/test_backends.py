"""Backends equal dense attention for every mix of span sizes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kernel_kit import assert_close, make_problem, poisoned
from torch import Tensor

from loongd.kernels import cudnn, reference
from loongd.kernels.attention import PoolSlots, Spans
from loongd.kernels.triton_backend import TritonBackend

FULL = torch.float32
MIXES = [
    ((1, 1, 1), (40, 0, 7)),
    ((2, 1), (40, 9)),
    ((100, 1), (150, 40)),
    ((70, 100, 1, 0), (33, 300, 0, 5)),
]


@pytest.fixture
def small_cudnn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Stand-in for cuDNN from 64 tokens on; returns the calls it got: queries, keys, causal."""
    calls = []

    def attention(
        q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        calls.append((len(q_TNH), len(k_TKH), causal))
        one = ((0, len(q_TNH), 0, len(k_TKH)),)
        return reference.extend(q_TNH, k_TKH, v_TKH, None, one, scale=scale, causal=causal)

    monkeypatch.setattr(cudnn, "attention", attention)
    for name in ("LEAST_SQUARE", "LEAST_SQUARE_OF_MANY"):
        monkeypatch.setattr(cudnn, name, 64)
    monkeypatch.setattr(cudnn, "_STEP", 64)
    monkeypatch.setattr(cudnn, "QUERY_SIZES", (64, 32))
    monkeypatch.setattr(cudnn, "KEY_SIZES", (128, 64))
    return calls


def check_over_pool(
    backend: TritonBackend,
    device: torch.device,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    gap_at: int | None = None,
) -> None:
    """With `gap_at`, the slots are two runs, the second one from that key on."""
    p = make_problem(q_lens, k_lens, heads=(6, 2), head_dim=64, dtype=FULL, device=device)
    if gap_at is not None:
        at = torch.arange(len(p.slots), device=device)
        at[gap_at:] += 1
        k, v = p.k[p.slots], p.v[p.slots]
        p.k[at], p.v[at], p.slots = k, v, at
    host = p.slots.cpu().numpy().astype(np.int64)
    slots = PoolSlots(tuple(host[k0:k1] for _, _, k0, k1 in p.ranges), device)
    spans = Spans(tuple(q_lens), tuple(k_lens), device)
    with poisoned():
        out, lse = backend.over_pool(p.q, p.k, p.v, slots, spans)
    q, k, v, at = p.doubled
    expected = reference.extend(q, k, v, at, p.ranges, scale=p.scale)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)


@pytest.mark.parametrize(("q_lens", "k_lens"), MIXES)
def test_over_pool(device: torch.device, q_lens: Sequence[int], k_lens: Sequence[int]) -> None:
    check_over_pool(TritonBackend(0.125), device, q_lens, k_lens)


@pytest.mark.parametrize("gap_at", [None, 0, 33 + 128, 33 + 200, 33 + 329])
def test_over_pool_long(
    device: torch.device, small_cudnn: list[tuple[int, int, bool]], gap_at: int | None
) -> None:
    """Pieces by cuDNN, as views where their slots are a run, odd queries and keys by Triton."""
    backend = TritonBackend(0.125, use_cudnn=True)
    check_over_pool(backend, device, (70, 100, 3, 65), (33, 330, 40, 64), gap_at=gap_at)
    of_second = [(rows, keys, False) for keys in (128, 128, 64) for rows in (64, 32)]
    assert small_cudnn == [*of_second, (64, 64, False)]


@pytest.mark.parametrize("use_cudnn", [False, True])
@pytest.mark.parametrize("lens", [(5, 0, 40), (150, 1, 64, 63)], ids=str)
def test_square_causal(
    device: torch.device,
    small_cudnn: list[tuple[int, int, bool]],
    lens: Sequence[int],
    use_cudnn: bool,
) -> None:
    p = make_problem(lens, lens, heads=(6, 2), head_dim=64, dtype=FULL, device=device)
    k, v = p.k[p.slots], p.v[p.slots]
    backend = TritonBackend(p.scale, use_cudnn=use_cudnn)
    with poisoned():
        out, lse = backend.square_causal(p.q, k, v, Spans(tuple(lens), tuple(lens), device))
    doubled = (x.double().cpu() for x in (p.q, k, v))
    expected = reference.extend(*doubled, None, p.ranges, scale=p.scale, causal=True)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)
    long = [(128, 128, True), (64, 64, True)] if max(lens) >= 64 and use_cudnn else []
    assert small_cudnn == long


@pytest.mark.parametrize("use_cudnn", [False, True])
def test_squares_between_rows_that_have_no_partner(
    device: torch.device, small_cudnn: list[tuple[int, int, bool]], use_cudnn: bool
) -> None:
    """Ring blocks: queries without keys and keys without queries lie between the squares."""
    q_lens, k_lens = (1, 70, 0, 1, 1, 5, 0), (0, 70, 1, 0, 0, 5, 2)
    p = make_problem(q_lens, k_lens, heads=(6, 2), head_dim=64, dtype=FULL, device=device)
    k, v = p.k[p.slots], p.v[p.slots]
    backend = TritonBackend(p.scale, use_cudnn=use_cudnn)
    with poisoned():
        out, lse = backend.square_causal(p.q, k, v, Spans(q_lens, k_lens, device))
    doubled = (x.double().cpu() for x in (p.q, k, v))
    expected = reference.extend(*doubled, None, p.ranges, scale=p.scale, causal=True)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)
    assert torch.isneginf(lse[[0, 71, 72]]).all()
    assert small_cudnn == ([(64, 64, True)] if use_cudnn else [])


def test_square_in_the_type_of_queries(
    device: torch.device, small_cudnn: list[tuple[int, int, bool]]
) -> None:
    """No copy to float32: a library's result as it is, and odd rows written beside it."""
    for lens in ((128,), (100,), (64, 5)):
        p = make_problem(lens, lens, heads=(4, 2), head_dim=64, dtype=torch.float16, device=device)
        k, v = p.k[p.slots], p.v[p.slots]
        backend = TritonBackend(p.scale, use_cudnn=True)
        with poisoned():
            out, lse = backend.square_causal(p.q, k, v, Spans(lens, lens, device))
        doubled = (x.double().cpu() for x in (p.q, k, v))
        expected = reference.extend(*doubled, None, p.ranges, scale=p.scale, causal=True)
        assert_close(out, expected[0], torch.float16)
        assert_close(lse, expected[1], torch.float16)
        assert lens == (128,) or out.dtype == torch.float16
    assert small_cudnn == [(128, 128, True), (64, 64, True), (64, 64, True)]


def test_names() -> None:
    assert TritonBackend(1.0).name == "triton"
    assert TritonBackend(1.0, use_cudnn=True).name == "triton+cudnn"


@pytest.mark.parametrize("sizes", [cudnn.QUERY_SIZES, cudnn.KEY_SIZES], ids=str)
@pytest.mark.parametrize("length", [0, 1, 511, 512, 2047, 2048, 12_288, 64_000, 1_048_575])
def test_pieces_cover_all_but_a_small_rest(length: int, sizes: tuple[int, ...]) -> None:
    found = cudnn.pieces(length, sizes)
    assert set(found) <= set(sizes)
    assert 0 <= length - sum(found) < sizes[-1]
    assert found == sorted(found, reverse=True)
    assert all(found.count(size) < 4 for size in sizes[1:]), "few merges beside the largest"


def test_planned_lengths_are_few() -> None:
    """At most 8 an octave and as many less one; none above the length or an eighth below it."""
    planned = {cudnn.aligned(n, 1024) for n in range(1024, 32769)}
    squares = 4 + 4 * 8 + 1
    shorter = 3 * 8 + 1
    assert len(planned) == squares + shorter
    assert cudnn.aligned(16383, 1024) == 16383
    for n in range(1024, 131072, 37):
        assert n - max(256, n / 8) < cudnn.aligned(n, 1024) <= n
    assert cudnn.aligned(1023, 1024) == 0
    assert cudnn.aligned(200_003, 2048) == 200_003
