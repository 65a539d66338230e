"""Attention of packed queries over keys anywhere in memory: the pool's slots or packed rows.

Knows: how to launch `attend_kernels` for few queries a span (lengths on the device only) and for
many (lengths on the host). Does not know: who asks, which backend is best.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from loongd.kernels.fresh import Fresh
from loongd.kernels.gpu.attend_kernels import attend_shares
from loongd.kernels.gpu.attend_merge import merge_shares
from loongd.kernels.gpu.early import early
from loongd.kernels.gpu.plan import Tiling, decode_tiling, extend_tiling, merging, plan_tiles

LOG2_E = 1.4426950408889634
MAX_DECODE_ROWS = 64
"""Rows (queries x heads of a kv head) of a span up to which `split_kv` takes it."""
_LEAST_BLOCKS = 2
"""Blocks of keys that a share has about, where there are few: one is mostly waiting, and each share
is to be merged. H200, one span of 1K with a new token: 9.4 us, with one 10.1, with three 10.6."""


def split_kv(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    slots: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor,
    *,
    scale: float,
    max_q: int = 1,
    k_ends: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    fresh: Fresh | None = None,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Few queries a span over the pool: float32 out_TNH and lse_TN (natural logarithm).

    Reads nothing on the host, so it can be captured in a CUDA graph: the same graph serves any
    `cu_k` and `slots` contents.

    Args:
        q_TNH: packed queries, any strides but the last, which is 1.
        k_SKH, v_SKH: one layer of the pool.
        slots: packed slots of all spans, int32 or int64; may be longer than `cu_k[-1]`.
        cu_q: (B + 1) int32 ends of the spans' queries; None when span i is query i.
        cu_k: (B + 1) int32 ends of the spans' slots; with `k_ends` the (B,) first ones.
        scale: factor of the scores.
        max_q: at least the longest span's queries; times the group at most `MAX_DECODE_ROWS`.
        k_ends: (B,) int32 ends of the spans' slots, where there are gaps between the spans.
        out: contiguous out_TNH (any float type) and float32 lse_TN to write into, on this device or
            on a peer's that is mapped here; new by default, and float32.
        fresh: each span's last key, not rotated yet, and value, which are stored here. The queries,
            one a span, are not rotated either, and stay as they are.
        tiling: sizes of the launch; by default those measured best.
    """
    k_begins, k_ends = (cu_k, k_ends) if k_ends is not None else (cu_k[:-1], cu_k[1:])
    num_spans = len(k_begins)
    group = q_TNH.shape[1] // k_SKH.shape[1]
    assert max_q * group <= MAX_DECODE_ROWS
    if tiling is None:
        tiling = decode_tiling(q_TNH.device, q_TNH.dtype, q_TNH.shape[2], max_q * group)
    if out is None:
        out = _empty_like(q_TNH)
    if num_spans == 0:
        return out
    assert fresh is None or cu_q is None
    ends = torch.empty(num_spans + 1, dtype=torch.int32, device=q_TNH.device)
    tables = (cu_q, k_begins, k_ends, None, ends)
    work = (num_spans, max_q * group)
    _launch(q_TNH, k_SKH, v_SKH, slots, tables, out, work, scale, tiling, fresh=fresh)
    return out


