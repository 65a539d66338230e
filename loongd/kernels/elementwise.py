"""Small operations between the matrix products, in plain torch.

Knows: formulas. All work on empty tensors (T = 0) and on views that are not contiguous.

Letters: T packed tokens, N query heads, K key/value heads, H head dim, D model dim, F hidden of
the MLP.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, accumulated in fp32.

    Also serves the per-head norms of queries and keys: x_TNH with weight_H.
    """
    return functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def apply_rotary(
    q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys: y = x * cos + rotate_half(x) * sin, where rotate_half maps the
    halves (a, b) of a head to (-b, a). New contiguous tensors.
    """
    cos_T1H, sin_T1H = cos_TH[:, None], sin_TH[:, None]
    return _rotate(q_TNH, cos_T1H, sin_T1H), _rotate(k_TKH, cos_T1H, sin_T1H)


def _rotate(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    first, second = x_TNH.chunk(2, dim=-1)
    half_TNH = torch.cat((-second, first), dim=-1)
    return (x_TNH * cos_T1H + half_TNH * sin_T1H).to(x_TNH.dtype)


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """y = silu(gate) * up, silu(x) = x * sigmoid(x)."""
    return functional.silu(gate_TF).mul_(up_TF)
