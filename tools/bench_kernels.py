#!/usr/bin/env python3
"""Time the kernels on one GPU at stated shapes; one JSON document on stdout.

Each figure is the median of `--runs` runs, each the median of replays of a CUDA graph with the L2
cache flushed before every replay. Bandwidth counts the bytes that must move (each input read
once, each output written once); attention over the pool counts K and V alone. Inputs are random,
bf16, seeded. Ratios are to 4.8 TB/s (H200 datasheet), to this card's own copy of the same number
of bytes, and for matrix-bound rows to 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.testing import do_bench

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from loongd.kernels import cudnn
from loongd.kernels.attention import CudaFlashBackend, PoolSlots, Spans
from loongd.kernels.gpu import attend, elementwise, merge, pool, sampling
from loongd.kernels.triton_backend import TritonBackend, select_cuda_backend

ROOFLINE_TB_S = 4.8
ROOFLINE_TFLOP_S = 989.0
DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
MIB64 = 64 << 20

MHA, GQA = (32, 32), (32, 8)
DECODE: tuple[tuple[str, tuple[int, int], tuple[int, ...]], ...] = (
    ("gqa8 8 x 32K", GQA, (32768,) * 8),
    ("mha 4 x 64K", MHA, (65536,) * 4),
    ("gqa8 200K + 56 x 1K", GQA, (200_000, *(1000,) * 56)),
    ("mha 200K + 56 x 1K", MHA, (200_000, *(1000,) * 56)),
    ("gqa8 64 x 1K", GQA, (1024,) * 64),
    ("gqa8 256 x 1K", GQA, (1024,) * 256),
    ("mha 32 x 4K", MHA, (4096,) * 32),
    ("gqa8 1 x 1K", GQA, (1024,)),
    ("mha 1 x 1K", MHA, (1024,)),
    ("gqa8 1 x 128K", GQA, (131072,)),
)
POOL_QUERIES = (4, 16, 64, 256, 1024, 4096)
POOL_KEYS = 131072
SQUARES: tuple[tuple[str, tuple[int, int], tuple[int, ...]], ...] = (
    ("mha 1K", MHA, (1024,)),
    ("mha 2K", MHA, (2048,)),
    ("mha 4K", MHA, (4096,)),
    ("mha 5003", MHA, (5003,)),
    ("mha 16K", MHA, (16384,)),
    ("gqa8 16K", GQA, (16384,)),
    ("mha 64 x 128", MHA, (128,) * 64),
    ("mha 16 x 256..1216", MHA, tuple(range(256, 1280, 64))),
    ("mha 8 x 1K", MHA, (1024,) * 8),
)


def replayed(work: Callable[[], object]) -> Callable[[], None]:
    """The work as one CUDA graph, warmed up: no launch gaps in the figures."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_us(work: Callable[[], object], runs: int) -> float:
    return _median_us(replayed(work), runs)


def _median_us(work: Callable[[], object], runs: int) -> float:
    once = partial(do_bench, work, warmup=5, rep=30, return_mode="median")
    times: list[float] = [once() for _ in range(runs)]
    return 1000.0 * statistics.median(times)


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
            x = random(size << 18)
            y = torch.empty_like(x)
            # not in a graph: there a copy becomes a node for the copy engine, which is slower
            self._copies[size] = (size << 20) / _median_us(lambda: y.copy_(x), self._runs) / 1e6
        return self._copies[size]

    def memory(self, kernel: str, shape: str, num_bytes: int, work: Callable[[], object]) -> None:
        us = time_us(work, self._runs)
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

    def matrix(self, kernel: str, shape: str, flop: float, work: Callable[[], object]) -> None:
        us = time_us(work, self._runs)
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


