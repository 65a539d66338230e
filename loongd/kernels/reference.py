"""Torch twins of the Triton kernels: same names, same signatures, any device.

Knows: formulas, written for clearness. The oracle of the kernels' tests, and what runs where
triton does not. `split_kv` and `extend` read lengths on the host; the kernels need not.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


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
    tiling: Any = None,
) -> tuple[Tensor, Tensor]:
    """Few queries a span over the pool; see `kernels.gpu.attend.split_kv`."""
    del max_q, tiling
    k_ends = cu_k.tolist()
    q_ends = cu_q.tolist() if cu_q is not None else list(range(len(k_ends)))
    ranges = zip(pairwise(q_ends), pairwise(k_ends), strict=True)
    return extend(q_TNH, k_SKH, v_SKH, slots, tuple((*q, *k) for q, k in ranges), scale=scale)


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
    tiling: Any = None,
) -> tuple[Tensor, Tensor]:
    """Any number of queries a span over the pool; see `kernels.gpu.attend.extend`.

    Computes in the type of `q_TNH` if that is float64, else in float32; the result has that type.
    """
    del tiling
    wide = torch.float64 if q_TNH.dtype == torch.float64 else torch.float32
    if out is None:
        out = (
            torch.zeros(q_TNH.shape, dtype=wide, device=q_TNH.device),
            torch.full(q_TNH.shape[:2], -torch.inf, dtype=wide, device=q_TNH.device),
        )
    group = q_TNH.shape[1] // k_SKH.shape[1]
    for q0, q1, k0, k1 in ranges:
        at = slots[k0:k1].long() if slots is not None else slice(k0, k1)
        k_NKH, v_NKH = (
            x[at].to(wide).transpose(0, 1).repeat_interleave(group, 0) for x in (k_SKH, v_SKH)
        )
        scores_NQK = q_TNH[q0:q1].to(wide).transpose(0, 1) @ k_NKH.transpose(1, 2) * scale
        if causal:
            offset = (k1 - k0) - (q1 - q0)
            hidden = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool, device=q_TNH.device)
            scores_NQK.masked_fill_(hidden.triu(offset + 1), -torch.inf)
        lse_NQ = torch.logsumexp(scores_NQK, -1)
        shift = torch.where(lse_NQ == -torch.inf, torch.zeros_like(lse_NQ), lse_NQ)
        out[0][q0:q1] = (torch.exp(scores_NQK - shift[..., None]) @ v_NKH).transpose(0, 1)
        out[1][q0:q1] = lse_NQ.transpose(0, 1)
    return out


def merge_state_(out_TNH: Tensor, lse_TN: Tensor, part_TNH: Tensor, part_lse_TN: Tensor) -> None:
    """Merge a part into `out_TNH`, `lse_TN` in place; see `kernels.merge`."""
    merged = torch.logaddexp(lse_TN, part_lse_TN)
    # Where both are -inf the difference would be nan; any finite stand-in gives weight 0.
    safe = torch.where(merged == -torch.inf, torch.zeros_like(merged), merged)
    out_TNH.mul_(torch.exp(lse_TN - safe).unsqueeze(-1))
    out_TNH.addcmul_(part_TNH.to(out_TNH.dtype), torch.exp(part_lse_TN - safe).unsqueeze(-1))
    lse_TN.copy_(merged)


def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor,
    slots_R: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    *,
    rows_R: Tensor | None = None,
) -> None:
    """Write rows of K and V to slots of the pool; see `kernels.gpu.pool.store_kv`."""
    kept = (slots_R >= 0).nonzero()[:, 0]
    slots = slots_R[kept].long()
    rows = rows_R[kept].long() if rows_R is not None else kept
    k_SKH[slots] = k_TKH[rows]
    v_SKH[slots] = v_TKH[rows]


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
    """Rotate queries and keys in place, store K and V; see `kernels.gpu.pool.rope_store_kv`."""
    q, k = apply_rotary(q_TNH, k_TKH, cos_TH, sin_TH)
    q_TNH.copy_(q)
    k_TKH.copy_(k)
    store_kv(k_TKH, v_TKH, slots_T, k_SKH, v_SKH)


def apply_rotary(
    q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys; see `kernels.elementwise.apply_rotary`."""
    cos_T1H, sin_T1H = cos_TH[:, None], sin_TH[:, None]
    return _rotate(q_TNH, cos_T1H, sin_T1H), _rotate(k_TKH, cos_T1H, sin_T1H)


def _rotate(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    first, second = x_TNH.chunk(2, dim=-1)
    half_TNH = torch.cat((-second, first), dim=-1)
    return (x_TNH * cos_T1H + half_TNH * sin_T1H).to(x_TNH.dtype)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Norm over the last dimension; see `kernels.elementwise.rms_norm`."""
    return functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)


def add_rms_norm(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`residual_TD += x_TD` in place, then the norm of it as `rms_norm`."""
    return rms_norm(residual_TD.add_(x_TD), weight_D, eps)


def silu_mul(gate_TF: Tensor, up_TF: Tensor) -> Tensor:
    """y = silu(gate) * up; see `kernels.elementwise.silu_mul`."""
    return functional.silu(gate_TF).mul_(up_TF)


def best_tokens(logits_BV: Tensor) -> Tensor:
    """Token of the largest logit of each row; see `kernels.gpu.sampling.best_tokens`."""
    best_B, tokens_B = logits_BV.max(dim=-1)  # max propagates NaN
    return torch.where(best_B.isfinite(), tokens_B, -1)
