"""Times works on a GPU and makes rows of them, for the benchmark of the kernels.

Knows: replays of graphs over rotating buffers, this card's own copy, rooflines. Does not know:
kernels.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

ROOFLINE_TB_S = 4.8
ROOFLINE_TFLOP_S = 989.0
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
_HEATED_US = 1.5e5

Work = Callable[[], object]
Make = Callable[[], Work]
"""A work on new buffers of its own."""


def time_us(make: Make, num_bytes: int, runs: int) -> float:
    """Microseconds of a work that moves `num_bytes`, launch gaps of a graph included."""
    captured = _Captured(_sets(make, num_bytes))
    return _median_us(captured.replay, runs) / captured.count


def times_us(makes: Sequence[Make], num_bytes: int, runs: int) -> list[float]:
    """As `time_us` for works that do the same: their runs alternate, each behind `_HEATED_US` of
    its own, since a card at its power limit is up to 12 % slower than one that has rested."""
    all_captured = [_Captured(_sets(make, num_bytes)) for make in makes]
    taken = [
        [_median_us(captured.replay, 1, _HEATED_US) / captured.count for captured in all_captured]
        for _ in range(runs)
    ]
    return [statistics.median(of_one) for of_one in zip(*taken, strict=True)]


class _Captured:
    """A graph of some works, which holds what they read, that nobody else may write there, and
    what each wrote, else one would write where the last did."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works
        for work in works:
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._outputs = [work() for work in works]
        self.replay: Work = graph.replay

    @property
    def count(self) -> int:
        return len(self._works)


def _sets(make: Make, num_bytes: int) -> list[Work]:
    cache_bytes = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return [make() for _ in range(max(1, min(64, -(-4 * cache_bytes // num_bytes))))]


def _median_us(work: Work, runs: int, warm_us: float = 5e3) -> float:
    """The median of the medians of runs of 30 ms, after `warm_us` of the same."""
    once_us = statistics.median(_times_us(work, 3))
    _times_us(work, max(1, int(warm_us / once_us)))
    count = max(5, int(3e4 / once_us))
    return statistics.median(statistics.median(_times_us(work, count)) for _ in range(runs))


def _times_us(work: Work, count: int) -> list[float]:
    """Each of `count` runs in a row."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [1000.0 * first.elapsed_time(second) for first, second in pairwise(marks)]


class Bench:
    """Collects rows; prints a short line of each to stderr."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._copies: dict[int, float] = {}
        self.rows: list[dict[str, Any]] = []

    def copy_tb_s(self, num_bytes: int) -> float:
        """This card's device-to-device copy that moves so many bytes, read and written."""
        mib = max(1, min(num_bytes, 8 << 30) >> 20)
        size = 1 << (mib.bit_length() - 1)
        if size not in self._copies:
            self._copies[size] = (size << 20) / self._copy_us(size << 20) / 1e6
        return self._copies[size]

    def _copy_us(self, num_bytes: int) -> float:
        def make() -> Work:
            x = random(num_bytes // 4)
            return partial(torch.empty_like(x).copy_, x)

        works = _sets(make, num_bytes)

        def all_of_them() -> None:
            # not in a graph: there a copy becomes a node for the copy engine, which is slower
            for work in works:
                work()

        return _median_us(all_of_them, self._runs) / len(works)

    def memory(self, kernel: str, shape: str, num_bytes: int, make: Make) -> None:
        us = time_us(make, num_bytes, self._runs)
        rate = num_bytes / us / 1e6
        copy = self.copy_tb_s(num_bytes)
        self._add(
            {
                "kernel": kernel,
                "shape": shape,
                "us": round(us, 2),
                "bytes": num_bytes,
                "tb_s": round(rate, 3),
                "of_roofline": round(rate / ROOFLINE_TB_S, 3),
                "of_copy": round(rate / copy, 3),
            }
        )

    def matrix(self, shape: str, flop: float, num_bytes: int, makes: Mapping[str, Make]) -> None:
        """Works by kernel that do the same."""
        times = times_us(list(makes.values()), num_bytes, self._runs)
        for kernel, us in zip(makes, times, strict=True):
            rate = flop / us / 1e6
            self._add(
                {
                    "kernel": kernel,
                    "shape": shape,
                    "us": round(us, 2),
                    "flop": flop,
                    "tflop_s": round(rate, 1),
                    "of_roofline": round(rate / ROOFLINE_TFLOP_S, 3),
                }
            )

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        figures = {k: v for k, v in row.items() if k not in ("kernel", "shape", "bytes", "flop")}
        print(f"{row['kernel']:28} {row['shape']:22} {figures}", file=sys.stderr, flush=True)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=BF16)


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows; matrix-bound ones also with their share of the fastest rate of their shape."""
    best: dict[str, float] = {}
    for row in rows:
        best[row["shape"]] = max(best.get(row["shape"], 0.0), row.get("tflop_s", 0.0))
    return [
        {**row, "of_best": round(row["tflop_s"] / best[row["shape"]], 3)}
        if "tflop_s" in row
        else row
        for row in rows
    ]