def make_pool(num_keys: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and a random order of slots."""
    slots = torch.randperm(num_keys, device=DEVICE)
    return random(num_keys, num_kv_heads, HEAD_DIM), random(num_keys, num_kv_heads, HEAD_DIM), slots


def bench_decode(bench: Bench) -> None:
    for name, (heads, kv_heads), lens in DECODE:
        k, v, slots = make_pool(sum(lens), kv_heads)
        q = random(len(lens), heads, HEAD_DIM)
        cu_k = Spans((1,) * len(lens), lens, DEVICE).cu_k
        work = partial(attend.split_kv, q, k, v, slots, None, cu_k, scale=SCALE)
        bench.memory("split_kv", name, 2 * k.numel() * 2, work)


def bench_pool(bench: Bench) -> None:
    heads, kv_heads = GQA
    k, v, slots = make_pool(POOL_KEYS, kv_heads)
    packed = k[slots], v[slots]
    host = slots.cpu().numpy()
    backend = select_cuda_backend(DEVICE, BF16, HEAD_DIM, SCALE)
    for num_q in POOL_QUERIES:
        q = random(num_q, heads, HEAD_DIM)
        flop = 4.0 * heads * HEAD_DIM * num_q * POOL_KEYS
        ranges = ((0, num_q, 0, POOL_KEYS),)
        spans = Spans((num_q,), (POOL_KEYS,), DEVICE)
        over_pool = partial(backend.over_pool, q, k, v, PoolSlots((host,), DEVICE), spans)
        extend = partial(attend.extend, q, k, v, slots, ranges, scale=SCALE)
        contiguous = partial(cudnn.attention, q, *packed, scale=SCALE, causal=False)
        shape = f"{num_q} x 128K gqa8"
        bench.matrix(f"over_pool {backend.name}", shape, flop, over_pool)
        bench.matrix("extend", shape, flop, extend)
        bench.matrix("cudnn, packed keys", shape, flop, contiguous)


def bench_square(bench: Bench) -> None:
    backends = (
        select_cuda_backend(DEVICE, BF16, HEAD_DIM, SCALE),
        TritonBackend(SCALE),
        CudaFlashBackend(SCALE),
    )
    for name, (heads, kv_heads), lens in SQUARES:
        q, k, v = (random(sum(lens), n, HEAD_DIM) for n in (heads, kv_heads, kv_heads))
        flop = sum(2.0 * heads * HEAD_DIM * n * n for n in lens)
        spans = Spans(lens, lens, DEVICE)
        for backend in backends:
            work = partial(backend.square_causal, q, k, v, spans)
            bench.matrix(f"square {backend.name}", name, flop, work)
        if len(lens) == 1:
            work = partial(cudnn.attention, q, k, v, scale=SCALE, causal=True)
            bench.matrix("cudnn alone", name, flop, work)


def small_works() -> Iterator[tuple[str, str, int, Callable[[], object]]]:
    """Small kernels at 64 MiB of input, with the bytes that they must move."""
    x, y = random(8192, 4096), random(8192, 4096)
    weight = random(4096)
    yield "rms_norm", "8192 x 4096", 2 * MIB64, lambda: elementwise.rms_norm(x, weight, 1e-5)
    add = lambda: elementwise.add_rms_norm(x, y, weight, 1e-5)  # noqa: E731
    yield "add_rms_norm", "8192 x 4096", 4 * MIB64, add
    both = random(1524, 22016)
    gate, up = both[:, :11008], both[:, 11008:]
    yield (
        "silu_mul",
        "1524 x 2 x 11008",
        3 * gate.numel() * 2,
        lambda: elementwise.silu_mul(gate, up),
    )
    tokens = 4096
    qkv = random(tokens, 96 * HEAD_DIM).view(tokens, 96, HEAD_DIM)
    q, k, v = qkv[:, :32], qkv[:, 32:64], qkv[:, 64:]
    k_pool, v_pool, slots = make_pool(2 * tokens, 32)
    slots = slots[:tokens].contiguous()
    cos, sin = random(tokens, HEAD_DIM), random(tokens, HEAD_DIM)
    moved = 4 * k.numel() * 2
    yield "store_kv", "4096 x mha", moved, lambda: pool.store_kv(k, v, slots, k_pool, v_pool)
    # q and k read and written, v read, K and V written
    yield (
        "rope_store_kv",
        "4096 x mha",
        7 * k.numel() * 2,
        lambda: pool.rope_store_kv(q, k, v, cos, sin, slots, k_pool, v_pool),
    )
    yield (
        "apply_rotary",
        "4096 x mha",
        4 * k.numel() * 2,
        lambda: pool.apply_rotary(q, k, cos, sin),
    )
    out, part = (torch.randn(4096, 32, HEAD_DIM, device=DEVICE) for _ in range(2))
    lse, part_lse = (torch.randn(4096, 32, device=DEVICE) for _ in range(2))
    yield (
        "merge_state_",
        "4096 x 32 x 128",
        3 * out.numel() * 4,
        lambda: merge.merge_state_(out, lse, part, part_lse),
    )
    logits = torch.randn(131, 128256, device=DEVICE)
    yield "best_tokens", "131 x 128256", logits.numel() * 4, lambda: sampling.best_tokens(logits)
    few = torch.randn(1, 128256, device=DEVICE)
    yield "best_tokens", "1 x 128256", few.numel() * 4, lambda: sampling.best_tokens(few)


def bench_small(bench: Bench) -> None:
    for kernel, shape, num_bytes, work in small_works():
        bench.memory(kernel, shape, num_bytes, work)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs whose median is reported")
    parser.add_argument("--commit", help="commit of the figures; default: this checkout's")
    parser.add_argument("--only", choices=("decode", "pool", "square", "small"))
    options = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(options.runs)
    parts: dict[str, Callable[[], None]] = {
        "decode": lambda: bench_decode(bench),
        "pool": lambda: bench_pool(bench),
        "square": lambda: bench_square(bench),
        "small": lambda: bench_small(bench),
    }
    for name, part in parts.items():
        if options.only in (None, name):
            part()
    document = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit or _commit(),
        "seed": 0,
        "runs": options.runs,
        "copy_gb_s": round(1000 * bench.copy_tb_s(2 << 30)),
        "copy_gb_s_64_mib": round(1000 * bench.copy_tb_s(2 * MIB64)),
        "rows": bench.rows,
    }
    json.dump(document, sys.stdout, indent=1)
    print()


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
