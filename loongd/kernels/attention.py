"""Partial attention: outputs with their log-sum-exps, over packed keys or over the KV pool.

Knows: three ways to compute the same two functions (CPU flash, CUDA varlen flash, dense
float32) and which one suits a device, type and head size; `select_backend` chooses once.
Does not know: groups, rings, requests beyond the lengths of packed spans.

Shapes: q_TNH packed queries, k_TKH/v_TKH packed keys of the same spans, k_SKH the pool of one
layer. Outputs are out_TNH and lse_TN; a query with no key has lse -inf and out 0. They are
float32, but for the output of a square, which may be of the type of q: the libraries that are
fastest give no other, and a copy would cost up to a quarter of their time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongd.kernels.dispatch import has_triton

_DENSE_SCORES = 1 << 25
"""Most score elements (queries x heads x keys) that the dense path holds at a time."""


@dataclass(frozen=True)
class Spans:
    """Packed spans: span `i` has `q_lens[i]` queries and `k_lens[i]` keys, all back to back.

    `q_positions` and `k_positions` (int64, packed alike) are needed only for sliding windows.
    A square that is alone may have `spare` rows behind its queries, keys and values (those of the
    latter two finite), which an `AttentionBackend` that asks for them computes and drops.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    device: torch.device
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    spare: int = 0

    @cached_property
    def ranges(self) -> tuple[tuple[int, int, int, int], ...]:
        """(first query, end, first key, end) of each span."""
        q = list(accumulate(self.q_lens, initial=0))
        k = list(accumulate(self.k_lens, initial=0))
        return tuple(zip(q[:-1], q[1:], k[:-1], k[1:], strict=True))

    @cached_property
    def cu_q(self) -> Tensor:
        return self._cumulative(self.q_lens)

    @cached_property
    def cu_k(self) -> Tensor:
        return self._cumulative(self.k_lens)

    def _cumulative(self, lens: Sequence[int]) -> Tensor:
        ends = torch.tensor(list(accumulate(lens, initial=0)), dtype=torch.int32)
        return ends.to(self.device, non_blocking=True)


@dataclass(frozen=True)
class PoolSlots:
    """The slots that each span's keys occupy, in any order (attention does not mind)."""

    per_span: tuple[npt.NDArray[np.int64], ...]
    device: torch.device
    _gaps: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict)

    def run(self, span: int, first: int = 0, end: int | None = None) -> tuple[int, int] | None:
        """(first, end) of the slots of the span's keys `first` to `end`, by default all of them.

        None when they are not one ascending run, which can be read as a view.
        """
        slots = self.per_span[span]
        end = len(slots) if end is None else end
        if first >= end:
            return (0, 0)
        gaps = self._gaps.get(span)
        if gaps is None:
            gaps = self._gaps[span] = np.flatnonzero(np.diff(slots) != 1)
        if np.searchsorted(gaps, first) != np.searchsorted(gaps, end - 1):
            return None
        return (int(slots[first]), int(slots[end - 1]) + 1)

    def is_run(self, span: int) -> bool:
        """Whether all of the span's keys can be read as a view."""
        return self.run(span) is not None

    @cached_property
    def packed(self) -> Tensor:
        """All slots back to back, int64 on the device."""
        slots = np.concatenate(self.per_span) if self.per_span else np.empty(0, np.int64)
        return torch.from_numpy(slots).to(self.device, non_blocking=True)

    def rows(self, span: int, pool_SKH: Tensor) -> Tensor:
        """One span's rows of the pool: a view where its slots are a run, else a copy."""
        run = self.run(span)
        if run is not None:
            return pool_SKH[run[0] : run[1]]
        return pool_SKH.index_select(0, torch.from_numpy(self.per_span[span]).to(self.device))


