"""Backends equal dense attention for every mix of span sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from kernel_kit import assert_close, make_problem, poisoned
from torch import Tensor

from loongd.kernels import cudnn, reference, triton_backend
from loongd.kernels.attention import CudaFlashBackend, PoolSlots, Spans
from loongd.kernels.libraries import Cudnn
from loongd.kernels.spare import linear_with_spare, new_rows, with_spare
from loongd.kernels.triton_backend import TritonBackend
from loongd.model.llama import LINEAR_CHUNK_TOKENS

FULL = torch.float32
MIXES = [
    ((1, 1, 1), (40, 0, 7)),
    ((2, 1), (40, 9)),
    ((100, 1), (150, 40)),
    ((70, 100, 1, 0), (33, 300, 0, 5)),
]


@pytest.fixture
def small_cudnn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """Stand-in for cuDNN from 64 tokens on, or 20 over 64; the calls: queries, keys, causal."""
    calls = []

    def attention(
        q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        calls.append((len(q_TNH), len(k_TKH), causal))
        one = ((0, len(q_TNH), 0, len(k_TKH)),)
        return reference.extend(q_TNH, k_TKH, v_TKH, None, one, scale=scale, causal=causal)

    monkeypatch.setattr(cudnn, "attention", attention)
    monkeypatch.setattr(triton_backend, "MAX_DECODE_ROWS", 16)
    for name in ("LEAST_SQUARE", "LEAST_SQUARE_OF_MANY"):
        monkeypatch.setattr(cudnn, name, 64)
    monkeypatch.setattr(cudnn, "_STEPS", (64, 64))
    monkeypatch.setattr(cudnn, "QUERY_SIZES", (64, 32))
    monkeypatch.setattr(cudnn, "LEAST_QUERIES", 20)
    monkeypatch.setattr(cudnn, "KEY_SIZES", (128, 64))
    return calls


def of_cudnn(scale: float) -> TritonBackend:
    library = Cudnn(scale)
    return TritonBackend(scale, library, library)


def check_over_pool(
    backend: TritonBackend,
    device: torch.device,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    gap_at: int | None = None,
    heads: tuple[int, int] = (6, 2),
) -> None:
    """With `gap_at`, the slots are two runs, the second one from that key on."""
    p = make_problem(q_lens, k_lens, heads=heads, head_dim=64, dtype=FULL, device=device)
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
    backend = of_cudnn(0.125)
    check_over_pool(backend, device, (70, 100, 3, 65), (33, 330, 40, 64), gap_at=gap_at)
    of_second = [(rows, keys, False) for keys in (128, 128, 64) for rows in (64, 32)]
    assert small_cudnn == [*of_second, (64, 64, False)]


PADDED = [
    (1, []),
    (19, []),
    (20, [32]),
    (21, [32]),
    (31, [32]),
    (32, [32]),
    (33, [32]),
    (51, [32]),
    (52, [32, 32]),
    (63, [32, 32]),
    (64, [64]),
    (83, [64]),
    (84, [64, 32]),
    (115, [64, 32]),
    (116, [64, 32, 32]),
]
"""Queries, and the pieces that they are cut into."""


@pytest.mark.parametrize("gap_at", [None, 100])
@pytest.mark.parametrize(("num_q", "pieces"), PADDED, ids=str)
def test_queries_that_are_left_over_fill_a_padded_piece(
    device: torch.device,
    small_cudnn: list[tuple[int, int, bool]],
    num_q: int,
    pieces: list[int],
    gap_at: int | None,
) -> None:
    """Few that are left go to Triton, and with whole pieces of keys it has nothing else to do."""
    for num_k, keys in ((64, [64]), (129, [128]), (192, [128, 64])):
        check_over_pool(
            of_cudnn(0.125),
            device,
            (num_q,),
            (num_k,),
            gap_at=gap_at if num_k > 100 else None,
            heads=(8, 2),
        )
        assert small_cudnn == [(rows, part, False) for part in keys for rows in pieces]
        small_cudnn.clear()


def test_padded_pieces_beside_other_spans(
    device: torch.device, small_cudnn: list[tuple[int, int, bool]]
) -> None:
    """Each row has its own span's result, and none that is dropped reaches a neighbour."""
    backend = of_cudnn(0.125)
    q_lens, k_lens = (21, 2, 52, 30, 90, 24), (130, 70, 64, 0, 257, 63)
    for heads in ((3, 3), (6, 1)):
        check_over_pool(backend, device, q_lens, k_lens, heads=heads)
        first, third = [(32, 128, False)], [(32, 64, False)] * 2
        fifth = [(rows, 128, False) for _ in range(2) for rows in (64, 32)]
        assert small_cudnn == [*first, *third, *fifth]
        small_cudnn.clear()


