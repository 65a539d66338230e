"""The libraries whose attention of large spans is faster than own kernels', and what they take.

Knows: cuDNN's squares and pieces. Does not know: the pool, how partial results are merged, and the
flash-attn package (`kernels.flash`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from loongd.kernels import cudnn
from loongd.kernels.attention import Planned, Spans
from loongd.kernels.gpu.attend import extend
from loongd.kernels.spare import with_spare


class Square(Protocol):
    """A library's causal attention of packed squares."""

    @property
    def name(self) -> str:
        """For people."""

    @property
    def planned(self) -> Planned | None:
        """As `AttentionBackend.planned`."""

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.square_causal`."""

    def rehearsing(self) -> Square:
        """One that computes nothing that takes long the first time, but gives results of the same
        sizes and strides."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Pieces of a span's queries and of its keys, from the first ones on. The last of the queries
    may be larger than what is left for it, and is padded then; keys are never more than there
    are."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


class Pieces(Protocol):
    """A library's attention of queries that all see all of some keys, and of how many."""

    def attention(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """One span: out_TNH in the type of q, lse_TN float32. Causal: as many keys as queries."""

    def cut(
        self, num_q: int, num_k: int, heads: tuple[int, int], in_run: Callable[[], bool]
    ) -> Cut | None:
        """What it takes of a span with so many heads of queries and keys, if anything. Keys whose
        slots are `in_run`, which takes a while to find out, are read where they lie, others
        copied."""

    def rehearsing(self) -> Pieces:
        """As `Square.rehearsing`."""


def state_by_head(q_TNH: Tensor) -> tuple[Tensor, Tensor]:
    """A state that is not initialised, its log-sum-exps by head, as libraries leave them."""
    by_head = q_TNH.new_empty((q_TNH.shape[1], len(q_TNH)), dtype=torch.float32)
    return q_TNH.new_empty(q_TNH.shape), by_head.transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Cudnn:
    """cuDNN: squares and pieces of the sizes that it is planned for. What is left of a square is
    done by own kernels here, what is left of pieces by the caller."""

    scale: float
    dtype: torch.dtype = torch.bfloat16
    rehearses: bool = False

    @property
    def name(self) -> str:
        return "cudnn"

    @property
    def planned(self) -> Planned:
        return cudnn.Plans(self.scale, self.dtype, self.rehearses)

    def rehearsing(self) -> Cudnn:
        return replace(self, rehearses=True)

    def attention(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        if self.rehearses:
            return state_by_head(q_TNH)
        return cudnn.attention(q_TNH, k_TKH, v_TKH, scale=self.scale, causal=causal)

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        if spans.spare:
            wide = (with_spare(x, spans.spare) for x in (q_TNH, k_TKH, v_TKH))
            out, lse = self.attention(*wide, causal=True)
            return out[: len(q_TNH)], lse[: len(q_TNH)]
        alone = len(spans.ranges) == 1
        least = cudnn.LEAST_SQUARE if alone else cudnn.LEAST_SQUARE_OF_MANY
        out = q_TNH.new_empty(q_TNH.shape)
        lse = q_TNH.new_empty(q_TNH.shape[:2], dtype=torch.float32)
        rest: list[tuple[int, int, int, int]] = []
        for q0, q1, k0, k1 in spans.ranges:
            main = cudnn.aligned(q1 - q0, least) if k0 < k1 else 0
            if main:
                q, k, v = q_TNH[q0 : q0 + main], k_TKH[k0 : k0 + main], v_TKH[k0 : k0 + main]
                part, part_lse = self.attention(q, k, v, causal=True)
                if alone and main == len(q_TNH):
                    return part, part_lse
                out[q0 : q0 + main] = part
                lse[q0 : q0 + main] = part_lse
            if q0 + main < q1:
                rest.append((q0 + main, q1, k0, k1))
        if rest:
            state = (out, lse)
            extend(q_TNH, k_TKH, v_TKH, None, tuple(rest), scale=self.scale, causal=True, out=state)
        return out, lse

    def cut(
        self, num_q: int, num_k: int, heads: tuple[int, int], in_run: Callable[[], bool]
    ) -> Cut | None:
        del heads, in_run
        rows = cudnn.query_rows(num_q)
        queries = cudnn.pieces(rows, cudnn.QUERY_SIZES)
        if sum(queries) < rows:
            queries.append(cudnn.QUERY_SIZES[-1])
        keys = cudnn.pieces(num_k, cudnn.KEY_SIZES)
        return Cut(tuple(queries), tuple(keys)) if queries and keys else None
