"""Combining partial attention outputs by their log-sum-exps.

Knows: two partial results over disjoint keys make one result over their union.
Does not know: where partials come from, or serving.
"""

from __future__ import annotations

from torch import Tensor

from loongd.kernels.dispatch import pick


def merge_state_(out_TNH: Tensor, lse_TN: Tensor, part_TNH: Tensor, part_lse_TN: Tensor) -> None:
    """Merge a partial result into `out_TNH`, `lse_TN` in place; all float32.

    With `l = log(exp(l1) + exp(l2))` the result is `o1 * exp(l1 - l) + o2 * exp(l2 - l)`.
    A part over no key has `lse = -inf` and `out = 0` and changes nothing; two such parts give
    such a part again. Source: LoongServe section 4.2, flash-decoding.
    """
    pick("merge", out_TNH.device).merge_state_(out_TNH, lse_TN, part_TNH, part_lse_TN)
