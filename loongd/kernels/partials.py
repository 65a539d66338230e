"""The form in which partial attention results are kept, sent and merged.

Knows: `Partials`, what a member must be able to do with results over some of the keys, and
`FloatPartials`, the fast form: output and log-sum-exp in float32. `kernels.exact_attention` has
the form whose merges are exact.
Does not know: groups, transports, how a partial result is computed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from loongd.kernels.attention import Spans, windowed_attention
from loongd.kernels.merge import merge_state_


class Partials(Protocol):
    """Partial results of query rows: `out` (T, N, columns) and `top` (T, N), in one type."""

    dtype: torch.dtype
    capturable: bool
    """Whether the kernels that decode graphs are made of compute this form."""

    def columns(self, head_dim: int) -> int:
        """Columns of `out`."""

    def empty(self, q_TNH: Tensor) -> tuple[Tensor, Tensor]:
        """The result over no key."""

    def widened(self, out: Tensor) -> Tensor:
        """`out` in the type that merging writes, itself where it has it."""

    def merge_(self, out: Tensor, top: Tensor, part: Tensor, part_top: Tensor) -> None:
        """Merge a result over other keys into `out` and `top`, in place."""

    def result(self, out: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
        """The attention output (T, N, H) as `dtype`."""

    def windowed(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spans: Spans,
        *,
        scale: float,
        window: int,
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.attention.windowed_attention`, in this form."""


class FloatPartials:
    """Outputs and log-sum-exps, float32; a first part may have the type of the queries."""

    dtype = torch.float32
    capturable = True

    def columns(self, head_dim: int) -> int:
        return head_dim

    def empty(self, q_TNH: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.zeros(q_TNH.shape, dtype=torch.float32, device=q_TNH.device)
        return out, torch.full(q_TNH.shape[:2], -torch.inf, device=q_TNH.device)

    def widened(self, out: Tensor) -> Tensor:
        return out.float()

    def merge_(self, out: Tensor, top: Tensor, part: Tensor, part_top: Tensor) -> None:
        merge_state_(out, top, part, part_top)

    def result(self, out: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
        del top
        return out.to(dtype)

    def windowed(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spans: Spans,
        *,
        scale: float,
        window: int,
    ) -> tuple[Tensor, Tensor]:
        return windowed_attention(q_TNH, k_TKH, v_TKH, spans, scale=scale, window=window)
