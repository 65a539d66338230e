"""Torch twins of the Triton kernels: same names, same signatures, any device.

Knows: formulas, written for clearness. The oracle of the kernels' tests, and what runs where
triton does not. `split_kv` and `extend` read lengths on the host; the kernels need not.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from loongd.kernels.fresh import Fresh

_FLAG_TIMEOUT_S = 30.0
_GREEDY_TEMPERATURE = 1e-5
_DRAWN_ROWS = 32
"""Rows drawn at once; bounds the memory of float64 probabilities."""
_CANDIDATES = 1024
"""Best logits looked at before falling back to the whole vocabulary."""


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
    k_ends: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
    fresh: Fresh | None = None,
    tiling: Any = None,
) -> tuple[Tensor, Tensor]:
    """Few queries a span over the pool; see `kernels.gpu.attend.split_kv`."""
    del max_q, tiling
    if fresh is not None:
        q_TNH, k_TKH = q_TNH.clone(), fresh.k.clone()
        rope_store_kv(q_TNH, k_TKH, fresh.v, fresh.cos, fresh.sin, fresh.slots, k_SKH, v_SKH)
    begins, ends = (cu_k, k_ends) if k_ends is not None else (cu_k[:-1], cu_k[1:])
    keys = list(zip(begins.tolist(), ends.tolist(), strict=True))
    q_ends = cu_q.tolist() if cu_q is not None else list(range(len(keys) + 1))
    ranges = tuple((*q, *k) for q, k in zip(pairwise(q_ends), keys, strict=True))
    return extend(q_TNH, k_SKH, v_SKH, slots, ranges, scale=scale, out=out)


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


def extend_planned(
    q_TNH: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    slots: Tensor | None,
    tiles: Tensor,
    ends: Tensor,
    *,
    scale: float,
    tiling: Any,
    out: tuple[Tensor, Tensor],
    causal: bool = True,
) -> None:
    """Spans whose tiles are listed; see `kernels.gpu.attend.extend_planned`."""
    del ends, tiling
    spans = dict.fromkeys(tuple(tile[:4]) for tile in tiles.tolist() if tile[1])
    ranges = tuple((q, q + num_q, k, k + num_k) for q, num_q, k, num_k in spans)
    extend(q_TNH, k_SKH, v_SKH, slots, ranges, scale=scale, causal=causal, out=out)


def merge_state_(out_TNH: Tensor, lse_TN: Tensor, part_TNH: Tensor, part_lse_TN: Tensor) -> None:
    """Merge a part into `out_TNH`, `lse_TN` in place; see `kernels.merge`."""
    merged = torch.logaddexp(lse_TN, part_lse_TN)
    # Where both are -inf the difference would be nan; any finite stand-in gives weight 0.
    safe = torch.where(merged == -torch.inf, torch.zeros_like(merged), merged)
    out_TNH.mul_(torch.exp(lse_TN - safe).unsqueeze(-1))
    out_TNH.addcmul_(part_TNH.to(out_TNH.dtype), torch.exp(part_lse_TN - safe).unsqueeze(-1))
    lse_TN.copy_(merged)


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
    slots_S.index_copy_(0, entries_B.long(), slots_B)
    # a row that drew nothing has failed, and its request with it: any token will do
    drawn = drawn_B[sources_B.long().clamp(min=0)].clamp(min=0)
    tokens_B.copy_(torch.where(sources_B >= 0, drawn, given_B.long()))


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
    kept = slots_R >= 0
    if not bool(kept.all()):
        rows_R = kept.nonzero()[:, 0] if rows_R is None else rows_R[kept]
        slots_R = slots_R[kept]
    if rows_R is not None:
        k_TKH, v_TKH = k_TKH[rows_R], v_TKH[rows_R]
    k_SKH.index_copy_(0, slots_R.long(), k_TKH[: len(slots_R)])
    v_SKH.index_copy_(0, slots_R.long(), v_TKH[: len(slots_R)])


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
    q_TNH: Tensor,
    k_TKH: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys; see `kernels.elementwise.apply_rotary`."""
    cos_T1H, sin_T1H = cos_TH[:, None], sin_TH[:, None]
    turned = (_rotate(q_TNH, cos_T1H, sin_T1H), _rotate(k_TKH, cos_T1H, sin_T1H))
    if out is None:
        return turned
    return out[0].copy_(turned[0]), out[1].copy_(turned[1])


