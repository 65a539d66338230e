"""Attention over keys anywhere in memory.

Knows: one kernel that walks a flat list of work (tile of queries x block of keys), cut into as
many equal shares as programs run at once, or fewer where those would be short. Another one merges
the shares of a tile (`attend_merge`). So a batch of one long and many short requests keeps the
whole device busy, the grid does not depend on the data, and no share is larger than another. Where
tiles may be a block or two long, what one costs beside its blocks counts as TILE_COST blocks ahead
of them.
A tile may be a new token that is rotated and stored here too (`attend_fresh`).
Does not know: tensors, who launches.

A tile is up to BLOCK_M rows of one span; row `r` is query `r // GROUP` and head `r % GROUP` of the
kv head, so all query heads that share keys sit in one tile and keys are read once. Share `p` of
tile `t` writes its partial at index `p + t`, unique because both only grow along the list.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loongd.kernels.gpu.attend_fresh import rotated, start_fresh
from loongd.kernels.gpu.attend_merge import (
    first_block,
    store_rows,
    tile_queries,
    used_shares,
)
from loongd.kernels.gpu.early import wait_for_ahead


@triton.jit
def _count_ends(ends_ptr, num_tiles, target, BLOCK_T: tl.constexpr):
    """How many tiles end at or before `target`: the tile that holds block `target`."""
    count = 0
    for start in range(0, num_tiles, BLOCK_T):
        at = start + tl.arange(0, BLOCK_T)
        ends = tl.load(ends_ptr + 1 + at, mask=at < num_tiles, other=2147483647)
        count += tl.sum((ends <= target).to(tl.int32), 0)
    return count


@triton.jit
def start(q):
    """The state of queries that have seen no keys: sums, peak (in powers of two) and mass."""
    acc = tl.zeros((q.shape[0], q.shape[1]), tl.float32)
    peak = tl.full((q.shape[0],), float("-inf"), tl.float32)
    return acc, peak, tl.zeros((q.shape[0],), tl.float32)


@triton.jit
def _attend_blocks(
    q,
    state,
    k_ptr,
    v_ptr,
    slots_ptr,
    k_len,
    visible,
    seen_by_all,
    begin,
    end,
    stride_ks,
    stride_vs,
    scale_log2,
    h,
    in_head,
    BLOCK_K: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile over key blocks `begin` to `end` of its span: output and log-sum-exp. `state`: what
    it has seen ahead of them (`start`).

    `slots_ptr` points at the span's first slot; without slots `k_ptr` is the span's first key.
    Row r sees the first `visible[r]` keys when CAUSAL, else all. With WHOLE, blocks of keys that
    all rows see, the first `seen_by_all`, go through a loop that asks nothing.
    """
    acc, peak, mass = state
    if WHOLE:
        whole = tl.minimum(tl.maximum(seen_by_all // BLOCK_K, begin), end)
        for block in range(begin, whole):
            at = block * BLOCK_K + tl.arange(0, BLOCK_K)
            where = tl.load(slots_ptr + at).to(tl.int64) if HAS_SLOTS else at.to(tl.int64)
            k = tl.load(k_ptr + where[:, None] * stride_ks + h[None, :])
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale_log2)
            weights = tl.exp2(scores * scale_log2 - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
            mass = mass * decay + tl.sum(weights, 1)
            acc = acc * decay[:, None]
            v = tl.load(v_ptr + where[:, None] * stride_vs + h[None, :])
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            peak = new_peak
        begin = whole
    for block in range(begin, end):
        at = block * BLOCK_K + tl.arange(0, BLOCK_K)
        seen = at < k_len
        if HAS_SLOTS:
            where = tl.load(slots_ptr + at, mask=seen, other=0).to(tl.int64)
        else:
            where = at.to(tl.int64)
        loaded = seen[:, None] & in_head[None, :]
        k = tl.load(k_ptr + where[:, None] * stride_ks + h[None, :], mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if CAUSAL:
            scores = tl.where(at[None, :] < visible[:, None], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        else:
            scores = tl.where(seen[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            shift = new_peak
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(peak - shift)
        mass = mass * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        v = tl.load(v_ptr + where[:, None] * stride_vs + h[None, :], mask=loaded, other=0.0)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    # peaks are in powers of two, results in powers of e
    lse = tl.where(some, (peak + tl.log2(mass)) * 0.6931471805599453, float("-inf"))
    return acc / mass[:, None], lse


@triton.jit(do_not_specialize=["num_tiles"])
def attend_shares(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    cu_q_ptr,
    k_begins_ptr,
    k_ends_ptr,
    tiles_ptr,
    ends_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    k_new_ptr,
    v_new_ptr,
    cos_ptr,
    sin_ptr,
    new_slots_ptr,
    num_tiles,
    num_heads,
    stride_qt,
    stride_qn,
    stride_ks,
    stride_kk,
    stride_vs,
    stride_vk,
    stride_nkt,
    stride_nkk,
    stride_nvt,
    stride_nvk,
    stride_ct,
    stride_st,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PLANNED: tl.constexpr,
    HAS_CU_Q: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE_COST: tl.constexpr,
    LEAST: tl.constexpr,
    FRESH: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One share of the work for one kv head; grid (kv heads, shares). LEAST: see `used_shares`.

    PLANNED: `tiles_ptr` (T, 5) and `ends_ptr` (T + 1) come from the host, with TILE_COST 0.
    Otherwise each span is one tile, the list is derived from the spans' first slots and ends
    (`k_begins_ptr`, `k_ends_ptr`), and `ends_ptr` is written for `merge_shares`.

    FRESH (not PLANNED, a query a span): queries are not rotated yet, and key and value of each
    span's last slot, its entry in `new_slots_ptr`, are rows of `k_new_ptr` and `v_new_ptr`, to be
    stored unless that entry is below 0. Spans without keys store nothing.
    """
    wait_for_ahead(EARLY)
    head = tl.program_id(0)
    share = tl.program_id(1)
    at_T = tl.arange(0, BLOCK_T)
    if PLANNED:
        total = tl.load(ends_ptr + num_tiles)
        ends_T = at_T
    else:
        real_T = at_T < num_tiles
        k_begin = tl.load(k_begins_ptr + at_T, mask=real_T, other=0)
        k_end = tl.load(k_ends_ptr + at_T, mask=real_T, other=0)
        blocks_T = (k_end - k_begin + BLOCK_K - 1) // BLOCK_K
        ends_T = tl.cumsum(tl.where(blocks_T > 0, blocks_T + TILE_COST, 0), 0)
        total = tl.max(ends_T, 0)
        if (head == 0) & (share == 0):
            tl.store(ends_ptr, 0)
            tl.store(ends_ptr + 1 + at_T, ends_T, mask=real_T)
    used = used_shares(tl.num_programs(1), total, LEAST)
    lo = first_block(share, used, total)
    hi = first_block(share + 1, used, total)
    if PLANNED:
        first = _count_ends(ends_ptr, num_tiles, lo, BLOCK_T)
        last = _count_ends(ends_ptr, num_tiles, hi - 1, BLOCK_T)
    else:
        first = tl.sum((ends_T <= lo).to(tl.int32), 0)
        last = tl.sum((ends_T <= hi - 1).to(tl.int32), 0)
    # a share without blocks has hi = lo = total: `first` is past the end and the loop is empty
    for tile in range(first, last + 1):
        q_start, q_len, row0 = tile_queries(tiles_ptr, cu_q_ptr, tile, PLANNED, HAS_CU_Q)
        if PLANNED:
            tile_lo = tl.load(ends_ptr + tile)
            tile_hi = tl.load(ends_ptr + tile + 1)
            k_start = tl.load(tiles_ptr + tile * 5 + 2)
            k_len = tl.load(tiles_ptr + tile * 5 + 3)
        else:
            tile_lo = tl.max(tl.where(at_T < tile, ends_T, 0), 0)
            tile_hi = tl.max(tl.where(at_T <= tile, ends_T, 0), 0)
            k_start = tl.load(k_begins_ptr + tile)
            k_len = tl.load(k_ends_ptr + tile) - k_start
        keys_at = tile_lo + TILE_COST
        begin = tl.maximum(lo, keys_at) - keys_at
        end = tl.minimum(hi, tile_hi) - keys_at
        if end > begin:
            rows = row0 + tl.arange(0, BLOCK_M)
            h = tl.arange(0, BLOCK_H)
            in_head = h < HEAD_DIM
            query = rows // GROUP
            live = query < q_len
            stored = live[:, None] & in_head[None, :]
            q_at = (q_start + query).to(tl.int64)
            n = head * GROUP + rows % GROUP
            q_row = q_ptr + q_at * stride_qt + n * stride_qn
            k_base = k_ptr + head * stride_kk
            v_base = v_ptr + head * stride_vk
            slots_base = slots_ptr
            if HAS_SLOTS:
                slots_base += k_start
            else:
                k_base += k_start.to(tl.int64) * stride_ks
                v_base += k_start.to(tl.int64) * stride_vs
            if FRESH:
                cos_at, sin_at = cos_ptr + tile * stride_ct, sin_ptr + tile * stride_st
                q = rotated(q_row, cos_at, sin_at, h, stored, HEAD_DIM)
                state = start_fresh(
                    q,
                    k_new_ptr + tile * stride_nkt + head * stride_nkk,
                    v_new_ptr + tile * stride_nvt + head * stride_nvk,
                    cos_at,
                    sin_at,
                    new_slots_ptr + tile,
                    k_base,
                    v_base,
                    stride_ks,
                    stride_vs,
                    end == tile_hi - keys_at,
                    scale_log2,
                    h,
                    HEAD_DIM,
                )
                k_len -= 1
            else:
                q = tl.load(q_row[:, None] + h[None, :], mask=stored, other=0.0)
                state = start(q)
            acc, lse = _attend_blocks(
                q,
                state,
                k_base,
                v_base,
                slots_base,
                k_len,
                tl.minimum(k_len - q_len + query + 1, k_len),
                k_len - q_len + row0 // GROUP + 1 if CAUSAL else k_len,
                begin,
                end,
                stride_ks,
                stride_vs,
                scale_log2,
                h,
                in_head,
                BLOCK_K,
                HAS_SLOTS,
                CAUSAL,
                WHOLE,
                PRECISION,
            )
            if (begin == 0) & (end == tile_hi - keys_at):
                store_rows(
                    out_ptr,
                    lse_ptr,
                    acc,
                    lse,
                    rows,
                    head,
                    num_heads,
                    q_start,
                    q_len,
                    h,
                    GROUP,
                    HEAD_DIM,
                )
            else:
                index = (share + tile).to(tl.int64) * tl.num_programs(0) + head
                at_part = index * BLOCK_M + tl.arange(0, BLOCK_M)
                tl.store(part_ptr + at_part[:, None] * HEAD_DIM + h[None, :], acc, mask=stored)
                tl.store(part_lse_ptr + at_part, lse, mask=live)
