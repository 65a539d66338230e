"""Sums that no order of addition can change, and functions made of IEEE operations alone.

Knows: how to cut rows of floats onto a power-of-two grid so coarse that float64 holds every partial
sum of their products exactly (the splitting of Ozaki, Ogita, Oishi and Rump, Numerical Algorithms
59, 2012). Then a matrix product is a function of its two rows alone: its bits do not depend on
blocking, threads, batch, padding or device.
Does not know: layers, requests, where a row lies.

A row of K elements keeps `grid_bits(K)` bits below its largest element (20 for K = 4,096), rounded
to nearest; float32 rows are cut twice, so that they keep twice as many. A row with a NaN or an
infinity gives NaN, and harms no other row.

Letters: T rows of x, O rows of the weight, K summed dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

LOG2_E = 1.4426950408889634
_MOST_ELEMENTS = {"cpu": 1 << 16, "cuda": 1 << 25}
"""Elements of a weight made float64 at a time: what caches hold, or 256 MB."""
_EXP2_DEGREE = 10
"""Taylor's remainder on [-1/2, 1/2] is below 2^-42."""
_LARGEST_EXPONENT = 900
_HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
"""pi / 2 in parts; the first two have 33 bits, so that a whole number times one is exact."""


def num_slices(dtype: torch.dtype) -> int:
    """How often rows of this type are cut: float32 has more bits than one slice keeps."""
    return 2 if dtype == torch.float32 else 1


def grid_bits(num_summed: int) -> int:
    """Bits below the largest element so that products of two slices sum exactly in float64."""
    return (53 - math.ceil(math.log2(max(num_summed, 1)))) // 2


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent (whole numbers of any type) as float64, exact; held within the normal range."""
    biased = exponent.clamp(-1022, 1023).long().add_(1023)
    return biased.bitwise_left_shift_(52).view(torch.float64)


def row_largest(x: Tensor) -> Tensor:
    """The largest |x| of each row (last dimension, kept); NaN or infinite if any of them is."""
    return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))


def exponent_above(largest: Tensor) -> Tensor:
    """The least e with x < 2^e; 0 for 0, any number for what is not finite."""
    return torch.frexp(largest).exponent.clamp_(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)


def cut(x: Tensor, bits: int, count: int, *, out: Tensor | None = None) -> list[Tensor]:
    """The `count` leading slices of each row as float64; all on the grid of their row.

    Slice i holds multiples of 2^(e - (i + 1) bits), |x| < 2^e; their sum is x but for what is left
    below the last grid. A row that is not finite becomes NaN. `out` is (count, *x.shape).
    """
    if out is None:
        out = torch.empty((count, *x.shape), dtype=torch.float64, device=x.device)
    largest = row_largest(x).double()
    # adding and taking away a number whose last place is worth the grid rounds to the grid
    large = power_of_two(exponent_above(largest) + (52 - bits)).mul_(1.5)
    large += largest * 0.0  # NaN where it is not finite
    *parts, last = out.unbind(0)
    rest = x
    for part in parts:
        torch.add(rest, large, out=part).sub_(large)
        rest = torch.sub(rest, part, out=last)
        large = large * 2.0**-bits
    torch.add(rest, large, out=last).sub_(large)
    return [*parts, last]


def products(a_TK: Sequence[Tensor], b_OK: Sequence[Tensor]) -> Tensor:
    """(..., T, O) float64 products of all rows of `a` and `b`, both as `cut` gives them.

    Each matrix product is exact; the two small ones of two slices are added exactly as well.
    """
    high_TO = a_TK[0] @ b_OK[0].transpose(-1, -2)
    if len(a_TK) == 1:
        return high_TO
    low_TO = a_TK[0] @ b_OK[1].transpose(-1, -2)
    low_TO += a_TK[1] @ b_OK[0].transpose(-1, -2)
    return high_TO.add_(low_TO)


def linear(x_TK: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`x weight^T + bias` as float64 (T, O); the weight passes through float64 in pieces."""
    num_outputs, num_summed = weight_OK.shape
    bits, count = grid_bits(num_summed), num_slices(x_TK.dtype)
    x_slices = cut(x_TK, bits, count)
    y_TO = torch.empty((len(x_TK), num_outputs), dtype=torch.float64, device=x_TK.device)
    rows = min(max(1, _MOST_ELEMENTS[x_TK.device.type] // num_summed), num_outputs)
    # one scratch for all pieces: fresh memory costs more than the arithmetic on it
    scratch = torch.empty((count, rows, num_summed), dtype=torch.float64, device=x_TK.device)
    for first in range(0, num_outputs, rows):
        piece_RK = weight_OK[first : first + rows]
        w_slices = cut(piece_RK, bits, count, out=scratch[:, : len(piece_RK)])
        y_TO[:, first : first + rows] = products(x_slices, w_slices)
    return y_TO if bias_O is None else y_TO.add_(bias_O.double())


def mean_square(x: Tensor) -> Tensor:
    """Mean of the squares over the last dimension (kept), float64."""
    num_summed = x.shape[-1]
    slices = cut(x, grid_bits(num_summed), num_slices(x.dtype))
    total = slices[0].square().sum(-1, keepdim=True)
    if len(slices) > 1:
        total += (slices[0] * slices[1]).sum(-1, keepdim=True).mul_(2.0)
    return total.div_(num_summed)


def exp2_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, n) with 2^x = m 2^n: whole n nearest to x (as float64), m in [0.7, 1.5). float64.

    Multiplications and additions, each rounded on its own, so that an element's bits depend on
    nothing beside it; torch's own exp2 rounds differently at the end of a tensor.
    """
    whole = x.round()
    fraction = x - whole
    coefficients = [1.0]
    for k in range(1, _EXP2_DEGREE + 1):
        coefficients.append(coefficients[-1] * 0.6931471805599453 / k)
    return _polynomial(fraction, coefficients), whole


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), float64."""
    x = x.double()
    mantissa, exponent = exp2_parts((-x * LOG2_E).clamp_(-1000.0, 1000.0))
    return x / mantissa.mul_(power_of_two(exponent)).add_(1.0)


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float64; absolute error below 2^-45 for angles up to 2^20."""
    x = angles.double()
    quarters = (x * (2.0 / math.pi)).round_()
    for part in _HALF_PI:
        x = x - quarters * part
    square = x * x
    cosine = _polynomial(square, _factorial_series(0))
    sine = _polynomial(square, _factorial_series(1)).mul_(x)
    turn = quarters.long()
    odd = (turn & 1).bool()
    return (
        torch.where(odd, sine, cosine).mul_(1 - ((turn + 1) & 2)),
        torch.where(odd, cosine, sine).mul_(1 - (turn & 2)),
    )


def _factorial_series(first: int) -> list[float]:
    """(-1)^k / (2 k + first)! for enough k that the rest is nothing on [-pi/4, pi/4]."""
    return [(-1.0) ** k / math.factorial(2 * k + first) for k in range(10)]


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """The sum of c_k x^k by Horner's rule, each operation rounded on its own."""
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result.mul_(x).add_(coefficient)
    return result
