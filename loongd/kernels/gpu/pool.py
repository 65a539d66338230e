"""Writing K and V into the pool, alone or together with the rotation of queries and keys.

Knows: rows, slots, strides; how a decode step's rows begin. Does not know: layers, requests, who
chose the slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loongd.kernels.gpu.early import early, wait_for_ahead

_TOKENS = 32
"""Rows of a program that reads a number each."""


@triton.jit(do_not_specialize=["num_rows"])
def tokens_of_rows(
    drawn_ptr,
    sources_ptr,
    given_ptr,
    entries_ptr,
    row_slots_ptr,
    slots_ptr,
    tokens_ptr,
    num_rows,
    BLOCK: tl.constexpr,
):
    """BLOCK rows a program."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    source = tl.load(sources_ptr + row, mask=mask, other=-1)
    given = tl.load(given_ptr + row, mask=mask, other=0).to(tl.int64)
    slot = tl.load(row_slots_ptr + row, mask=mask, other=-1)
    entry = tl.load(entries_ptr + row, mask=mask, other=0).to(tl.int64)
    drawn = tl.load(drawn_ptr + source, mask=mask & (source >= 0), other=0)
    # a row that drew nothing has failed, and its request with it: any token will do
    token = tl.where(source >= 0, tl.maximum(drawn, 0), given)
    tl.store(tokens_ptr + row, token, mask=mask)
    tl.store(slots_ptr + entry, slot, mask=mask)


def next_tokens(
    drawn_B: Tensor,
    sources_B: Tensor,
    given_B: Tensor,
    entries_B: Tensor,
    slots_B: Tensor,
    slots_S: Tensor,
    tokens_B: Tensor,
) -> None:
    """Each row's token, its slot written down; see `kernels.pool.next_tokens`."""
    num_rows = len(sources_B)
    rows = (drawn_B, sources_B, given_B, entries_B, slots_B, slots_S, tokens_B)
    assert all(x.is_contiguous() for x in rows)
    if num_rows:
        tokens_of_rows[(triton.cdiv(num_rows, _TOKENS),)](
            *rows,
            num_rows,
            BLOCK=_TOKENS,
            num_warps=1,
        )


