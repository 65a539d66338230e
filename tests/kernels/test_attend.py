"""Attention kernels equal float64 attention, whatever the spans, strides and slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from kernel_kit import assert_close, make_problem, poisoned

from loongd.kernels import reference
from loongd.kernels.gpu import attend
from loongd.kernels.gpu.plan import Tiling, extend_tiling, plan_tiles, tile_table

SMALL = Tiling(block_m=16, block_k=16, num_warps=4, num_stages=2, programs=10, merge_rows=1)
HALF = torch.float16
FULL = torch.float32

DECODE_SPANS: tuple[tuple[int, ...], ...] = (
    (1,),
    (70, 0, 1, 16, 17),
    (0, 0),
    (0, 150, 0, 0, 3, 2, 1, 0),
    (20, 9),
    (600, *(3, 40) * 9),
)


@pytest.mark.parametrize("k_lens", DECODE_SPANS)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=str)
def test_split_kv_any_lengths(
    device: torch.device, k_lens: Sequence[int], heads: tuple[int, int]
) -> None:
    p = make_problem([1] * len(k_lens), k_lens, heads=heads, head_dim=64, dtype=FULL, device=device)
    with poisoned():
        out, lse = attend.split_kv(
            p.q, p.k, p.v, p.slots, None, p.cu_k, scale=p.scale, tiling=SMALL
        )
    q, k, v, slots = p.doubled
    expected = reference.split_kv(q, k, v, slots, None, p.cu_k, scale=p.scale)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_split_kv_any_head_dim(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    p = make_problem(
        [2, 0, 3, 1],
        [33, 5, 0, 64],
        heads=(6, 2),
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        slot_type=torch.int32,
    )
    with poisoned():
        out, lse = attend.split_kv(p.q, p.k, p.v, p.slots, p.cu_q, p.cu_k, scale=p.scale, max_q=3)
    q, k, v, slots = p.doubled
    expected = reference.split_kv(q, k, v, slots, p.cu_q, p.cu_k, scale=p.scale, max_q=3)
    assert_close(out, expected[0], dtype)
    assert_close(lse, expected[1], dtype)


def test_split_kv_ignores_slots_past_the_last_span(device: torch.device) -> None:
    p = make_problem([1, 1], [20, 9], heads=(4, 2), head_dim=64, dtype=FULL, device=device)
    padded = torch.cat((p.slots, torch.full((40,), 1 << 40, device=device)))
    with poisoned():
        out, lse = attend.split_kv(p.q, p.k, p.v, padded, None, p.cu_k, scale=p.scale, tiling=SMALL)
    q, k, v, slots = p.doubled
    expected = reference.split_kv(q, k, v, slots, None, p.cu_k, scale=p.scale)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)


def test_split_kv_with_gaps_between_spans(device: torch.device) -> None:
    """Spans anywhere in a table, padding rows of no key, and a given place for the result."""
    p = make_problem([1, 1], [20, 9], heads=(4, 2), head_dim=64, dtype=FULL, device=device)
    table = torch.full((100,), 1 << 30, dtype=torch.int32, device=device)
    table[50:70], table[10:19] = p.slots[:20].int(), p.slots[20:].int()
    begins = torch.tensor([50, 10, 0], dtype=torch.int32, device=device)
    ends = torch.tensor([70, 19, 0], dtype=torch.int32, device=device)
    q = torch.cat((p.q, p.q[:1]))
    place = torch.full((3, 4, 64), torch.nan, device=device), torch.zeros(3, 4, device=device)
    more = {"k_ends": ends, "scale": p.scale, "out": place}
    with poisoned():
        attend.split_kv(q, p.k, p.v, table, None, begins, tiling=SMALL, **more)
    double_q, k, v, slots = p.doubled
    expected = reference.split_kv(double_q, k, v, slots, None, p.cu_k, scale=p.scale)
    assert_close(place[0][:2], expected[0], FULL)
    assert_close(place[1][:2], expected[1], FULL)
    assert not place[0][2].any()
    assert bool((place[1][2] == -torch.inf).all())


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_lens", "k_lens"),
    [
        ((1, 40, 0, 7), (16, 50, 3, 7)),
        ((30,), (30,)),
        ((5, 5), (0, 5)),
        ((9, 2), (100, 2)),
        ((70, 33), (140, 160)),
        ((40,), (9,)),
    ],
)
def test_extend_any_lengths(
    device: torch.device,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    causal: bool,
    whole: bool,
) -> None:
    p = make_problem(q_lens, k_lens, heads=(6, 2), head_dim=64, dtype=FULL, device=device)
    with poisoned():
        out, lse = attend.extend(
            p.q,
            p.k,
            p.v,
            p.slots,
            p.ranges,
            scale=p.scale,
            causal=causal,
            tiling=Tiling(32, 32, 4, 2, 7, 16, whole=whole),
        )
    q, k, v, slots = p.doubled
    expected = reference.extend(q, k, v, slots, p.ranges, scale=p.scale, causal=causal)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)


@pytest.mark.parametrize("num_keys", [20, 21, 22, 26, 48])
def test_a_tile_that_begins_amid_a_query_sees_what_its_first_row_does(
    device: torch.device, num_keys: int
) -> None:
    p = make_problem((12,), (num_keys,), heads=(3, 1), head_dim=64, dtype=FULL, device=device)
    tiling = Tiling(16, 16, 4, 2, 1, 16, whole=True)
    with poisoned():
        out, lse = attend.extend(
            p.q, p.k, p.v, p.slots, p.ranges, scale=p.scale, causal=True, tiling=tiling
        )
    q, k, v, slots = p.doubled
    expected = reference.extend(q, k, v, slots, p.ranges, scale=p.scale, causal=True)
    assert_close(out, expected[0], FULL)
    assert_close(lse, expected[1], FULL)


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=str)
@pytest.mark.parametrize("head_dim", [80, 128, 256])
def test_extend_packed_keys(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Without slots, key i is row i: a causal square, as prefill needs."""
    p = make_problem(
        (33, 50), (33, 50), heads=(4, 2), head_dim=head_dim, dtype=dtype, device=device
    )
    k, v = p.k[p.slots], p.v[p.slots]
    with poisoned():
        out, lse = attend.extend(p.q, k, v, None, p.ranges, scale=p.scale, causal=True)
    expected = reference.extend(
        p.q.double().cpu(),
        k.double().cpu(),
        v.double().cpu(),
        None,
        p.ranges,
        scale=p.scale,
        causal=True,
    )
    assert_close(out, expected[0], dtype)
    assert_close(lse, expected[1], dtype)


