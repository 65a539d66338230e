"""Matrix products of few rows, bound by reading the weights: Triton on CUDA, torch elsewhere.

Knows: up to how many rows the own kernels are faster than the library's, by shape and device.
Does not know: projections, layers.

Letters: M rows, D inputs, O outputs, F outputs of a gated product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongd.kernels.dispatch import pick

MOST_ROWS = 64
"""Rows of these products at most."""


def most_rows(weight_OD: Tensor, *, gated: bool = False) -> int:
    """Rows up to which `linear_of_few` (or, `gated`, `gated_linear_of_few`) is faster than
    torch's `linear` (and `silu_mul`) with these weights; 0 if never."""
    rows: int = pick("skinny", weight_OD.device).most_rows(weight_OD, gated=gated)
    return rows


def new_tickets(device: torch.device) -> Tensor:
    """What `linear_of_few` counts with. Calls with the same tickets follow each other in one
    stream; they are made outside of a graph's capture."""
    tickets: Tensor = pick("skinny", device).new_tickets(device)
    return tickets


def linear_of_few(
    x_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, tickets: Tensor
) -> Tensor:
    """y = x W^T + b, new, (M, O), in x's type, summed in float32.

    M is at most `MOST_ROWS`; W is contiguous.
    """
    gpu = pick("skinny", x_MD.device)
    y_MO: Tensor = gpu.linear_of_few(x_MD, weight_OD, bias_O, tickets)
    return y_MO


def gated_linear_of_few(x_MD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
    """silu(x G^T + g) * (x U^T + u), new, (M, F): W is G above U (2F, D), b is (g, u)."""
    y_MF: Tensor = pick("skinny", x_MD.device).gated_linear_of_few(x_MD, weight_OD, bias_O)
    return y_MF
