"""The best token of each row.

Knows: logits. Does not know: sampling parameters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from loongd.kernels.gpu.early import early, wait_for_ahead

_BLOCK = 1024
_PROGRAMS = 1024
"""Programs that together keep enough loads in flight: 8 on each of an H200's 132 units."""


@triton.jit
def best_of_part(
    logits_ptr,
    value_ptr,
    index_ptr,
    stride_b,
    vocab,
    part_len,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The best of `part_len` logits of a row, the first of equals; NaN counts as +inf.

    Each lane keeps its own best; they are compared once, at the end.
    """
    wait_for_ahead(EARLY)
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * part_len
    end = tl.minimum(first + part_len, vocab)
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = first + lane
    for start in range(first, end, BLOCK):
        v = start + lane
        x = tl.load(logits_ptr + row * stride_b + v, mask=v < end, other=float("-inf"))
        x = x.to(tl.float32)
        x = tl.where(x != x, float("inf"), x)  # noqa: PLR0124 (NaN)
        index = tl.where(x > best, v, index)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    at = row * tl.num_programs(1) + part
    tl.store(value_ptr + at, top)
    tl.store(index_ptr + at, tl.min(tl.where(best == top, index, 2147483647), 0))


@triton.jit
def best_of_row(
    value_ptr, index_ptr, token_ptr, num_parts, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """The best of a row's parts, -1 when it is infinite."""
    wait_for_ahead(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < num_parts
    x = tl.load(value_ptr + row * num_parts + at, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + row * num_parts + at, mask=mask, other=2147483647)
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, index, 2147483647), 0)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(token_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def best_tokens(logits_BV: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Token of the largest logit of each row (the first of equals), int64 (B,); into `out`, which
    is contiguous, or new.

    -1 where that logit is not finite or the row holds a NaN.
    """
    rows, vocab = logits_BV.shape
    tokens = out
    if tokens is None:
        tokens = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    if rows == 0:
        return tokens
    blocks = triton.cdiv(vocab, _BLOCK)
    part_len = triton.cdiv(blocks, min(blocks, triton.cdiv(_PROGRAMS, rows))) * _BLOCK
    parts = triton.cdiv(vocab, part_len)
    value = torch.empty((rows, parts), dtype=torch.float32, device=logits_BV.device)
    index = torch.empty((rows, parts), dtype=torch.int32, device=logits_BV.device)
    best_of_part[(rows, parts)](
        logits_BV,
        value,
        index,
        logits_BV.stride(0),
        vocab,
        part_len,
        BLOCK=_BLOCK,
        num_warps=4,
        **early(logits_BV.device),
    )
    best_of_row[(rows,)](
        value,
        index,
        tokens,
        parts,
        BLOCK=triton.next_power_of_2(parts),
        num_warps=1,
        **early(logits_BV.device),
    )
    return tokens
