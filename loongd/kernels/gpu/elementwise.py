"""Norms, the gated activation and angles of rotations, one pass over memory each.

Knows: formulas of `kernels.elementwise`. Works on T = 0 and on views with gaps between rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loongd.kernels.gpu.early import early, wait_for_ahead


@triton.jit(do_not_specialize=["num_rows"])
def norm_rows(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    eps,
    num_rows,
    stride_xt,
    stride_xn,
    stride_rt,
    INNER: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_R rows a program; a row is (token, head) with INNER heads, or a token; y contiguous."""
    wait_for_ahead(EARLY)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < num_rows) & (d < DIM)
    x_at = x_ptr + (row // INNER) * stride_xt + (row % INNER) * stride_xn + d
    x = tl.load(x_at, mask=mask, other=0.0)
    kind = x.dtype
    if ADD:
        residual_at = residual_ptr + row * stride_rt + d
        x = (x.to(tl.float32) + tl.load(residual_at, mask=mask, other=0.0).to(tl.float32)).to(kind)
        tl.store(residual_at, x, mask=mask)
    x = x.to(tl.float32)
    mean = tl.sum(x * x, 1) / DIM
    weight = tl.load(weight_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(mean + eps)[:, None] * weight
    tl.store(y_ptr + row * DIM + d, y.to(kind), mask=mask)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight; x_TD, or x_TNH with weight_H. New, contiguous."""
    return _norm(x_TD, None, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`residual_TD += x_TD` in place, then the norm of it as `rms_norm`."""
    return _norm(x_TD, residual_TD, weight_D, eps)


def _norm(x: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    num_rows = x.numel() // dim
    if num_rows == 0:
        return y
    block_d = triton.next_power_of_2(dim)
    block_r = max(1, 2048 // block_d)
    norm_rows[(triton.cdiv(num_rows, block_r),)](
        x,
        residual_TD,
        weight_D,
        y,
        eps,
        num_rows,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        residual_TD.stride(0) if residual_TD is not None else 0,
        INNER=inner,
        DIM=dim,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        ADD=residual_TD is not None,
        num_warps=4 if block_d <= 4096 else 8,
        **early(x.device),
    )
    return y


@triton.jit
def silu_mul_rows(
    gate_ptr,
    up_ptr,
    y_ptr,
    stride_gt,
    stride_ut,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK columns of one row a program; grid (rows, columns / BLOCK)."""
    wait_for_ahead(EARLY)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < DIM
    gate = tl.load(gate_ptr + row * stride_gt + d, mask=mask, other=0.0)
    kind = gate.dtype
    gate = gate.to(tl.float32)
    up = tl.load(up_ptr + row * stride_ut + d, mask=mask, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * DIM + d, y.to(kind), mask=mask)


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """y = silu(gate) * up; new and contiguous."""
    num_rows, dim = gate_TF.shape
    y = torch.empty(gate_TF.shape, dtype=gate_TF.dtype, device=gate_TF.device)
    if num_rows == 0:
        return y
    block = min(2048, triton.next_power_of_2(dim))
    silu_mul_rows[(num_rows, triton.cdiv(dim, block))](
        gate_TF,
        up_TF,
        y,
        gate_TF.stride(0),
        up_TF.stride(0),
        DIM=dim,
        BLOCK=block,
        num_warps=4,
        **early(gate_TF.device),
    )
    return y


@triton.jit
def angles_of_rows(
    positions_ptr,
    inv_freq_ptr,
    cos_ptr,
    sin_ptr,
    scale,
    stride_ft,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token a program; grid (tokens,)."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    mask = h < HALF
    inv_freq = tl.load(inv_freq_ptr + row * stride_ft + h, mask=mask, other=0.0)
    angle = tl.load(positions_ptr + row).to(tl.float32) * inv_freq
    kind = cos_ptr.dtype.element_ty
    cos, sin = (tl.cos(angle) * scale).to(kind), (tl.sin(angle) * scale).to(kind)
    at = row * 2 * HALF + h
    tl.store(cos_ptr + at, cos, mask=mask)
    tl.store(cos_ptr + at + HALF, cos, mask=mask)
    tl.store(sin_ptr + at, sin, mask=mask)
    tl.store(sin_ptr + at + HALF, sin, mask=mask)


def rotary_angles(
    positions_T: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotations; see `kernels.elementwise.rotary_angles`."""
    num_tokens, half = len(positions_T), inv_freq.shape[-1]
    assert positions_T.is_contiguous()
    assert inv_freq.stride(-1) == 1
    cos, sin = (
        torch.empty((num_tokens, 2 * half), dtype=dtype, device=positions_T.device)
        for _ in range(2)
    )
    if num_tokens:
        angles_of_rows[(num_tokens,)](
            positions_T,
            inv_freq,
            cos,
            sin,
            scale,
            inv_freq.stride(0) if inv_freq.dim() == 2 else 0,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            num_warps=1 if half <= 64 else 2,
        )
    return cos, sin
