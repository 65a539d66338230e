"""A new token's share of attention: its query and key are rotated, its key and value stored.

Knows: formulas of `gpu.pool`, for rows that a program of attention reads anyway. Does not know:
which program has a span's last key, and so begins with it and stores it.
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
def start_fresh(
    q,
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
    scale_log2,
    h,
    HEAD_DIM: tl.constexpr,
):
    """The state (out, peak, mass) of rotated queries that have seen their own key alone, where this
    program `has_last` of a span's keys; it also stores that key, rotated, and value, unless the
    slot is below 0. Elsewhere that of queries that have seen nothing.

    Nothing waits for what is stored: the loop over the other keys begins at once.
    """
    slot = tl.load(slot_ptr).to(tl.int64)
    here = (h < HEAD_DIM) & has_last
    row = tl.zeros((1,), tl.int64)
    k = rotated(k_from + row, cos_ptr, sin_ptr, h, here[None, :], HEAD_DIM)
    v = tl.load(v_from + h, mask=here, other=0.0)
    stored = here & (slot >= 0)
    tl.store((k_to + slot * stride_ks + row)[:, None] + h[None, :], k, mask=stored[None, :])
    tl.store(v_to + slot * stride_vs + h, v, mask=stored)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale_log2
    acc = tl.zeros((q.shape[0], q.shape[1]), tl.float32) + v.to(tl.float32)[None, :]
    mass = tl.zeros((q.shape[0],), tl.float32)
    return acc, tl.where(has_last, score, float("-inf")), tl.where(has_last, mass + 1.0, mass)
