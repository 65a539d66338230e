"""The half of a norm that a product can do after its sums.

norm(x) = x * weight / rms(x), and W norm(x) = (W (x * weight)) / rms(x): whoever writes x * weight
can leave the division to the product that reads it.

Letters: M rows, P parts of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Division:
    """Divides a product's sums by sqrt(mean(x^2) + eps), row by row, before biases are added."""

    squares: Tensor
    """(P, M): sums of x^2 over the parts of each row, fp32."""
    eps: float
