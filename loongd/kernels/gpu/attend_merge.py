"""Shares of tiles and how they come together, in a kernel of its own.

Knows: which shares a tile is cut into, where each leaves its partial, how partials are merged.
Does not know: keys, values, how a share is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loongd.kernels.gpu.early import wait_for_ahead


@triton.jit
def used_shares(num_shares, total, LEAST: tl.constexpr):
    """Shares that have work (int64): as many as give each about LEAST blocks, so that none is
    empty."""
    return tl.minimum(num_shares, (total + LEAST - 1) // LEAST).to(tl.int64)


@triton.jit
def first_block(share, used, total):
    """First block of a share."""
    return (tl.minimum(share, used) * total // tl.maximum(used, 1)).to(tl.int32)


@triton.jit
def tile_queries(tiles_ptr, cu_q_ptr, tile, PLANNED: tl.constexpr, HAS_CU_Q: tl.constexpr):
    """First query of a tile's span, the span's number of queries, the tile's first row."""
    if PLANNED:
        q_start = tl.load(tiles_ptr + tile * 5)
        q_len = tl.load(tiles_ptr + tile * 5 + 1)
        row0 = tl.load(tiles_ptr + tile * 5 + 4)
    elif HAS_CU_Q:
        q_start = tl.load(cu_q_ptr + tile)
        q_len = tl.load(cu_q_ptr + tile + 1) - q_start
        row0 = tile * 0
    else:
        q_start = tile
        q_len = tile * 0 + 1
        row0 = tile * 0
    return q_start, q_len, row0


@triton.jit
def _merge_parts(
    part_ptr,
    part_lse_ptr,
    first,
    end,
    stride,
    within,
    live,
    h,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Rows `within` of the tile's parts of shares `first` to `end`, BLOCK_P parts at a time."""
    peak = tl.full((within.shape[0],), float("-inf"), tl.float32)
    mass = tl.zeros((within.shape[0],), tl.float32)
    acc = tl.zeros((within.shape[0], h.shape[0]), tl.float32)
    for start in range(first, end, BLOCK_P):
        share = start + tl.arange(0, BLOCK_P).to(tl.int64)
        at = share[:, None] * stride + within[None, :]
        loaded = (share < end)[:, None] & live[None, :]
        lses = tl.load(part_lse_ptr + at, mask=loaded, other=float("-inf"))
        parts = tl.load(
            part_ptr + at[:, :, None] * HEAD_DIM + h[None, None, :],
            mask=loaded[:, :, None] & (h < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        new_peak = tl.maximum(peak, tl.max(lses, 0))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp(lses - shift[None, :])
        decay = tl.exp(peak - shift)
        mass = mass * decay + tl.sum(weights, 0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * parts, 0)
        peak = new_peak
    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    return acc / mass[:, None], tl.where(some, peak + tl.log(mass), float("-inf"))


@triton.jit
def store_rows(
    out_ptr,
    lse_ptr,
    out,
    lse,
    rows,
    head,
    num_heads,
    q_start,
    q_len,
    h,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Final results of these rows of a tile; those beyond its span are left out."""
    live = rows < q_len * GROUP
    at = (q_start + rows // GROUP).to(tl.int64) * num_heads + head * GROUP + rows % GROUP
    stored = live[:, None] & (h < HEAD_DIM)[None, :]
    tl.store(out_ptr + at[:, None] * HEAD_DIM + h[None, :], out, mask=stored)
    tl.store(lse_ptr + at, lse, mask=live)


@triton.jit(do_not_specialize=["num_tiles"])
def merge_shares(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    cu_q_ptr,
    tiles_ptr,
    ends_ptr,
    num_tiles,
    num_heads,
    num_shares,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PLANNED: tl.constexpr,
    HAS_CU_Q: tl.constexpr,
    TILE_COST: tl.constexpr,
    LEAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the shares of ROWS rows of a tile; grid (tiles, kv heads, BLOCK_M / ROWS).

    A tile done by one share is final already; a tile without keys gets out 0, lse -inf.
    """
    wait_for_ahead(EARLY)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    chunk = tl.program_id(2)
    tile_lo = tl.load(ends_ptr + tile).to(tl.int64)
    tile_hi = tl.load(ends_ptr + tile + 1).to(tl.int64)
    total = tl.maximum(tl.load(ends_ptr + num_tiles), 1)
    q_start, q_len, row0 = tile_queries(tiles_ptr, cu_q_ptr, tile, PLANNED, HAS_CU_Q)
    used = used_shares(num_shares, total, LEAST)
    # share p has the blocks p * total // used to (p + 1) * total // used
    first = ((tile_lo + TILE_COST + 1) * used - 1) // total
    last = (tile_hi * used - 1) // total
    empty = tile_hi == tile_lo
    if (row0 + chunk * ROWS < q_len * GROUP) & (empty | (last > first)):
        within = chunk * ROWS + tl.arange(0, ROWS)
        rows = row0 + within
        h = tl.arange(0, BLOCK_H)
        # share p of tile t has its part at (p + t) * kv heads + head
        at = (tl.cast(tile, tl.int64) * tl.num_programs(1) + head) * BLOCK_M
        acc, lse = _merge_parts(
            part_ptr + at * HEAD_DIM,
            part_lse_ptr + at,
            first,
            tl.where(empty, first, last + 1),
            tl.num_programs(1) * BLOCK_M,
            within,
            rows < q_len * GROUP,
            h,
            HEAD_DIM,
            BLOCK_P,
        )
        store_rows(
            out_ptr, lse_ptr, acc, lse, rows, head, num_heads, q_start, q_len, h, GROUP, HEAD_DIM
        )
