"""Small operations between the matrix products: Triton on CUDA, plain torch elsewhere.

Knows: formulas. All work on empty tensors (T = 0), and all but `rotary_angles` on views that are
not contiguous.

Letters: T packed tokens, N query heads, K key/value heads, H head dim, D model dim, F hidden of
the MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongd.kernels.dispatch import pick


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, accumulated in fp32.

    Also serves the per-head norms of queries and keys: x_TNH with weight_H.
    """
    y: Tensor = pick("elementwise", x_TD.device).rms_norm(x_TD, weight_D, eps)
    return y


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`residual_TD += x_TD` in place, rounded to its type, then the norm of that as `rms_norm`."""
    gpu = pick("elementwise", x_TD.device)
    y: Tensor = gpu.add_rms_norm(x_TD, residual_TD, weight_D, eps)
    return y


def rotary_angles(
    positions_T: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (T, H) of position * inv_freq, times `scale`: computed in float32, returned
    as `dtype`. The second half of each row repeats the first.

    Args:
        positions_T: int32 or int64.
        inv_freq: float32 (H/2), or (T, H/2).
    """
    angles: tuple[Tensor, Tensor] = pick("elementwise", positions_T.device).rotary_angles(
        positions_T, inv_freq, scale, dtype
    )
    return angles


def apply_rotary(
    q_TNH: Tensor,
    k_TKH: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: y = x * cos + rotate_half(x) * sin, where rotate_half maps the
    halves (a, b) of a head to (-b, a). Written to `out` and returned; new, contiguous without.
    """
    turned: tuple[Tensor, Tensor] = pick("pool", q_TNH.device).apply_rotary(
        q_TNH, k_TKH, cos_TH, sin_TH, out=out
    )
    return turned


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """y = silu(gate) * up, silu(x) = x * sigmoid(x)."""
    y: Tensor = pick("elementwise", gate_TF.device).silu_mul(gate_TF, up_TF)
    return y
