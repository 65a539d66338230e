"""Matrix products of few rows: where they beat the library's, and their launches.

Knows: tiles by shape, measured on H200. All tensors of a call are of one type; W is contiguous.
Does not know: projections, layers.

Letters: M rows, D inputs, O outputs, F outputs of a gated product, P blocks of outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from loongd.kernels.division import Division
from loongd.kernels.gpu.early import early
from loongd.kernels.gpu.skinny_kernels import product_of_few
from loongd.kernels.skinny import MOST_ROWS

_LARGE = 6144 * 4096
"""Weights from which the own product is the faster one for up to `MOST_ROWS` rows, or as fast: what
follows an added product saves its norm besides."""
_MOST_BLOCKS = 64
"""Blocks of outputs of a product that is cut along its inputs."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of one launch. `splits` cuts the inputs; 1 for gated products."""

    block_m: int
    block_o: int
    block_d: int
    num_warps: int
    num_stages: int
    splits: int = 1


@lru_cache(maxsize=8)
def _is_measured(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def most_rows(weight_OD: Tensor, *, gated: bool = False) -> int:
    """Rows up to which the product is faster here than the library's; 0 if never."""
    if weight_OD.dtype == torch.float32 or not _is_measured(weight_OD.device):
        return 0
    return _threshold(*weight_OD.shape, gated=gated)


def most_rows_added(weight_OD: Tensor) -> int:
    """Rows up to which `add_linear_of_few` is faster than the product and an addition with a norm;
    0 if never. Not divided yet, a norm of float16 may pass that type's largest number, 65,504."""
    return MOST_ROWS if weight_OD.dtype == torch.bfloat16 and most_rows(weight_OD) else 0


def _threshold(num_outs: int, dim: int, *, gated: bool) -> int:
    """For W of so many rows and columns. Shapes under the smallest measured ones are left to the
    library: a shard's product is short, and there a launch counts for more."""
    if dim < 4096 or num_outs < (22016 if gated else 4096):
        return 0
    return MOST_ROWS if num_outs * dim >= _LARGE else 32


def tile_of(rows: int, num_outs: int, dtype: torch.dtype, *, gated: bool) -> Tile:
    """The tile for a product; `num_outs` counts the results of a gated one, half of W's rows."""
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if dtype == torch.float32:
        return Tile(block_m, 16, 32, 4, 2)
    if gated:
        return Tile(16, 64, 128, 4, 3) if block_m == 16 else Tile(block_m, 64, 64, 4, 4)
    blocks, splits = triton.cdiv(num_outs, 64), 1
    while splits < 4 and blocks * splits <= _MOST_BLOCKS:
        splits *= 2
    if block_m == 64:
        # no more programs than multiprocessors, or half of them with twice the outputs
        few = blocks * splits <= 128
        return Tile(64, 64, 128, 4, 5, splits) if few else Tile(64, 128, 128, 8, 4, splits)
    # programs that have a multiprocessor each, of some 130, may keep more of W in flight
    num_stages = 5 if block_m == 16 and blocks <= 128 else 4
    return Tile(block_m, 64, 128, 4, num_stages, splits)


def new_tickets(device: torch.device) -> Tensor:
    """Counters for `linear_of_few`: int32 zeros, and zeros again after each call. Calls with the
    same ones must follow each other in one stream."""
    return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)


def linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    tickets: Tensor,
    *,
    division: Division | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """y = x W^T + b (M, O), new, summed in float32; M <= `MOST_ROWS`. Never waits for the host."""
    y_MO = x_MD.new_empty(len(x_MD), len(weight_OD))
    _launch(x_MD, weight_OD, bias_O, y_MO, tickets, tile, division=division)
    return y_MO


def gated_linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    *,
    division: Division | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """silu(x G^T + g) * (x U^T + u), (M, F), of W = (G, U) with O = 2F rows and b = (g, u). As
    `linear_of_few`; nothing is rounded between the sums and the result."""
    y_MF = x_MD.new_empty(len(x_MD), len(weight_OD) // 2)
    _launch(x_MD, weight_OD, bias_O, y_MF, None, tile, division=division, gated=True)
    return y_MF


def add_linear_of_few(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    residual_MO: Tensor,
    norm_O: Tensor,
    eps: float,
    tickets: Tensor,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Division]:
    """`residual_MO += linear_of_few(x)` in place, rounded as by `elementwise.add_rms_norm`; returns
    the norm of that, times `norm_O` but not divided yet. Rows of `residual_MO` have no gaps."""
    (num_rows, num_outs), stride = residual_MO.shape, residual_MO.stride(1)
    assert stride == 1 or num_outs == 1
    if tile is None:
        tile = tile_of(num_rows, num_outs, x_MD.dtype, gated=False)
    y_MO = x_MD.new_empty(num_rows, num_outs)
    parts = triton.cdiv(num_outs, tile.block_o)
    squares_PM = x_MD.new_empty(parts, num_rows, dtype=torch.float32)
    stream = (residual_MO, norm_O, squares_PM)
    _launch(x_MD, weight_OD, bias_O, y_MO, tickets, tile, stream=stream)
    return y_MO, Division(squares_PM, eps)


def _launch(
    x_MD: Tensor,
    weight_OD: Tensor,
    bias_O: Tensor | None,
    y_MO: Tensor,
    tickets: Tensor | None,
    tile: Tile | None,
    *,
    gated: bool = False,
    division: Division | None = None,
    stream: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """`stream`: what is added to, the weight of its norm, and where sums of squares go."""
    (num_rows, dim), num_outs = x_MD.shape, y_MO.shape[1]
    assert num_rows <= MOST_ROWS
    assert weight_OD.is_contiguous()
    if num_rows == 0:
        return
    if x_MD.stride(1) != 1:
        x_MD = x_MD.contiguous()
    if tile is None:
        tile = tile_of(num_rows, num_outs, x_MD.dtype, gated=gated)
    blocks = triton.cdiv(num_outs, tile.block_o)
    parts = None
    if tile.splits > 1:
        assert tickets is not None
        assert blocks <= len(tickets)
        parts = x_MD.new_empty(tile.splits, num_rows, num_outs, dtype=torch.float32)
    residual_MO, norm_O, squares_PM = stream or (None, None, None)
    if division is not None:
        squares_PM = division.squares
    product_of_few[(blocks, tile.splits)](
        x_MD,
        weight_OD,
        bias_O,
        y_MO,
        parts,
        tickets,
        residual_MO,
        norm_O,
        squares_PM,
        division.eps if division is not None else 0.0,
        num_rows,
        num_outs,
        dim,
        x_MD.stride(0),
        residual_MO.stride(0) if residual_MO is not None else 0,
        BLOCK_M=tile.block_m,
        BLOCK_O=tile.block_o,
        BLOCK_D=tile.block_d,
        SPLITS=tile.splits,
        EVEN=dim % tile.block_d == 0,
        GATED=gated,
        HAS_BIAS=bias_O is not None,
        ADD=residual_MO is not None,
        NUM_PARTS=len(division.squares) if division is not None else 0,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **early(x_MD.device),
    )