def extend(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    slots: Tensor | None,
    ranges: tuple[tuple[int, int, int, int], ...],
    *,
    scale: float,
    causal: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
    tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """Any number of queries a span over the pool, or over packed keys when `slots` is None.

    Args:
        q_TNH: packed queries.
        k_SKH, v_SKH: one layer of the pool, or packed keys.
        slots: packed slots of all spans, int32 or int64; None: key i is row i.
        ranges: (first query, end, first key, end) of each span, known on the host.
        scale: factor of the scores.
        causal: the last query sees all keys of its span, each earlier one sees one less.
        out: contiguous out_TNH (any float type) and float32 lse_TN to write the spans' rows into;
            new and float32 by default.
        tiling: sizes of the launch; by default those measured best.
    """
    group = q_TNH.shape[1] // k_SKH.shape[1]
    most = max((q1 - q0 for q0, q1, _, _ in ranges), default=0) * group
    if tiling is None:
        has_slots = slots is not None
        tiling = extend_tiling(q_TNH.device, q_TNH.dtype, q_TNH.shape[2], most, has_slots=has_slots)
    if out is None:
        out = _empty_like(q_TNH)
    tiles, ends = plan_tiles(ranges, group, tiling.block_m, tiling.block_k, causal, q_TNH.device)
    if len(tiles) == 0:
        return out
    tables = (None, None, None, tiles, ends)
    work = (len(tiles), most)
    _launch(q_TNH, k_SKH, v_SKH, slots, tables, out, work, scale, tiling, causal=causal)
    return out


def extend_planned(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    slots: Tensor | None,
    tiles: Tensor,
    ends: Tensor,
    *,
    scale: float,
    tiling: Tiling,
    out: tuple[Tensor, Tensor],
    causal: bool = True,
) -> None:
    """`extend` with the list of tiles on the device.

    Reads nothing on the host, so it can be captured in a CUDA graph: the same graph serves any
    lists of one length. Rows of `out` that are in no tile are left as they are.

    Args:
        q_TNH, k_SKH, v_SKH, slots, scale: as for `extend`.
        tiles, ends: (T, 5) and (T + 1) int32 as `plan.tile_table` gives them for `tiling` and
            `causal`; further tiles are all zeros, further ends repeat the last one.
        tiling: sizes of the launch.
        out: contiguous out_TNH (any float type) and float32 lse_TN.
        causal: as for `extend`.
    """
    tables = (None, None, None, tiles, ends)
    work = (len(tiles), tiling.block_m)
    _launch(q_TNH, k_SKH, v_SKH, slots, tables, out, work, scale, tiling, causal=causal)


def _empty_like(q_TNH: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(q_TNH.shape, dtype=torch.float32, device=q_TNH.device)
    return out, torch.empty(q_TNH.shape[:2], dtype=torch.float32, device=q_TNH.device)


def _launch(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    slots: Tensor | None,
    tables: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor],
    state: tuple[Tensor, Tensor],
    work: tuple[int, int],
    scale: float,
    tiling: Tiling,
    *,
    causal: bool = False,
    fresh: Fresh | None = None,
) -> None:
    """`work` is the number of tiles and the most rows of a span."""
    cu_q, k_begins, k_ends, tiles, ends = tables
    num_tiles, most_rows = work
    num_heads, head_dim = q_TNH.shape[1:]
    num_kv_heads = k_SKH.shape[1]
    assert q_TNH.stride(2) == k_SKH.stride(2) == v_SKH.stride(2) == 1
    shares = max(1, tiling.programs // num_kv_heads)
    rows = (shares + num_tiles) * num_kv_heads * tiling.block_m
    part = torch.empty((rows, head_dim), dtype=torch.float32, device=q_TNH.device)
    part_lse = torch.empty(rows, dtype=torch.float32, device=q_TNH.device)
    shape = {
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_H": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": tiling.block_m,
        "PLANNED": tiles is not None,
        "HAS_CU_Q": cu_q is not None,
        "TILE_COST": 0 if tiles is not None else 1,
        "LEAST": 1 if tiles is not None else _LEAST_BLOCKS,
        **early(q_TNH.device),
    }
    attend_shares[(num_kv_heads, shares)](
        q_TNH,
        k_SKH,
        v_SKH,
        slots,
        cu_q,
        k_begins,
        k_ends,
        tiles,
        ends,
        *state,
        part,
        part_lse,
        *_fresh_tensors(fresh),
        num_tiles,
        num_heads,
        q_TNH.stride(0),
        q_TNH.stride(1),
        k_SKH.stride(0),
        k_SKH.stride(1),
        v_SKH.stride(0),
        v_SKH.stride(1),
        *_fresh_strides(fresh),
        scale * LOG2_E,
        **shape,
        BLOCK_K=tiling.block_k,
        BLOCK_T=1024 if tiles is not None else max(16, triton.next_power_of_2(num_tiles)),
        HAS_SLOTS=slots is not None,
        CAUSAL=causal,
        WHOLE=tiling.whole and shape["BLOCK_H"] == head_dim,
        PRECISION="ieee",
        FRESH=fresh is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.registers,
    )
    tile_rows = min(most_rows, tiling.block_m)
    merge = merging(tiling, num_tiles, tile_rows)
    row_chunks = triton.cdiv(tile_rows, merge.rows)
    merge_shares[(num_tiles, num_kv_heads, row_chunks)](
        part,
        part_lse,
        *state,
        cu_q,
        tiles,
        ends,
        num_tiles,
        num_heads,
        shares,
        **shape,
        ROWS=merge.rows,
        BLOCK_P=merge.parts,
        num_warps=merge.num_warps,
    )


def _fresh_tensors(fresh: Fresh | None) -> tuple[Tensor | None, ...]:
    if fresh is None:
        return (None,) * 5
    return fresh.k, fresh.v, fresh.cos, fresh.sin, fresh.slots


def _fresh_strides(fresh: Fresh | None) -> tuple[int, ...]:
    if fresh is None:
        return (0,) * 6
    heads = (*fresh.k.stride()[:2], *fresh.v.stride()[:2])
    return (*heads, fresh.cos.stride(0), fresh.sin.stride(0))