@triton.jit
def scatter_rows(
    k_ptr,
    v_ptr,
    rows_ptr,
    slots_ptr,
    k_pool_ptr,
    v_pool_ptr,
    stride_kt,
    stride_kk,
    stride_vt,
    stride_vk,
    stride_ks,
    stride_kpk,
    stride_vs,
    stride_vpk,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """One token a program; grid (tokens,)."""
    i = tl.program_id(0)
    slot = tl.load(slots_ptr + i).to(tl.int64)
    if slot >= 0:
        row = i.to(tl.int64)
        if HAS_ROWS:
            row = tl.load(rows_ptr + i).to(tl.int64)
        n = tl.arange(0, BLOCK_N)[:, None]
        h = tl.arange(0, BLOCK_H)[None, :]
        mask = (n < NUM_KV_HEADS) & (h < HEAD_DIM)
        k = tl.load(k_ptr + row * stride_kt + n * stride_kk + h, mask=mask)
        v = tl.load(v_ptr + row * stride_vt + n * stride_vk + h, mask=mask)
        tl.store(k_pool_ptr + slot * stride_ks + n * stride_kpk + h, k, mask=mask)
        tl.store(v_pool_ptr + slot * stride_vs + n * stride_vpk + h, v, mask=mask)


def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor,
    slots_R: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    *,
    rows_R: Tensor | None = None,
) -> None:
    """Write row `rows_R[i]` (row i without) of K and V to slot `slots_R[i]` of the pool.

    Slots (int32 or int64) below 0 are skipped. Any strides but the last. No slot twice.
    """
    if len(slots_R) == 0:
        return
    num_kv_heads, head_dim = k_TKH.shape[1:]
    scatter_rows[(len(slots_R),)](
        k_TKH,
        v_TKH,
        rows_R,
        slots_R,
        k_SKH,
        v_SKH,
        *k_TKH.stride()[:2],
        *v_TKH.stride()[:2],
        *k_SKH.stride()[:2],
        *v_SKH.stride()[:2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_N=triton.next_power_of_2(num_kv_heads),
        BLOCK_H=triton.next_power_of_2(head_dim),
        HAS_ROWS=rows_R is not None,
        num_warps=4,
    )


@triton.jit
def _rotate_heads(
    x_ptr,
    y_ptr,
    stride_xn,
    stride_yn,
    cos1,
    sin1,
    cos2,
    sin2,
    NUM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    """Rotate all heads of one token; returns the rotated halves and their mask."""
    n = tl.arange(0, BLOCK_N)[:, None]
    h = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (n < NUM) & (h < HALF)
    a = tl.load(x_ptr + n * stride_xn + h, mask=mask, other=0.0)
    b = tl.load(x_ptr + n * stride_xn + h + HALF, mask=mask, other=0.0)
    kind = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    first = (a * cos1 - b * sin1).to(kind)
    second = (b * cos2 + a * sin2).to(kind)
    tl.store(y_ptr + n * stride_yn + h, first, mask=mask)
    tl.store(y_ptr + n * stride_yn + h + HALF, second, mask=mask)
    return first, second


@triton.jit
def rotate_and_store(
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    slots_ptr,
    k_pool_ptr,
    v_pool_ptr,
    stride_qt,
    stride_qn,
    stride_kt,
    stride_kk,
    stride_vt,
    stride_vk,
    stride_ct,
    stride_st,
    stride_qot,
    stride_qon,
    stride_kot,
    stride_kok,
    stride_ks,
    stride_kpk,
    stride_vs,
    stride_vpk,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    STORE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token a program; grid (tokens,)."""
    wait_for_ahead(EARLY)
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.program_id(0)
    t = i.to(tl.int64)
    h = tl.arange(0, BLOCK_HALF)[None, :]
    in_half = h < HALF
    cos1 = tl.load(cos_ptr + t * stride_ct + h, mask=in_half, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + t * stride_st + h, mask=in_half, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + t * stride_ct + h + HALF, mask=in_half, other=0.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + t * stride_st + h + HALF, mask=in_half, other=0.0).to(tl.float32)
    _rotate_heads(
        q_ptr + t * stride_qt,
        q_out_ptr + t * stride_qot,
        stride_qn,
        stride_qon,
        cos1,
        sin1,
        cos2,
        sin2,
        NUM_HEADS,
        HALF,
        BLOCK_N,
        BLOCK_HALF,
    )
    first, second = _rotate_heads(
        k_ptr + t * stride_kt,
        k_out_ptr + t * stride_kot,
        stride_kk,
        stride_kok,
        cos1,
        sin1,
        cos2,
        sin2,
        NUM_KV_HEADS,
        HALF,
        BLOCK_KV,
        BLOCK_HALF,
    )
    if STORE:
        slot = tl.load(slots_ptr + i).to(tl.int64)
        if slot >= 0:
            n = tl.arange(0, BLOCK_KV)[:, None]
            mask = (n < NUM_KV_HEADS) & in_half
            k_at = k_pool_ptr + slot * stride_ks + n * stride_kpk + h
            tl.store(k_at, first, mask=mask)
            tl.store(k_at + HALF, second, mask=mask)
            v_from = v_ptr + t * stride_vt + n * stride_vk + h
            v_at = v_pool_ptr + slot * stride_vs + n * stride_vpk + h
            tl.store(v_at, tl.load(v_from, mask=mask), mask=mask)
            tl.store(v_at + HALF, tl.load(v_from + HALF, mask=mask), mask=mask)


def rope_store_kv(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    slots_T: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
) -> None:
    """Rotate `q_TNH` and `k_TKH` in place and write K and V of token i to slot `slots_T[i]`.

    Rotation as in `apply_rotary`. Slots below 0 are skipped. Any strides but the last.
    """
    _rotate(q_TNH, k_TKH, cos_TH, sin_TH, (q_TNH, k_TKH), (v_TKH, slots_T, k_SKH, v_SKH))


def apply_rotary(
    q_TNH: Tensor,
    k_TKH: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys; see `kernels.elementwise.apply_rotary`."""
    if out is None:
        out = (
            torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device),
            torch.empty(k_TKH.shape, dtype=k_TKH.dtype, device=k_TKH.device),
        )
    _rotate(q_TNH, k_TKH, cos_TH, sin_TH, out, None)
    return out


def _rotate(
    q_TNH: Tensor,
    k_TKH: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    out: tuple[Tensor, Tensor],
    pool: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> None:
    num_tokens, num_heads, head_dim = q_TNH.shape
    if num_tokens == 0:
        return
    num_kv_heads = k_TKH.shape[1]
    v, slots, k_pool, v_pool = pool if pool is not None else (None, None, None, None)
    rotate_and_store[(num_tokens,)](
        q_TNH,
        k_TKH,
        v,
        cos_TH,
        sin_TH,
        *out,
        slots,
        k_pool,
        v_pool,
        *q_TNH.stride()[:2],
        *k_TKH.stride()[:2],
        *_strides(v),
        cos_TH.stride(0),
        sin_TH.stride(0),
        *out[0].stride()[:2],
        *out[1].stride()[:2],
        *_strides(k_pool),
        *_strides(v_pool),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_N=triton.next_power_of_2(num_heads),
        BLOCK_KV=triton.next_power_of_2(num_kv_heads),
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        STORE=pool is not None,
        num_warps=4,
        **early(q_TNH.device),
    )


def _strides(x: Tensor | None) -> tuple[int, int]:
    return (x.stride(0), x.stride(1)) if x is not None else (0, 0)
