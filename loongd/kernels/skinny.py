"""Matrix products of few rows, bound by reading the weights: Triton on CUDA, torch elsewhere.

Knows: up to how many rows the own kernels are faster than the library's, by shape and device.
Does not know: projections, layers.

Letters: M rows, D inputs, O outputs, F outputs of a gated product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongd.kernels.dispatch import pick
from loongd.kernels.division import Division

MOST_ROWS = 64
"""Rows of these products at most."""


def most_rows(weight_OD: Tensor, *, gated: bool = False) -> int:
    """Rows up to which `linear_of_few` (or, `gated`, `gated_linear_of_few`) is faster than
    torch's `linear` (and `silu_mul`) with these weights; 0 if never."""
    rows: int = pick("skinny", weight_OD.device).most_rows(weight_OD, gated=gated)
    return rows


def most_rows_added(weight_OD: Tensor) -> int:
    """Rows up to which `add_linear_of_few` is faster than the product and an addition with a norm;
    0 if never."""
    rows: int = pick("skinny", weight_OD.device).most_rows_added(weight_OD)
    return rows


def new_tickets(device: torch.device) -> Tensor:
    """What `linear_of_few` counts with. Calls with the same tickets follow each other in one
    stream; they are made outside of a graph's capture."""
    tickets: Tensor = pick("skinny", device).new_tickets(device)
    return tickets


def linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    tickets: Tensor,
    *,
    division: Division | None = None,
) -> Tensor:
    """y = x W^T + b, new, (M, O), in x's type, summed in float32. The sums undergo `division`.

    M is at most `MOST_ROWS`; W is contiguous.
    """
    gpu = pick("skinny", x_MD.device)
    y_MO: Tensor = gpu.linear_of_few(x_MD, weight_OD, bias_O, tickets, division=division)
    return y_MO


def gated_linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    *,
    division: Division | None = None,
) -> Tensor:
    """silu(x G^T + g) * (x U^T + u), new, (M, F): W is G above U (2F, D), b is (g, u)."""
    gpu = pick("skinny", x_MD.device)
    y_MF: Tensor = gpu.gated_linear_of_few(x_MD, weight_OD, bias_O, division=division)
    return y_MF


def add_linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    residual_MO: Tensor,
    norm_O: Tensor,
    eps: float,
    tickets: Tensor,
) -> tuple[Tensor, Division]:
    """`residual_MO += linear_of_few(x)` in place, to the same bits as `elementwise.add_rms_norm`;
    returns that times `norm_O` (M, O) and the division that makes it the norm."""
    gpu = pick("skinny", x_MD.device)
    added: tuple[Tensor, Division] = gpu.add_linear_of_few(
        x_MD, weight_OD, bias_O, residual_MO, norm_O, eps, tickets
    )
    return added