def rotary_angles(
    positions_T: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotations; see `kernels.elementwise.rotary_angles`."""
    half = positions_T[:, None].float() * inv_freq
    angles_TH = torch.cat((half, half), dim=-1)
    cos_TH, sin_TH = angles_TH.cos(), angles_TH.sin()
    if scale != 1.0:
        cos_TH, sin_TH = cos_TH * scale, sin_TH * scale
    return cos_TH.to(dtype), sin_TH.to(dtype)


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


def best_tokens(logits_BV: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Token of the largest logit of each row; see `kernels.gpu.sampling.best_tokens`."""
    best_B, tokens_B = logits_BV.max(dim=-1)  # max propagates NaN
    tokens_B = torch.where(best_B.isfinite(), tokens_B, -1)
    return tokens_B if out is None else out.copy_(tokens_B)


def draw_tokens(
    logits_BV: Tensor,
    temperature_B: Tensor,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    uniform_B: Tensor,
    *,
    filtered: bool,
) -> Tensor:
    """A drawn token for each row; see `kernels.sampling.draw_tokens`.

    Reads on the host which rows are drawn and whether the best logits hold all that is kept.
    """
    tokens_B = best_tokens(logits_BV)
    parameters = torch.stack((temperature_B, top_k_B, top_p_B, min_p_B, uniform_B))
    rows = ((tokens_B >= 0) & (temperature_B >= _GREEDY_TEMPERATURE)).nonzero()[:, 0]
    for first in range(0, len(rows), _DRAWN_ROWS):
        index = rows[first : first + _DRAWN_ROWS]
        logits_RV, best_R1 = _rows(logits_BV, index).float(), _rows(tokens_B[:, None], index)
        part = parameters[:, index].unsqueeze(-1)
        tokens_B[index] = _draw(logits_RV, logits_RV.gather(1, best_R1), *part, filtered=filtered)
    return tokens_B


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """These rows, in order; the same tensor when they are all."""
    return x[index] if len(index) < len(x) else x


def _draw(
    logits_RV: Tensor,
    best_R1: Tensor,
    temperature_R1: Tensor,
    top_k_R1: Tensor,
    top_p_R1: Tensor,
    min_p_R1: Tensor,
    uniform_R1: Tensor,
    *,
    filtered: bool,
) -> Tensor:
    """The first token whose cumulative mass exceeds `uniform` of the total."""
    vocab = logits_RV.shape[1]
    scaled_RV = (logits_RV - best_R1).div_(temperature_R1.float())
    top_k_R1 = top_k_R1.long()
    top_k_R1 = torch.where((top_k_R1 > 0) & (top_k_R1 < vocab), top_k_R1, vocab)
    if filtered:
        cuts_R = ((top_k_R1 < vocab) | (top_p_R1 < 1.0))[:, 0].nonzero()[:, 0]
        given = (logits_RV, scaled_RV, temperature_R1, top_k_R1, top_p_R1)
        cutoff_R1 = torch.full_like(best_R1, -torch.inf)
        cutoff_R1[cuts_R] = _cutoff(*(_rows(x, cuts_R) for x in given))
        scaled_RV.masked_fill_(logits_RV < cutoff_R1, -torch.inf)
    if bool((min_p_R1 > 0).any()):
        scaled_RV.masked_fill_(scaled_RV < min_p_R1.log(), -torch.inf)
    mass_RV = scaled_RV.double().exp_().cumsum(-1)
    target_R1 = uniform_R1 * mass_RV[:, -1:]
    # right=True steps over tokens of no mass, whose cumulative mass equals their neighbour's
    return torch.searchsorted(mass_RV, target_R1, right=True)[:, 0]


def _cutoff(
    logits_RV: Tensor,
    scaled_RV: Tensor,
    temperature_R1: Tensor,
    top_k_R1: Tensor,
    top_p_R1: Tensor,
) -> Tensor:
    """The smallest logit (R, 1) that top-k, then top-p over what top-k left, keep.

    Looks at the best `_CANDIDATES` logits first; only when some row needs more, at all of them.
    """
    vocab = logits_RV.shape[1]
    log_total_R1 = scaled_RV.double().logsumexp(-1, keepdim=True)
    for num in (min(_CANDIDATES, vocab), vocab):
        values_RC = logits_RV.topk(num, dim=-1).values
        scaled_RC = (values_RC - values_RC[:, :1]) / temperature_R1.float()
        kth_R1 = values_RC.gather(1, top_k_R1.clamp(max=num) - 1)
        kept_RC = values_RC >= torch.where(top_k_R1 < vocab, kth_R1, -torch.inf)
        mass_RC = (scaled_RC.double() - log_total_R1).exp() * kept_RC
        cumulative_RC = mass_RC.cumsum(-1)
        # with top-k on, what top-p shares out is the mass that top-k left
        total_R1 = torch.where(top_k_R1 < vocab, cumulative_RC[:, -1:], 1.0)
        wanted_R1 = torch.where(top_p_R1 < 1.0, top_p_R1 * total_R1, torch.inf)
        kept_RC &= cumulative_RC - mass_RC < wanted_R1
        kept_RC[:, 0] = True
        # the last candidate dropped means that the candidates hold everything wanted
        if num == vocab or not bool(kept_RC[:, -1].any()):
            break
    return values_RC.masked_fill(~kept_RC, torch.inf).amin(-1, keepdim=True)


def push_counts(num_elements: int) -> int:
    """What a push adds to the flag; see `kernels.gpu.signal`."""
    del num_elements
    return 1


def push_rows(source: Tensor, target: Tensor, flag: Tensor) -> None:
    """Copy rows, then count; see `kernels.gpu.signal.push_rows`."""
    target.view(-1)[: source.numel()].copy_(source.view(-1))
    flag.add_(1)


def raise_flag(flag: Tensor, count: int = 1) -> None:
    """Add to a flag; see `kernels.gpu.signal.raise_flag`."""
    flag.add_(count)


def await_flag(flag: Tensor, expected: int = 1) -> None:
    """Wait for another thread's counts; see `kernels.gpu.signal.await_flag`.

    Raises TimeoutError when they do not come.
    """
    give_up_s = time.monotonic() + _FLAG_TIMEOUT_S
    while int(flag) != expected:
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"flag {int(flag)}, {expected} expected")
        time.sleep(1e-5)
    flag.zero_()
