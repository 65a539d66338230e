"""The attention backend of CUDA devices: own kernels, and the best library for large squares.

Knows: which kernel suits which numbers of queries and keys. Does not know: serving.

Few queries a span go to `split_kv`, more to `extend`; long squares and long pieces of the pool go
to cuDNN where it works, merged into what `extend` makes of the odd rows and keys at their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from loongd.kernels import cudnn
from loongd.kernels.attention import CudaFlashBackend, Planned, PoolSlots, Spans
from loongd.kernels.gpu.attend import MAX_DECODE_ROWS, extend, split_kv
from loongd.kernels.gpu.merge import merge_state_
from loongd.kernels.spare import with_spare

Range = tuple[int, int, int, int]
"""First query, end, first key, end."""


class Square(Protocol):
    """A library's causal attention of packed squares."""

    name: str

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        """As `AttentionBackend.square_causal`."""


class FlashAttn:
    """The flash-attn package, when it can be imported: version 3's interface, or version 2's."""

    def __init__(self, scale: float, module: str) -> None:
        self._scale = scale
        self._varlen: Callable[..., tuple[Tensor, ...]] = import_module(
            module
        ).flash_attn_varlen_func
        self.name = "flash-attn-3" if module == "flash_attn_interface" else "flash-attn"

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        longest = max(spans.q_lens, default=0)
        if longest == 0:
            return _empty_state(q_TNH, q_TNH.dtype)
        out_TNH, lse_NT, *_ = self._varlen(
            q_TNH,
            k_TKH,
            v_TKH,
            spans.cu_q,
            spans.cu_k,
            longest,
            longest,
            softmax_scale=self._scale,
            causal=True,
            return_attn_probs=True,
        )
        lse_TN = lse_NT.transpose(0, 1).contiguous()
        if not all(spans.k_lens):  # some versions mark a query without keys by +inf
            lse_TN.masked_fill_(lse_TN == torch.inf, -torch.inf)
        return out_TNH, lse_TN


