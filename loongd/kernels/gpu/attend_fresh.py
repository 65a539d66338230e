"""A new token's share of attention: its query and key are rotated, its key and value stored.

Knows: formulas of `gpu.pool`, for rows that a program of attention reads anyway. Does not know:
which program has a span's last key, and so stores.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotated(x_row, cos_ptr, sin_ptr, h, mask, HEAD_DIM: tl.constexpr):
    """The rows at `x_row`, rotated by the angles of one token, in their type."""
    HALF: tl.constexpr = HEAD_DIM // 2
    other = tl.where(h < HALF, h + HALF, h - HALF)
    cos = tl.load(cos_ptr + h, mask=h < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + h, mask=h < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
    x = tl.load(x_row[:, None] + h[None, :], mask=mask, other=0.0)
    y = tl.load(x_row[:, None] + other[None, :], mask=mask, other=0.0).to(tl.float32)
    turned = x.to(tl.float32) * cos + tl.where(h < HALF, -1.0, 1.0)[None, :] * y * sin
    return turned.to(x.dtype)


@triton.jit
def fresh_queries(
    q_row,
    k_from,
    v_from,
    cos_ptr,
    sin_ptr,
    slot_ptr,
    k_to,
    v_to,
    stride_ks,
    stride_vs,
    has_last,
    h,
    mask,
    HEAD_DIM: tl.constexpr,
):
    """A new token's queries of one kv head, rotated. The program that `has_last` of its keys stores
    that head's key, rotated, and value, unless the slot is below 0, and sees them afterwards."""
    if has_last:
        slot = tl.load(slot_ptr).to(tl.int64)
        if slot >= 0:
            row = tl.zeros((1,), tl.int64)
            in_head = (h < HEAD_DIM)[None, :]
            k = rotated(k_from + row, cos_ptr, sin_ptr, h, in_head, HEAD_DIM)
            v = tl.load((v_from + row)[:, None] + h[None, :], mask=in_head)
            tl.store((k_to + slot * stride_ks + row)[:, None] + h[None, :], k, mask=in_head)
            tl.store((v_to + slot * stride_vs + row)[:, None] + h[None, :], v, mask=in_head)
        tl.debug_barrier()
    return rotated(q_row, cos_ptr, sin_ptr, h, mask, HEAD_DIM)
