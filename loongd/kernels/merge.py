"""Combining partial attention outputs by their log-sum-exps.

Knows: two partial results over disjoint keys make one result over their union.
Does not know: where partials come from, or serving.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_state_(out_TNH: Tensor, lse_TN: Tensor, part_TNH: Tensor, part_lse_TN: Tensor) -> None:
    """Merge a partial result into `out_TNH`, `lse_TN` in place; all float32.

    With `l = log(exp(l1) + exp(l2))` the result is `o1 * exp(l1 - l) + o2 * exp(l2 - l)`.
    A part over no key has `lse = -inf` and `out = 0` and changes nothing; two such parts give
    such a part again. Source: LoongServe section 4.2, flash-decoding.
    """
    merged = torch.logaddexp(lse_TN, part_lse_TN)
    # Where both are -inf the difference would be nan; any finite stand-in gives weight 0.
    safe = torch.where(merged == -torch.inf, torch.zeros_like(merged), merged)
    out_TNH.mul_(torch.exp(lse_TN - safe).unsqueeze(-1))
    out_TNH.addcmul_(part_TNH, torch.exp(part_lse_TN - safe).unsqueeze(-1))
    lse_TN.copy_(merged)