def test_a_long_span_is_one_launch_of_own_kernels(
    device: torch.device,
    small_cudnn: list[tuple[int, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Odd keys and odd queries together; none where there are neither."""
    launched: list[tuple[triton_backend.Range, ...]] = []
    extend = triton_backend.extend

    def counting(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        launched.append(args[4])
        return extend(*args, **options)

    monkeypatch.setattr(triton_backend, "extend", counting)
    backend = of_cudnn(0.125)
    check_over_pool(backend, device, (70,), (135,))
    assert launched == [((0, 64, 128, 135), (64, 70, 0, 135))]
    launched.clear()
    check_over_pool(backend, device, (90,), (128,))
    assert launched == []
    assert small_cudnn == [(64, 128, False), (64, 128, False), (32, 128, False)]


def test_a_rehearsal_launches_the_same_and_calls_no_library(
    device: torch.device,
    small_cudnn: list[tuple[int, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of a padded piece too have the sizes and strides that they will have."""
    merged: list[tuple[Any, ...]] = []

    def noting(*states: Tensor) -> None:
        merged.append(tuple((x.shape, x.stride(), x.dtype) for x in states))

    def by_head(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = stand_in(*args, **options)
        return out, lse.T.contiguous().T

    monkeypatch.setattr(triton_backend, "merge_state_", noting)
    stand_in = cudnn.attention
    monkeypatch.setattr(cudnn, "attention", by_head)
    p = make_problem((90,), (135,), heads=(6, 2), head_dim=64, dtype=FULL, device=device)
    slots = PoolSlots((p.slots.cpu().numpy().astype(np.int64),), device)
    backend = of_cudnn(p.scale)
    for one in (backend, backend.rehearsing()):
        one.over_pool(p.q, p.k, p.v, slots, Spans((90,), (135,), device))
    assert small_cudnn == [(64, 128, False), (32, 128, False)]
    assert merged[:2] == merged[2:]
    assert [states[2][0] for states in merged] == [(64, 6, 64), (26, 6, 64)] * 2


@pytest.mark.parametrize("left", [1, 319, 320, 321, 511])
@pytest.mark.parametrize("whole", [0, 512, 3 * 512, 8192])
def test_queries_for_the_library(whole: int, left: int) -> None:
    """Whole pieces, and from 320 left on these too."""
    assert cudnn.query_rows(whole) == whole
    assert cudnn.query_rows(whole + left) == whole + (left if left >= 320 else 0)


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
    backend = of_cudnn(p.scale) if use_cudnn else TritonBackend(p.scale)
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
    backend = of_cudnn(p.scale) if use_cudnn else TritonBackend(p.scale)
    with poisoned():
        out, lse = backend.square_causal(p.q, k, v, Spans(q_lens, k_lens, device))
    doubled = (x.double().cpu() for x in (p.q, k, v))
    expected = reference.extend(*doubled, None, p.ranges, scale=p.scale, causal=True)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)
    assert torch.isneginf(lse[[0, 71, 72]]).all()
    assert small_cudnn == ([(64, 64, True)] if use_cudnn else [])


@pytest.mark.parametrize("length", [65, 100, 127, 128])
def test_a_lone_square_with_rows_behind_it(
    device: torch.device, small_cudnn: list[tuple[int, int, bool]], length: int
) -> None:
    """One call of a planned length; what it computes of the rows behind is dropped."""
    p = make_problem((length,), (length,), heads=(6, 2), head_dim=64, dtype=FULL, device=device)
    backend = of_cudnn(p.scale)
    assert backend.planned is not None
    spare = backend.planned.spare(length)
    assert spare == 128 - length
    assert TritonBackend(p.scale).planned is None
    rows = [new_rows(x, tuple(x.shape), spare) for x in (p.q, p.k[p.slots], p.v[p.slots])]
    for row, x in zip(rows, (p.q, p.k[p.slots], p.v[p.slots]), strict=True):
        row.copy_(x)
    with_spare(rows[0], spare)[length:] = torch.nan
    spans = Spans((length,), (length,), device, spare=spare)
    with poisoned():
        out, lse = backend.square_causal(*rows, spans)
    doubled = (x.double().cpu() for x in rows)
    expected = reference.extend(*doubled, None, p.ranges, scale=p.scale, causal=True)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)
    assert small_cudnn == [(128, 128, True)]


def test_what_is_planned_for() -> None:
    """Squares of torch's flash need no rows behind them and are not captured; a rehearsal plans
    nothing."""
    plans = of_cudnn(1.0).planned
    assert plans is not None
    assert [plans.is_one_call(n) for n in (0, 896, 1000, 1024, 1152, 1200, 2304)] == [
        *(False, False, False, True, True, False, True)
    ]
    assert plans.spare(1100) > 0
    assert TritonBackend(1.0, CudaFlashBackend(1.0)).planned is None
    rehearsing = of_cudnn(1.0).rehearsing().planned
    assert rehearsing is not None
    assert list(rehearsing.ahead(4, 2, 64)) == []


def test_plans_are_for_the_strides_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of few tokens lie beside queries and keys."""
    planned: list[tuple[int, int, bool, bool]] = []

    def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> None:
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert v.stride() in ((2 * 8, 8, 1), (8 * 8, 8, 1))
        planned.append((len(q), len(k), causal, v.is_contiguous()))

    monkeypatch.setattr(cudnn, "attention", attention)
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: torch.empty(size, dtype=dtype))
    fractions = list(cudnn.plan_ahead(4, 2, 8, torch.float16, scale=1.0))
    assert planned == cudnn.planned_sizes()
    assert fractions[-1] == 1.0


def test_rows_behind_make_lengths_planned() -> None:
    """... with values beside queries and keys; all lengths that are asked for pass the linear
    layers at once."""
    together = {q for q, _, causal, apart in cudnn.planned_sizes() if causal and not apart}
    for length in range(1024, 8193):
        assert length + cudnn.spare(length) in together
        assert cudnn.spare(length) < 256
    assert cudnn.spare(1023) == cudnn.spare(8193) == cudnn.spare(100_000) == 0
    assert max(together) == cudnn.MOST_SPARE <= LINEAR_CHUNK_TOKENS


def test_rows_behind_a_product() -> None:
    x, weight, bias = torch.randn(5, 8), torch.randn(6, 8), torch.randn(6)
    for b in (None, bias):
        y = linear_with_spare(x, weight, b, spare=3)
        torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, b))
        assert not with_spare(y, 3)[5:].any()
        columns = y[:, 2:5]
        assert torch.equal(with_spare(columns, 3), with_spare(y, 3)[:, 2:5])
    with pytest.raises(RuntimeError, match="storage"):
        with_spare(y, 4)


def test_square_in_the_type_of_queries(
    device: torch.device, small_cudnn: list[tuple[int, int, bool]]
) -> None:
    """No copy to float32: a library's result as it is, and odd rows written beside it."""
    for lens in ((128,), (100,), (64, 5)):
        p = make_problem(lens, lens, heads=(4, 2), head_dim=64, dtype=torch.float16, device=device)
        k, v = p.k[p.slots], p.v[p.slots]
        backend = of_cudnn(p.scale)
        with poisoned():
            out, lse = backend.square_causal(p.q, k, v, Spans(lens, lens, device))
        doubled = (x.double().cpu() for x in (p.q, k, v))
        expected = reference.extend(*doubled, None, p.ranges, scale=p.scale, causal=True)
        assert_close(out, expected[0], torch.float16)
        assert_close(lse, expected[1], torch.float16)
        assert lens == (128,) or out.dtype == torch.float16
        own = TritonBackend(p.scale).square_causal(p.q, k, v, Spans(lens, lens, device))
        assert own[0].dtype == torch.float16
    assert small_cudnn == [(128, 128, True), (64, 64, True), (64, 64, True)]


def test_squares_of_many_are_for_the_library_from_a_larger_size_on(
    device: torch.device,
    small_cudnn: list[tuple[int, int, bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """... and a span without keys never is."""
    monkeypatch.setattr(cudnn, "LEAST_SQUARE_OF_MANY", 128)
    calls = []
    for q_lens, k_lens in (((100,),) * 2, ((100, 5),) * 2, ((5, 130),) * 2, ((130, 130), (0, 130))):
        p = make_problem(q_lens, k_lens, heads=(6, 2), head_dim=64, dtype=FULL, device=device)
        k, v = p.k[p.slots], p.v[p.slots]
        with poisoned():
            found = of_cudnn(p.scale).square_causal(p.q, k, v, Spans(q_lens, k_lens, device))
        doubled = (x.double().cpu() for x in (p.q, k, v))
        expected = reference.extend(*doubled, None, p.ranges, scale=p.scale, causal=True)
        assert_close(found[0], expected[0], FULL)
        assert_close(found[1], expected[1], FULL)
        calls.append(list(small_cudnn))
        small_cudnn.clear()
    assert calls == [[(64, 64, True)], [], [(128, 128, True)], [(128, 128, True)]]


def test_names() -> None:
    assert TritonBackend(1.0).name == "triton"
    assert of_cudnn(1.0).name == "triton+cudnn"


@pytest.mark.parametrize("sizes", [cudnn.QUERY_SIZES, cudnn.KEY_SIZES], ids=str)
@pytest.mark.parametrize("length", [0, 1, 511, 512, 2047, 2048, 12_288, 64_000, 1_048_575])
def test_pieces_cover_all_but_a_small_rest(length: int, sizes: tuple[int, ...]) -> None:
    found = cudnn.pieces(length, sizes)
    assert set(found) <= set(sizes)
    assert 0 <= length - sum(found) < sizes[-1]
    assert found == sorted(found, reverse=True)
    assert all(found.count(size) < 4 for size in sizes[1:]), "few merges beside the largest"


def test_planned_lengths_are_few() -> None:
    """Every 128, from 2,048 on every 256, from 8,192 on 8 an octave, and less one 8 an octave; none
    above the length or an eighth below it."""
    used = {cudnn.aligned(n, 1024) for n in range(1024, 32769)}
    squares = 8 + 8 + 16 + 2 * 8 + 1
    shorter = 3 * 8 + 1
    assert len(used) == squares + shorter
    planned = cudnn.planned_sizes()
    assert used == {q for q, _, causal, apart in planned if causal and apart}
    assert len(planned) == len(set(planned)) == 137
    assert cudnn.aligned(16383, 1024) == 16383
    assert cudnn.aligned(5119, 1024) == 5119
    assert cudnn.aligned(5375, 1024) == 5120
    for n in range(1024, 131072, 37):
        assert n - n / 8 < cudnn.aligned(n, 1024) <= n
    assert cudnn.aligned(1023, 1024) == 0
    assert cudnn.aligned(200_003, 2048) == 200_003
