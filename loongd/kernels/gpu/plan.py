"""How attention launches are cut: tile sizes by type and head size, and the list of tiles.

Knows: what was measured best on H200 and what fits the shared memory of sm_80.
Does not know: the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_CPU_PROGRAMS = 6
"""Programs when there is no GPU (the interpreter): enough to split every list unevenly."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one launch.

    With `whole`, blocks of keys that all rows of a tile see are not asked which they do. A thread
    has `registers` at most (default: any number), where more programs fit at once so.
    """

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int
    merge_rows: int
    whole: bool = False
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class Merging:
    """Sizes of the launch that merges the shares of tiles: rows and parts at a time."""

    rows: int
    parts: int
    num_warps: int


def merging(tiling: Tiling, num_tiles: int, tile_rows: int) -> Merging:
    """For tiles of so many rows at most. Few tiles are cut into many shares, many into few. H200,
    merges alone: 64 spans of 1K take 3.4 us instead of 8.3 with 4 warps and 16 parts, which one
    span of 1K wants (2.9, 4.6). Many rows of tiles that are mostly whole, or padding, are looked at
    several at a time: 64 rows of 33 tiles and 32 heads one by one took 40 us."""
    if tiling.merge_rows > 1:
        return Merging(tiling.merge_rows, max(1, 16 // tiling.merge_rows), 4)
    if num_tiles <= 4:
        return Merging(1, 16, 4)
    if tile_rows > 8:
        return Merging(8, 2, 4)
    return Merging(1, 8, 2) if num_tiles <= 16 else Merging(1, 4, 1)


@lru_cache(maxsize=8)
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _programs(device: torch.device, per_multiprocessor: int) -> int:
    return _multiprocessors(device) * per_multiprocessor or _CPU_PROGRAMS


def decode_tiling(
    device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, *, has_slots: bool = True
) -> Tiling:
    """For spans of few rows: bound by memory, so many bytes in flight and small tiles."""
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if dtype == torch.float32:
        return Tiling(block_m, 32, 4, 2, _programs(device, 2), 1)
    # five stages are two buffers each of K and V when the slots' load takes the others
    num_stages = 5 if has_slots else 3
    if head_dim <= 128 and block_m == 16:
        # more programs than fit at once cost 25 %: three do, of 128 threads with 168 registers
        return Tiling(block_m, 32, 4, num_stages, _programs(device, 3), 1, registers=168)
    block_k = 64 if head_dim <= 128 else 32
    return Tiling(block_m, block_k, 4, num_stages, _programs(device, 2), 1)


def extend_tiling(
    device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, *, has_slots: bool = True
) -> Tiling:
    """For spans of many rows: bound by the matrix units, so large tiles."""
    if dtype == torch.float32:
        return Tiling(16 if rows <= 16 else 32, 32, 4, 2, _programs(device, 2), 16)
    if rows <= 64:
        return decode_tiling(device, dtype, head_dim, rows, has_slots=has_slots)
    if head_dim <= 128 and not has_slots and rows <= 512:
        # many short squares: two programs hide each other's beginnings and ends
        return Tiling(64, 64, 4, 3, _programs(device, 2), 16)
    if head_dim > 128:
        return Tiling(128, 32, 8, 3 if has_slots else 2, _programs(device, 1), 16)
    # H200, rows over the pool: 404 to 434 TFLOP/s, without `whole` 336 to 359; two programs of at
    # most 128 registers a thread do 412 to 440. A square of 5,003: 340 with two, 333 with one
    if has_slots:
        return Tiling(128, 64, 8, 5, _programs(device, 1), 16, whole=True)
    return Tiling(128, 64, 8, 3, _programs(device, 2), 16, whole=True)


@lru_cache(maxsize=16)
def plan_tiles(
    ranges: tuple[tuple[int, int, int, int], ...],
    group: int,
    block_m: int,
    block_k: int,
    causal: bool,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """The tiles of all spans and the flat list of their key blocks, on the device.

    Cached, because all layers of a step ask for the same list.

    Returns:
        tiles: (T, 5) int32: first query, number of queries, first key, number of keys, first row.
        ends: (T + 1) int32: key blocks before each tile; the last entry is all of them.
    """
    tiles, ends = tile_table(ranges, group, block_m, block_k, causal=causal)
    return torch.from_numpy(tiles).to(device), torch.from_numpy(ends).to(device)


def tile_table(
    ranges: Sequence[tuple[int, int, int, int]],
    group: int,
    block_m: int,
    block_k: int,
    *,
    causal: bool,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """As `plan_tiles`, on the host."""
    q_begin, q_end, k_begin, k_end = np.array(ranges, np.int64).reshape(-1, 4).T
    num_q, num_k = q_end - q_begin, k_end - k_begin
    num_tiles = -(-num_q * group // block_m)
    span = np.repeat(np.arange(len(num_tiles)), num_tiles)
    rows = (np.arange(len(span)) - (np.cumsum(num_tiles) - num_tiles)[span]) * block_m
    keys = num_k[span]
    if causal:
        last_query = np.minimum((rows + block_m - 1) // group, num_q[span] - 1)
        keys = np.maximum(keys - num_q[span] + last_query + 1, 0)
    columns = (q_begin[span], num_q[span], k_begin[span], num_k[span], rows)
    ends = np.concatenate(([0], np.cumsum(-(-keys // block_k))))
    return np.stack(columns, axis=1).astype(np.int32), ends.astype(np.int32)