class Planned(Protocol):
    """What a library wants to know ahead, and of which lengths it wants squares: it may take longer
    to plan for one than to compute it."""

    def ahead(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Iterable[float]:
        """Plan for what serving will ask for; the fractions done."""

    def spare(self, num_tokens: int) -> int:
        """`Spans.spare` with which a square of so many tokens that is alone is faster."""

    def is_one_call(self, num_tokens: int) -> bool:
        """Whether a square of so many tokens that is alone is one call, faster than own kernels,
        which can be captured in a CUDA graph once it was run."""


class AttentionBackend(Protocol):
    """One way to compute partial attention without a window."""

    name: str

    @property
    def planned(self) -> Planned | None:
        """None where squares are those of own kernels, or are not to be captured."""

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        """Each span: as many keys as queries (or none of one); query i sees keys 0..i.

        Output float32 or as q.
        """

    def over_pool(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, slots: PoolSlots, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        """Each span: all its queries see all its keys, which lie in the pool's `slots`."""


# ---- dense: the reference, and the path for sliding windows -----------------------------------


def dense_attention(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    *,
    scale: float,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`softmax(scale * q k^T) v` in float32 with its log-sum-exp, for one span.

    With positions given, a query at p sees keys at positions p - window + 1 .. p (all of 0 .. p
    when window is None); without positions every query sees every key.
    """
    num_q, num_heads, head_dim = q_TNH.shape
    num_k, num_kv_heads = k_TKH.shape[:2]
    out = torch.zeros(num_q, num_heads, head_dim, dtype=torch.float32, device=q_TNH.device)
    lse = torch.full((num_q, num_heads), -torch.inf, dtype=torch.float32, device=q_TNH.device)
    if num_q == 0 or num_k == 0:
        return out, lse
    group = num_heads // num_kv_heads
    k_KHT = k_TKH.float().permute(1, 2, 0)
    v_KTH = v_TKH.float().transpose(0, 1)
    rows = max(1, _DENSE_SCORES // (num_heads * num_k))
    for lo in range(0, num_q, rows):
        hi = min(lo + rows, num_q)
        q_KGH = q_TNH[lo:hi].float().reshape(hi - lo, num_kv_heads, group, head_dim)
        q_KQH = q_KGH.permute(1, 0, 2, 3).reshape(num_kv_heads, -1, head_dim)
        scores = (q_KQH @ k_KHT) * scale
        if q_positions is not None and k_positions is not None:
            distance = q_positions[lo:hi, None] - k_positions[None, :]
            hidden = distance < 0
            if window is not None:
                hidden |= distance >= window
            scores.masked_fill_(hidden.repeat_interleave(group, 0)[None], -torch.inf)
        lse_KQ = torch.logsumexp(scores, -1)
        shift = torch.where(lse_KQ == -torch.inf, torch.zeros_like(lse_KQ), lse_KQ)
        part = torch.exp(scores - shift[..., None]) @ v_KTH
        shape = (num_kv_heads, hi - lo, group)
        out[lo:hi] = part.view(*shape, head_dim).transpose(0, 1).reshape(hi - lo, -1, head_dim)
        lse[lo:hi] = lse_KQ.view(shape).transpose(0, 1).reshape(hi - lo, -1)
    return out, lse


def windowed_attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans, *, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Sliding-window attention by the positions in `spans`, causal whatever the span's shape."""
    out, lse = _empty_state(q_TNH)
    assert spans.q_positions is not None
    assert spans.k_positions is not None
    for q0, q1, k0, k1 in spans.ranges:
        out[q0:q1], lse[q0:q1] = dense_attention(
            q_TNH[q0:q1],
            k_TKH[k0:k1],
            v_TKH[k0:k1],
            scale=scale,
            q_positions=spans.q_positions[q0:q1],
            k_positions=spans.k_positions[k0:k1],
            window=window,
        )
    return out, lse


def _empty_state(q_TNH: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.zeros(q_TNH.shape, dtype=torch.float32, device=q_TNH.device)
    lse = torch.full(q_TNH.shape[:2], -torch.inf, dtype=torch.float32, device=q_TNH.device)
    return out, lse


class DenseBackend:
    """Exact float32 on any device, span by span."""

    name = "dense"
    planned = None

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        out, lse = _empty_state(q_TNH)
        for q0, q1, k0, k1 in spans.ranges:
            order = torch.arange(q1 - q0, device=q_TNH.device)
            out[q0:q1], lse[q0:q1] = dense_attention(
                q_TNH[q0:q1],
                k_TKH[k0:k1],
                v_TKH[k0:k1],
                scale=self._scale,
                q_positions=order,
                k_positions=order,
            )
        return out, lse

    def over_pool(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, slots: PoolSlots, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        out, lse = _empty_state(q_TNH)
        for i, (q0, q1, _, _) in enumerate(spans.ranges):
            k, v = slots.rows(i, k_SKH), slots.rows(i, v_SKH)
            out[q0:q1], lse[q0:q1] = dense_attention(q_TNH[q0:q1], k, v, scale=self._scale)
        return out, lse


# ---- CPU --------------------------------------------------------------------------------------

_FEW_QUERIES = 4
"""Up to so many queries, half-precision attention is faster dense: torch's kernel takes 3.5 ms
for one query of 9 heads over 6,000 keys, the dense path 1.2 ms."""


class CpuFlashBackend:
    """torch's CPU flash attention, span by span; it returns the log-sum-exp and takes GQA."""

    name = "cpu-flash"
    planned = None

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        out, lse = _empty_state(q_TNH)
        for q0, q1, k0, k1 in spans.ranges:
            state = (out[q0:q1], lse[q0:q1])
            self._one(q_TNH[q0:q1], k_TKH[k0:k1], v_TKH[k0:k1], state, causal=True)
        return out, lse

    def over_pool(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, slots: PoolSlots, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        out, lse = _empty_state(q_TNH)
        for i, (q0, q1, _, _) in enumerate(spans.ranges):
            k, v = slots.rows(i, k_SKH), slots.rows(i, v_SKH)
            self._one(q_TNH[q0:q1], k, v, (out[q0:q1], lse[q0:q1]), causal=False)
        return out, lse

    def _one(
        self, q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor], *, causal: bool
    ) -> None:
        if len(q) == 0 or len(k) == 0:  # torch's kernel divides by zero on an empty span
            return
        if q.dtype != torch.float32 and len(q) <= _FEW_QUERIES and not causal:
            out, lse = dense_attention(q, k, v, scale=self._scale)
        else:
            out_1NTH, lse_1NT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                0.0,
                causal,
                scale=self._scale,
            )
            out, lse = out_1NTH[0].transpose(0, 1), lse_1NT[0].transpose(0, 1)
        state[0].copy_(out)
        state[1].copy_(lse)


# ---- CUDA -------------------------------------------------------------------------------------


class CudaFlashBackend:
    """torch's built-in variable-length flash attention; all spans in one launch."""

    name = "cuda-flash"
    planned = None

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def rehearsing(self) -> CudaFlashBackend:
        """As `kernels.libraries.Square.rehearsing`: nothing of it takes long."""
        return self

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        return self._varlen(q_TNH, k_TKH, v_TKH, spans, causal=True)

    def over_pool(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, slots: PoolSlots, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        k, v = k_SKH.index_select(0, slots.packed), v_SKH.index_select(0, slots.packed)
        return self._varlen(q_TNH, k, v, spans, causal=False)

    def _varlen(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        if len(q_TNH) == 0 or len(k_TKH) == 0:
            return _empty_state(q_TNH)
        out_TNH, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
            q_TNH,
            k_TKH,
            v_TKH,
            spans.cu_q,
            spans.cu_k,
            max(spans.q_lens),
            max(spans.k_lens),
            0.0,
            causal,
            False,
            scale=self._scale,
        )
        # Flash marks a query without keys by +inf; our empty state is -inf with output 0.
        lse_TN = lse_NT.transpose(0, 1).contiguous()
        if not all(spans.k_lens):
            lse_TN.masked_fill_(lse_TN == torch.inf, -torch.inf)
        return out_TNH.float(), lse_TN


def select_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, scale: float
) -> AttentionBackend:
    """The fastest backend that is right for the device, type and head size; chosen at start."""
    if device.type == "cpu":
        return CpuFlashBackend(scale)
    if head_dim > 256 or head_dim % 8:
        return DenseBackend(scale)
    if has_triton():
        # imported by name, because it imports triton, which a machine without a GPU may lack
        cuda = import_module("loongd.kernels.triton_backend")
        chosen: AttentionBackend = cuda.select_cuda_backend(device, dtype, head_dim, scale)
        return chosen
    if dtype in (torch.float16, torch.bfloat16):
        return CudaFlashBackend(scale)
    return DenseBackend(scale)
