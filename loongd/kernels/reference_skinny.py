"""Torch twins of the products of few rows; see `kernels.reference`.

Knows: the library's products, which are the best ones where these run, so that none is few enough.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from loongd.kernels.division import Division
from loongd.kernels.reference import silu_mul


def most_rows(weight_OD: Tensor, *, gated: bool = False) -> int:
    """Never: the library's product is best here; see `kernels.gpu.skinny.most_rows`."""
    del weight_OD, gated
    return 0


def most_rows_added(weight_OD: Tensor) -> int:
    """Never; see `kernels.gpu.skinny.most_rows_added`."""
    del weight_OD
    return 0


def new_tickets(device: torch.device) -> Tensor:
    """None are needed; see `kernels.gpu.skinny.new_tickets`."""
    return torch.empty(0, dtype=torch.int32, device=device)


def linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    tickets: Tensor,
    *,
    division: Division | None = None,
    tile: Any = None,
) -> Tensor:
    """y = x W^T + b; see `kernels.gpu.skinny.linear_of_few`."""
    del tickets, tile
    if division is None:
        return functional.linear(x_MD, weight_OD, bias_O)
    mean_M = division.squares.sum(0) / x_MD.shape[1]
    y_MO = functional.linear(x_MD, weight_OD) * (mean_M + division.eps).rsqrt()[:, None]
    return (y_MO if bias_O is None else y_MO + bias_O).to(x_MD.dtype)


def gated_linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    *,
    division: Division | None = None,
    tile: Any = None,
) -> Tensor:
    """silu of the first half of the product, times the second; see `kernels.gpu.skinny`."""
    tickets = new_tickets(x_MD.device)
    both = linear_of_few(x_MD, weight_OD, bias_O, tickets, division=division, tile=tile)
    return silu_mul(*both.chunk(2, dim=-1))


def add_linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    residual_MO: Tensor,
    norm_O: Tensor,
    eps: float,
    tickets: Tensor,
    *,
    tile: Any = None,
) -> tuple[Tensor, Division]:
    """Adds to `residual_MO`; see `kernels.gpu.skinny.add_linear_of_few`."""
    residual_MO += linear_of_few(x_MD, weight_OD, bias_O, tickets, tile=tile)
    wide_MO = residual_MO if residual_MO.dtype == torch.float64 else residual_MO.float()
    return residual_MO * norm_O, Division(wide_MO.square().sum(1)[None], eps)