def test_extend_writes_only_its_spans(device: torch.device) -> None:
    p = make_problem((3, 4, 5), (20, 8, 9), heads=(4, 2), head_dim=64, dtype=FULL, device=device)
    out = torch.full((12, 4, 64), 7.0, device=device), torch.full((12, 4), 7.0, device=device)
    attend.extend(
        p.q,
        p.k,
        p.v,
        p.slots,
        (p.ranges[0], p.ranges[2]),
        scale=p.scale,
        out=out,
    )
    q, k, v, slots = p.doubled
    expected = reference.extend(q, k, v, slots, p.ranges, scale=p.scale)
    for rows in (slice(0, 3), slice(7, 12)):
        assert_close(out[0][rows], expected[0][rows], FULL)
        assert_close(out[1][rows], expected[1][rows], FULL)
    assert (out[0][3:7] == 7).all()
    assert (out[1][3:7] == 7).all()


@pytest.mark.parametrize("causal", [True, False])
def test_extend_planned_over_packed_keys(device: torch.device, *, causal: bool) -> None:
    """A span without keys gives zeros, whatever was there; rows in no span are left alone."""
    q_lens, k_lens = (3, 40, 9), (3, 90, 0)
    p = make_problem(q_lens, k_lens, heads=(6, 2), head_dim=64, dtype=FULL, device=device)
    tiling = Tiling(32, 16, 4, 2, 14, 16, whole=True)
    tables = tile_table(p.ranges, 3, tiling.block_m, tiling.block_k, causal=causal)
    lists = [torch.from_numpy(table).to(device) for table in tables]
    q = torch.cat((p.q, torch.full_like(p.q[:4], torch.nan)))
    k, v = p.k[p.slots], p.v[p.slots]
    expected = reference.extend(
        q[:-4].double(), k.double(), v.double(), None, p.ranges, scale=p.scale, causal=causal
    )
    for kernels in (attend, reference):
        out = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0, device=device)
        kernels.extend_planned(
            q, k, v, None, *lists, scale=p.scale, tiling=tiling, out=out, causal=causal
        )
        assert_close(out[0][:-4], expected[0], FULL)
        assert_close(out[1][:-4], expected[1], FULL)
        assert (out[0][-4:] == 7).all()
        assert (out[1][-4:] == 7).all()


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=str)
def test_extend_planned_by_a_padded_list(device: torch.device, dtype: torch.dtype) -> None:
    """Spans anywhere in a table, shares that end within a tile, rows and tiles of padding."""
    q_lens, k_lens = (1, 40, 7, 2), (16, 90, 7, 33)
    p = make_problem(q_lens, k_lens, heads=(6, 2), head_dim=64, dtype=dtype, device=device)
    table = torch.full((400,), 1 << 30, dtype=torch.int32, device=device)
    spans = []
    for (q0, q1, k0, k1), begin in zip(p.ranges, (300, 10, 200, 120), strict=True):
        table[begin : begin + k1 - k0] = p.slots[k0:k1].int()
        spans.append((q0, q1, begin, begin + k1 - k0))
    tiling = Tiling(32, 16, 4, 2, 14, 16, whole=True)
    tiles, ends = tile_table(spans, 3, tiling.block_m, tiling.block_k, causal=True)
    tiles = np.pad(tiles, ((0, 5), (0, 0)))
    ends = np.pad(ends, (0, 5), mode="edge")
    lists = torch.from_numpy(tiles).to(device), torch.from_numpy(ends).to(device)
    q = torch.cat((p.q, torch.full_like(p.q[:9], torch.nan)))
    out = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0, device=device)
    with poisoned():
        attend.extend_planned(q, p.k, p.v, table, *lists, scale=p.scale, tiling=tiling, out=out)
    double_q, k, v, slots = p.doubled
    expected = reference.extend(double_q, k, v, slots, p.ranges, scale=p.scale, causal=True)
    twin = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0, device=device)
    reference.extend_planned(q, p.k, p.v, table, *lists, scale=p.scale, tiling=tiling, out=twin)
    for got in (out, twin):
        assert_close(got[0][:50], expected[0], dtype)
        assert_close(got[1][:50], expected[1], dtype)
        assert (got[0][50:] == 7).all()
        assert (got[1][50:] == 7).all()


def test_extend_nothing(device: torch.device) -> None:
    p = make_problem((), (), heads=(4, 2), head_dim=64, dtype=FULL, device=device)
    out, lse = attend.extend(p.q, p.k, p.v, p.slots, (), scale=p.scale)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_plan_counts_only_visible_blocks(device: torch.device) -> None:
    """A causal square of n tiles of one block side has n (n + 1) / 2 blocks."""
    tiles, ends = plan_tiles(((0, 128, 0, 128),), 1, 16, 16, True, device)
    assert tiles[:, 4].tolist() == list(range(0, 128, 16))
    assert ends.tolist() == [n * (n + 1) // 2 for n in range(9)]


def test_tiles_of_few_rows_are_small(device: torch.device) -> None:
    assert extend_tiling(device, HALF, 128, 16).block_m == 16
    assert extend_tiling(device, HALF, 128, 65).block_m == 128
