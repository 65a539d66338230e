"""The best token of each row.

Knows: logits. Does not know: sampling parameters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def best_of_block(logits_ptr, value_ptr, index_ptr, stride_b, vocab, BLOCK: tl.constexpr):
    """The best of BLOCK logits of a row, the first of equals; NaN counts as +inf."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride_b + v, mask=v < vocab, other=float("-inf"))
    x = x.to(tl.float32)
    x = tl.where(x != x, float("inf"), x)  # noqa: PLR0124 (NaN)
    best = tl.max(x, 0)
    index = tl.min(tl.where(x == best, v, 2147483647), 0)
    at = row * tl.num_programs(1) + block
    tl.store(value_ptr + at, best)
    tl.store(index_ptr + at, index)


@triton.jit
def best_of_row(value_ptr, index_ptr, token_ptr, num_blocks, BLOCK: tl.constexpr):
    """The best of a row's blocks, -1 when it is infinite."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    mask = at < num_blocks
    x = tl.load(value_ptr + row * num_blocks + at, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + row * num_blocks + at, mask=mask, other=2147483647)
    best = tl.max(x, 0)
    token = tl.min(tl.where(x == best, index, 2147483647), 0)
    finite = (best < float("inf")) & (best > float("-inf"))
    tl.store(token_ptr + row, tl.where(finite, token, -1).to(tl.int64))


def best_tokens(logits_BV: Tensor) -> Tensor:
    """Token of the largest logit of each row (the first of equals), int64 (B,).

    -1 where that logit is not finite or the row holds a NaN.
    """
    rows, vocab = logits_BV.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits_BV.device)
    if rows == 0:
        return tokens
    blocks = triton.cdiv(vocab, _BLOCK)
    value = torch.empty((rows, blocks), dtype=torch.float32, device=logits_BV.device)
    index = torch.empty((rows, blocks), dtype=torch.int32, device=logits_BV.device)
    best_of_block[(rows, blocks)](
        logits_BV, value, index, logits_BV.stride(0), vocab, BLOCK=_BLOCK, num_warps=4
    )
    best_of_row[(rows,)](
        value, index, tokens, blocks, BLOCK=triton.next_power_of_2(blocks), num_warps=1
    )
    return tokens
