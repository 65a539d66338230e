"""The best token of each row, and a drawn one: Triton on CUDA, plain torch elsewhere.

Knows: logits, temperature, top-k, top-p, min-p. Does not know: requests, penalties.
"""

from __future__ import annotations

from torch import Tensor

from loongd.kernels.dispatch import pick


def best_tokens(logits_BV: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Token of the largest logit of each row, int64 (B,); -1 where that logit is not finite or
    the row holds a NaN. Of equal logits the first on CUDA, any of them elsewhere. Written to `out`
    (contiguous) and returned; new without.
    """
    tokens: Tensor = pick("sampling", logits_BV.device).best_tokens(logits_BV, out=out)
    return tokens


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
    """A token for each row, int64 (B,), by inverse transform in the order of token ids.

    Top-k keeps the `top_k` best logits (0: all); top-p then the best that together have `top_p` of
    the mass that is left (1: all); min-p then those with at least `min_p` of the best one's mass.
    Logits equal to the last one kept are kept too. A temperature below 1e-5 takes the best token.
    -1 where the best logit is not finite or the row holds a NaN.

    Where a sum falls within rounding of a bound, the next token may be drawn on another device.
    On CUDA nothing waits for the device.

    Args:
        logits_BV: fp32, bf16 or fp16, the last dimension contiguous; -inf is never drawn.
        temperature_B: this and the others are float64, contiguous, on the device of the logits.
        top_k_B: whole numbers.
        top_p_B: in (0, 1].
        min_p_B: in [0, 1].
        uniform_B: random numbers in [0, 1).
        filtered: whether any row may have top-k or top-p on; without, three launches are saved.
    """
    parameters = (temperature_B, top_k_B, top_p_B, min_p_B, uniform_B)
    kernels = pick("draw", logits_BV.device)
    tokens: Tensor = kernels.draw_tokens(logits_BV, *parameters, filtered=filtered)
    return tokens
