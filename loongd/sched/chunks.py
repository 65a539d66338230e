"""How much of a long prefill one step computes, so that others never wait long for their turn.

Knows: the arithmetic of chunks, from the SIB. Does not know: who waits, where anything is.

A chunk is the most tokens whose step is predicted to take no more than the bound; what is left is
dealt into equal chunks, so that no tiny one remains. Each chunk costs the step's fixed time again;
where that would be more than half of the bound, the chunk is as long as twice the fixed time.
"""

from __future__ import annotations

from math import sqrt

from loongd.sched.sib import Coefficients, Sib


def largest_chunk(coefficients: Coefficients, *, cached: int, bound_s: float) -> int:
    """The most new tokens after `cached` ones in a step of `bound_s` seconds; at least 1."""
    fixed_s = coefficients.alpha_s + coefficients.item_s
    free_s = max(bound_s, 2 * fixed_s, coefficients.floor_s) - fixed_s
    linear, square = coefficients.beta_s + 2 * coefficients.gamma_s * cached, coefficients.gamma_s
    if square == 0.0:
        most = free_s / linear if linear > 0.0 else float(1 << 40)
    else:
        # The root of square * n^2 + linear * n = free, in the form that loses no digits.
        most = 2 * free_s / (linear + sqrt(linear * linear + 4 * square * free_s))
    return max(1, int(most))


def next_chunk(sib: Sib, dop: int, *, cached: int, left: int, bound_s: float) -> int:
    """New tokens of the next chunk of a prefill that has `left` tokens to go."""
    most = largest_chunk(sib.prefill_coefficients(dop), cached=cached, bound_s=bound_s)
    return -(-left // -(-left // most))


def left_s(sib: Sib, dop: int, *, cached: int, left: int, bound_s: float) -> float:
    """Predicted seconds until a prefill is done on `dop` instances alone, in chunks."""
    coefficients = sib.prefill_coefficients(dop)
    once_s = coefficients.time_s([(cached, left)])
    fixed_s = coefficients.alpha_s + coefficients.item_s
    return once_s + fixed_s * int(once_s / max(bound_s, 2 * fixed_s, 1e-9))
