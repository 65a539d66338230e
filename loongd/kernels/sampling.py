"""The best token of each row: Triton on CUDA, plain torch elsewhere.

Knows: logits. Does not know: sampling parameters.
"""

from __future__ import annotations

from torch import Tensor

from loongd.kernels.dispatch import pick


def best_tokens(logits_BV: Tensor) -> Tensor:
    """Token of the largest logit of each row, int64 (B,); -1 where that logit is not finite or
    the row holds a NaN. Of equal logits the first on CUDA, any of them elsewhere.
    """
    tokens: Tensor = pick("sampling", logits_BV.device).best_tokens(logits_BV)
    return tokens
