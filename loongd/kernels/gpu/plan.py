"""How attention launches are cut: tile sizes by type and head size, and the list of tiles.

Knows: what was measured best on H200 and what fits the shared memory of sm_80.
Does not know: the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

_CPU_PROGRAMS = 6
"""Programs when there is no GPU (the interpreter): enough to split every list unevenly."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one launch."""

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int
    merge_rows: int


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
        # more programs than fit at once cost 25 %: three do
        return Tiling(block_m, 32, 4, num_stages, _programs(device, 3), 1)
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
    return Tiling(128, 64, 8, 5 if has_slots else 3, _programs(device, 1), 16)


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
    parts = [_span_tiles(one, group, block_m, block_k, causal=causal) for one in ranges]
    table = np.concatenate([np.empty((0, 6), np.int64), *parts]).astype(np.int32)
    ends = np.concatenate(([0], np.cumsum(table[:, 5]))).astype(np.int32)
    tiles = np.ascontiguousarray(table[:, :5])
    return torch.from_numpy(tiles).to(device), torch.from_numpy(ends).to(device)


def _span_tiles(
    one: Sequence[int], group: int, block_m: int, block_k: int, *, causal: bool
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    q0, q1, k0, k1 = one
    num_q, num_k = q1 - q0, k1 - k0
    rows = np.arange(0, num_q * group, block_m, dtype=np.int64)
    table = np.empty((len(rows), 6), np.int64)
    table[:, :4] = q0, num_q, k0, num_k
    table[:, 4] = rows
    keys = np.full(len(rows), num_k, np.int64)
    if causal:
        last_query = np.minimum((rows + block_m - 1) // group, num_q - 1)
        keys = np.clip(num_k - num_q + last_query + 1, 0, num_k)
    table[:, 5] = -(-keys // block_k)
    return table
