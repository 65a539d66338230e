"""The attention backend of CUDA devices: own kernels, and the best library for what is large.

Knows: which kernel suits which numbers of queries and keys. Does not know: serving.

Few queries a span go to `split_kv`, more to `extend`; squares and long pieces of the pool go to a
library where one works, merged into what `extend` makes of the odd rows and keys at their ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from loongd.kernels import cudnn
from loongd.kernels.attention import CudaFlashBackend, Planned, PoolSlots, Spans
from loongd.kernels.flash import find_flash_2, find_flash_3
from loongd.kernels.gpu.attend import MAX_DECODE_ROWS, extend, split_kv
from loongd.kernels.gpu.merge import merge_state_
from loongd.kernels.libraries import Cudnn, Cut, Pieces, Square

Range = tuple[int, int, int, int]
"""First query, end, first key, end."""


class TritonBackend:
    """Own kernels for the pool, but for pieces that `pieces` takes; squares by `square` if given,
    else by own kernels too."""

    def __init__(
        self, scale: float, square: Square | None = None, pieces: Pieces | None = None
    ) -> None:
        self._scale = scale
        self._square = square
        self._pieces = pieces
        self.planned: Planned | None = None if square is None else square.planned
        self.name = "triton" if square is None else f"triton+{square.name}"

    def rehearsing(self) -> TritonBackend:
        """One that launches the same own kernels, but calls no library: these take long to plan,
        once a thread, and leave results as they were in memory."""
        square, pieces = self._square, self._pieces
        return TritonBackend(
            self._scale,
            None if square is None else square.rehearsing(),
            None if pieces is None else pieces.rehearsing(),
        )

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        if self._square is not None:
            return self._square.square_causal(q_TNH, k_TKH, v_TKH, spans)
        packed = (q_TNH, k_TKH, v_TKH, None, spans.ranges)
        state = _empty_state(q_TNH, q_TNH.dtype)
        extend(*packed, scale=self._scale, causal=True, out=state)
        return state

    def over_pool(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, slots: PoolSlots, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        heads = (q_TNH.shape[1], k_SKH.shape[1])
        group = heads[0] // heads[1]
        longest = max(spans.q_lens, default=0)
        if longest * group <= MAX_DECODE_ROWS:
            cu_q = None if set(spans.q_lens) == {1} else spans.cu_q
            pool = (k_SKH, v_SKH, slots.packed)
            return split_kv(
                q_TNH, *pool, cu_q, spans.cu_k, scale=self._scale, max_q=max(longest, 1)
            )
        state = _empty_state(q_TNH, torch.float32)
        few: list[Range] = []
        many: list[Range] = []
        shared: list[_Shared] = []
        for i, one in enumerate(spans.ranges):
            q0, q1, k0, k1 = one
            if (q1 - q0) * group <= MAX_DECODE_ROWS:
                few.append(one)
                continue
            cut = None
            if self._pieces is not None:
                cut = self._pieces.cut(q1 - q0, k1 - k0, heads, partial(slots.is_run, i))
            if cut is None:
                many.append(one)
            else:
                span = _Shared(i, one, cut)
                shared.append(span)
                many.extend(span.rest())
        for ranges in (few, many):
            if ranges:
                pool = (k_SKH, v_SKH, slots.packed)
                extend(q_TNH, *pool, tuple(ranges), scale=self._scale, out=state)
        for span in shared:
            self._by_library(q_TNH, k_SKH, v_SKH, slots, span, state)
        return state

    def _by_library(
        self,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        slots: PoolSlots,
        span: _Shared,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """What the library takes of a span, added to what `state` has of its rows."""
        assert self._pieces is not None
        queries = list(span.query_pieces(q_TNH))
        _, _, k0, k1 = span.range
        begun = span.end_of_keys < k1
        for first, end in _ranges(k0, span.cut.keys):
            run = slots.run(span.number, first - k0, end - k0)
            if run is not None:
                k, v = k_SKH[slice(*run)], v_SKH[slice(*run)]
            else:
                at = slots.packed[first:end]
                k, v = k_SKH.index_select(0, at), v_SKH.index_select(0, at)
            for piece in queries:
                found = self._pieces.attention(piece.q, k, v, causal=False)
                part, part_lse = (x[: piece.end - piece.first] for x in found)
                out, lse = (x[piece.first : piece.end] for x in state)
                if begun:
                    merge_state_(out, lse, part, part_lse)
                else:
                    out.copy_(part)
                    lse.copy_(part_lse)
            begun = True


@dataclass(frozen=True, slots=True)
class _Queries:
    """As many rows as the library takes at a time: of the packed queries those from `first` to
    `end`, and behind them rows whose results are dropped."""

    q: Tensor
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class _Shared:
    """A span that a library and own kernels share."""

    number: int
    range: Range
    cut: Cut

    @property
    def end_of_queries(self) -> int:
        """Behind the last one that the library takes."""
        q0, q1, _, _ = self.range
        return min(q0 + sum(self.cut.queries), q1)

    @property
    def end_of_keys(self) -> int:
        """The same."""
        return self.range[2] + sum(self.cut.keys)

    def rest(self) -> list[Range]:
        """What the library leaves: the last keys for its queries; the last queries."""
        q0, q1, k0, k1 = self.range
        mid, done = self.end_of_queries, self.end_of_keys
        parts = ((q0, mid, done, k1), (mid, q1, k0, k1))
        return [part for part in parts if part[0] < part[1] and part[2] < part[3]]

    def query_pieces(self, q_TNH: Tensor) -> Iterator[_Queries]:
        """Of the packed queries; the last one padded where it must be."""
        for first, wanted in _ranges(self.range[0], self.cut.queries):
            end = min(wanted, self.end_of_queries)
            rows_TNH = q_TNH[first:end]
            if end < wanted:
                rows_TNH = pad(rows_TNH, (0, 0, 0, 0, 0, wanted - end))
            yield _Queries(rows_TNH, first, end)


def _ranges(start: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Consecutive ranges of these sizes."""
    return pairwise(accumulate(sizes, initial=start))


def _empty_state(q_TNH: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Not initialised: every row of every span is written, if only with "no key"."""
    out = torch.empty(q_TNH.shape, dtype=dtype, device=q_TNH.device)
    return out, torch.empty(q_TNH.shape[:2], dtype=torch.float32, device=q_TNH.device)


def select_cuda_backend(
    device: torch.device, dtype: torch.dtype, head_dim: int, scale: float
) -> TritonBackend:
    """Own kernels with the fastest library that works here: flash-attn 3, cuDNN, and for squares
    alone flash-attn 2 or, before Hopper, torch's flash. float32 is own kernels alone, without
    tensor cores: exact."""
    if dtype == torch.float32:
        return TritonBackend(scale)
    third = find_flash_3(device, dtype, head_dim, scale)
    if third is not None:
        return TritonBackend(scale, third, third)
    if cudnn.is_available(device, dtype, head_dim):
        library = Cudnn(scale, dtype)
        return TritonBackend(scale, library, library)
    second = find_flash_2(device, dtype, head_dim, scale)
    if second is None and torch.cuda.get_device_capability(device) < (9, 0):
        return TritonBackend(scale, CudaFlashBackend(scale))
    return TritonBackend(scale, second)
