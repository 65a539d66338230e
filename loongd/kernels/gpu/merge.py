"""Merging two partial results in place, in one pass.

Knows: the formula of `kernels.merge`. Does not know where partials come from.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows", "stride_lt", "stride_ln", "stride_mt", "stride_mn"])
def merge_rows(
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    num_rows,
    num_heads,
    stride_ot,
    stride_on,
    stride_lt,
    stride_ln,
    stride_pt,
    stride_pn,
    stride_mt,
    stride_mn,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """BLOCK_R rows (token, head) a program; grid (rows / BLOCK_R,)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    h = tl.arange(0, BLOCK_H)
    real = row < num_rows
    mask = real[:, None] & (h < HEAD_DIM)[None, :]
    token, head = row // num_heads, row % num_heads
    lse_at = lse_ptr + token * stride_lt + head * stride_ln
    out_at = out_ptr + (token * stride_ot + head * stride_on)[:, None] + h[None, :]
    part_at = part_ptr + (token * stride_pt + head * stride_pn)[:, None] + h[None, :]
    lse = tl.load(lse_at, mask=real, other=float("-inf"))
    part_lse = tl.load(
        part_lse_ptr + token * stride_mt + head * stride_mn, mask=real, other=float("-inf")
    )
    out = tl.load(out_at, mask=mask, other=0.0)
    part = tl.load(part_at, mask=mask, other=0.0).to(tl.float32)
    peak = tl.maximum(lse, part_lse)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weight, part_weight = tl.exp(lse - shift), tl.exp(part_lse - shift)
    mass = weight + part_weight
    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    merged = out * (weight / mass)[:, None] + part * (part_weight / mass)[:, None]
    tl.store(out_at, merged, mask=mask)
    tl.store(lse_at, tl.where(some, shift + tl.log(mass), float("-inf")), mask=real)


def merge_state_(out_TNH: Tensor, lse_TN: Tensor, part_TNH: Tensor, part_lse_TN: Tensor) -> None:
    """Merge a part into `out_TNH`, `lse_TN` (float32) in place; see `kernels.merge`.

    Any strides but the last of `out_TNH` and `part_TNH`; the part may be of any float type.
    """
    num_tokens, num_heads, head_dim = out_TNH.shape
    num_rows = num_tokens * num_heads
    if num_rows == 0:
        return
    assert out_TNH.stride(2) == part_TNH.stride(2) == 1
    block_h = triton.next_power_of_2(head_dim)
    block_r = max(1, 2048 // block_h)
    merge_rows[(triton.cdiv(num_rows, block_r),)](
        out_TNH,
        lse_TN,
        part_TNH,
        part_lse_TN,
        num_rows,
        num_heads,
        *out_TNH.stride()[:2],
        *lse_TN.stride(),
        *part_TNH.stride()[:2],
        *part_lse_TN.stride(),
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_R=block_r,
        num_warps=4,
    )
