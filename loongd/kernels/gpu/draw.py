"""Drawing a token for each row of logits: temperature, top-k, top-p, min-p; nothing on the host.

Knows: one row's token depends on that row's logits and parameters alone. A token's mass beside the
best token's is a whole number, in units of 2^-40, so that sums are the same in any order and in any
batch. Thresholds are exact: bisection over the bits of a logit, in the order of their values, or
over token ids. Does not know: where parameters come from, penalties, log-probabilities.

Rows with top-k or top-p look at their best logits first: those above a bound that some thousand
sampled logits suggest, gathered in any order. Where these do not hold all that is kept (a flat
distribution, a large top-k), one program bisects over the whole row.

Rows read their logits once for the best token and once for the masses; with top-k or top-p a
quarter of them more for the sample, and then what was gathered, 40 to 60 times, from L1 or L2. For
256 rows of 128,256 fp32 logits (131 MB, about 35 us of an H200 each time) that should be some 80 us
without filters and 130 us with them; a row alone, as long as its 4 to 7 launches take. Bisecting
over whole rows reads them 40 to 90 times: half a millisecond for one row, from L2, and about 2 ms
for 256, from memory.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from loongd.kernels.gpu.draw_kernels import (
    draw_filtered,
    draw_unfiltered,
    guess_bound,
    weigh_part,
)
from loongd.kernels.gpu.sampling import best_tokens

_BLOCK = 2048
"""Logits whose mass is summed at a time, and in which the drawn token is then looked for."""
_PROGRAMS = 1024
"""Programs that together keep enough loads in flight: 8 on each of an H200's 132 units."""
_SAMPLES = 4096
"""Most logits of a row that are sampled for the bound of the gathered ones."""
_CANDIDATES = 8192
"""Most logits of a row that are gathered."""
_AIM = 4096
"""Gathered logits that the bound aims at; how many there are varies by an eighth or so."""
_LEAST_AIM = 512
"""As `_AIM`, with a small top-k; the bound is then the 16th best sampled logit or so."""
_GREEDY_TEMPERATURE = 1e-5


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
    """A token for each row, int64 (B,), -1 where none can be drawn; see `kernels.sampling`."""
    rows, vocab = logits_BV.shape
    if rows == 0:
        return torch.empty(0, dtype=torch.int64, device=logits_BV.device)
    num_blocks = triton.cdiv(vocab, _BLOCK)
    part_len = triton.cdiv(num_blocks, min(num_blocks, triton.cdiv(_PROGRAMS, rows))) * _BLOCK
    new = logits_BV.new_empty
    tokens_B = new(rows, dtype=torch.int64)
    mass = new((rows, num_blocks), dtype=torch.int64)
    gathered_rows = rows if filtered else 0
    bound, count = (new(gathered_rows, dtype=torch.int32) for _ in range(2))
    room = (gathered_rows, _CANDIDATES)
    value, token = new(room, dtype=torch.float32), new(room, dtype=torch.int32)
    best_B = best_tokens(logits_BV)
    row = (logits_BV, best_B, temperature_B, top_k_B, top_p_B)
    stride = logits_BV.stride(0)
    sizes = {"BLOCK": _BLOCK, "num_warps": 4}
    blocks = triton.next_power_of_2(num_blocks)
    if filtered:
        step = triton.cdiv(vocab, _SAMPLES)
        guess_bound[(rows,)](
            *row, bound, count, stride, vocab, step, _AIM, _LEAST_AIM, _GREEDY_TEMPERATURE,
            BLOCK=_SAMPLES, num_warps=8,
        )  # fmt: skip
    weigh_part[(rows, triton.cdiv(vocab, part_len))](
        *row, min_p_B, mass, bound, count, value, token, stride, vocab, num_blocks, part_len,
        _GREEDY_TEMPERATURE, GATHER=filtered, CANDIDATES=_CANDIDATES, **sizes,
    )  # fmt: skip
    drawn = (min_p_B, uniform_B, mass)
    draw_unfiltered[(rows,)](
        *row, *drawn, tokens_B, stride, vocab, num_blocks, _GREEDY_TEMPERATURE,
        BLOCKS=blocks, **sizes,
    )  # fmt: skip
    if filtered:
        for gathered in (True, False):
            source, width = (value, _CANDIDATES) if gathered else (logits_BV, stride)
            draw_filtered[(rows,)](
                *row, *drawn, bound, count, source, token, tokens_B, stride, width, vocab,
                num_blocks, CANDIDATES=_CANDIDATES, GATHERED=gathered, BLOCKS=blocks,
                BLOCK=2048 if gathered else 8192, num_warps=8 if gathered else 16,
            )  # fmt: skip
    return tokens_B