class TritonBackend:
    """Own kernels for the pool; squares by `square` if given, else by cuDNN, else by Triton."""

    def __init__(
        self,
        scale: float,
        *,
        square: Square | None = None,
        use_cudnn: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        rehearses: bool = False,
    ) -> None:
        """With `rehearses` no library is called: that leaves results as they were in memory."""
        self._scale = scale
        self._dtype = dtype
        self._square = square
        self._use_cudnn = use_cudnn
        self._rehearses = rehearses
        self.planned: Planned | None = None
        if use_cudnn:
            self.planned = cudnn.Plans(scale, dtype, square is None, rehearses)
        parts = ["triton"]
        if use_cudnn:
            parts.append("cudnn")
        if square is not None:
            parts.append(square.name)
        self.name = "+".join(parts)

    def rehearsing(self) -> TritonBackend:
        """One that launches the same own kernels, but calls no library: these take long to plan,
        once a thread."""
        return TritonBackend(
            self._scale,
            square=self._square,
            use_cudnn=self._use_cudnn,
            dtype=self._dtype,
            rehearses=True,
        )

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        if self._square is not None:
            if self._rehearses:
                return _empty_state(q_TNH, q_TNH.dtype)
            return self._square.square_causal(q_TNH, k_TKH, v_TKH, spans)
        if spans.spare:
            wide = (with_spare(x, spans.spare) for x in (q_TNH, k_TKH, v_TKH))
            out, lse = self._library(*wide, causal=True)
            return out[: len(q_TNH)], lse[: len(q_TNH)]
        alone = len(spans.ranges) == 1
        least = cudnn.LEAST_SQUARE if alone else cudnn.LEAST_SQUARE_OF_MANY
        out, lse = _empty_state(q_TNH, q_TNH.dtype)
        rest: list[Range] = []
        for q0, q1, k0, k1 in spans.ranges:
            main = cudnn.aligned(q1 - q0, least) if self._use_cudnn else 0
            if main:
                q, k, v = q_TNH[q0 : q0 + main], k_TKH[k0 : k0 + main], v_TKH[k0 : k0 + main]
                part, part_lse = self._library(q, k, v, causal=True)
                if alone and main == len(q_TNH):
                    return part, part_lse
                out[q0 : q0 + main] = part
                lse[q0 : q0 + main] = part_lse
            if q0 + main < q1:
                rest.append((q0 + main, q1, k0, k1))
        if rest:
            ranges = tuple(rest)
            state = (out, lse)
            extend(q_TNH, k_TKH, v_TKH, None, ranges, scale=self._scale, causal=True, out=state)
        return out, lse

    def over_pool(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, slots: PoolSlots, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        group = q_TNH.shape[1] // k_SKH.shape[1]
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
        long: list[int] = []
        for i, one in enumerate(spans.ranges):
            if self._is_long(one):
                long.append(i)
                many.extend(_odd(one))
            elif (one[1] - one[0]) * group <= MAX_DECODE_ROWS:
                few.append(one)
            else:
                many.append(one)
        for ranges in (few, many):
            if ranges:
                pool = (k_SKH, v_SKH, slots.packed)
                extend(q_TNH, *pool, tuple(ranges), scale=self._scale, out=state)
        for i in long:
            self._long(q_TNH, k_SKH, v_SKH, slots, i, spans.ranges[i], state)
        return state

    def _library(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        if not self._rehearses:
            return cudnn.attention(q_TNH, k_TKH, v_TKH, scale=self._scale, causal=causal)
        out_TNH, lse_TN = _empty_state(q_TNH, q_TNH.dtype)
        # by head, as cuDNN leaves them
        return out_TNH, lse_TN.view(lse_TN.shape[1], -1).transpose(0, 1)

    def _is_long(self, one: Range) -> bool:
        q0, q1, k0, k1 = one
        enough = q1 - q0 >= cudnn.LEAST_QUERIES and k1 - k0 >= cudnn.KEY_SIZES[-1]
        return self._use_cudnn and enough

    def _long(
        self,
        q_TNH: Tensor,
        k_SKH: Tensor,
        v_SKH: Tensor,
        slots: PoolSlots,
        span: int,
        one: Range,
        state: tuple[Tensor, Tensor],
    ) -> None:
        """All but the odd rows and keys of a long span, added to what `state` has of its rows."""
        q0, q1, k0, k1 = one
        queries = _query_pieces(q_TNH, q0, q0 + cudnn.query_rows(q1 - q0))
        begun = (k1 - k0) % cudnn.KEY_SIZES[-1] > 0
        for first, end in _ranges(k0, cudnn.pieces(k1 - k0, cudnn.KEY_SIZES)):
            run = slots.run(span, first - k0, end - k0)
            if run is not None:
                k, v = k_SKH[slice(*run)], v_SKH[slice(*run)]
            else:
                at = slots.packed[first:end]
                k, v = k_SKH.index_select(0, at), v_SKH.index_select(0, at)
            for piece in queries:
                found = self._library(piece.q, k, v, causal=False)
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
    """As many rows as the library is planned for: of the packed queries those from `first` to
    `end`, and behind them rows whose results are dropped."""

    q: Tensor
    first: int
    end: int


def _query_pieces(q_TNH: Tensor, first: int, end: int) -> list[_Queries]:
    """All of these queries in pieces, the last one padded where it must be."""
    sizes = cudnn.pieces(end - first, cudnn.QUERY_SIZES)
    found = [_Queries(q_TNH[low:high], low, high) for low, high in _ranges(first, sizes)]
    done = first + sum(sizes)
    if done < end:
        padding = cudnn.QUERY_SIZES[-1] - (end - done)
        found.append(_Queries(pad(q_TNH[done:end], (0, 0, 0, 0, 0, padding)), done, end))
    return found


def _odd(one: Range) -> list[Range]:
    """What the library leaves of a long span: the last keys for its queries; the last queries."""
    q0, q1, k0, k1 = one
    mid, done = q0 + cudnn.query_rows(q1 - q0), k1 - (k1 - k0) % cudnn.KEY_SIZES[-1]
    parts = ((q0, mid, done, k1), (mid, q1, k0, k1))
    return [part for part in parts if part[0] < part[1] and part[2] < part[3]]


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
    """Own kernels with the fastest squares that work here: flash-attn 3, cuDNN, flash-attn 2,
    torch's flash, Triton. float32 is Triton alone, without tensor cores: exact."""
    if dtype == torch.float32:
        return TritonBackend(scale)
    hopper = torch.cuda.get_device_capability(device) >= (9, 0)
    use_cudnn = cudnn.is_available(device, dtype, head_dim)
    square: Square | None = None
    if hopper and find_spec("flash_attn_interface") is not None:
        square = FlashAttn(scale, "flash_attn_interface")
    elif not use_cudnn and find_spec("flash_attn") is not None:
        square = FlashAttn(scale, "flash_attn")
    elif not use_cudnn and not hopper:
        square = CudaFlashBackend(scale)
    return TritonBackend(scale, square=square, use_cudnn=use_cudnn, dtype=dtype)
