#!/usr/bin/env python3
"""Time the kernels on one GPU at stated shapes; one JSON document on stdout.

Each figure is the median of `--runs` runs, each the median of replays of a CUDA graph in which the
work runs on several sets of buffers in turn, at least four times the L2 cache in all, so that what
a work reads comes from memory and what it writes goes there, as between the layers of a model.
(Flushing the cache by writing to it, as `triton.testing.do_bench` does, makes a work that only
reads pay for writing 50 MB back.) Bandwidth counts the bytes that must move (each input read once,
each output written once); attention over the pool counts K and V alone. Inputs are random, bf16,
seeded. Ratios are to 4.8 TB/s (H200 datasheet), to this card's own copy of the same number of bytes
timed in the same way; for matrix-bound rows, which run in turns, each hot, to 989 TFLOP/s and to
the fastest of the same shape.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernel_clock import BF16, DEVICE, Bench, Make, Work, random, with_ratios

from loongd.kernels import cudnn
from loongd.kernels.attention import AttentionBackend, CudaFlashBackend, PoolSlots, Spans
from loongd.kernels.fresh import Fresh
from loongd.kernels.gpu import attend, draw, elementwise, merge, pool, sampling, skinny
from loongd.kernels.libraries import Cudnn
from loongd.kernels.triton_backend import TritonBackend, select_cuda_backend

HEAD_DIM = 128
SCALE = HEAD_DIM**-0.5
MIB64 = 64 << 20

MHA, GQA = (32, 32), (32, 8)
Lens = tuple[int, ...]
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
    ("mha 1300", MHA, (1300,)),
    ("mha 2300", MHA, (2300,)),
    ("mha 5003", MHA, (5003,)),
    ("gqa8 5400", GQA, (5400,)),
    ("mha 9300", MHA, (9300,)),
    ("mha 16K", MHA, (16384,)),
    ("gqa8 16K", GQA, (16384,)),
    ("gqa8 64K", GQA, (65536,)),
    ("mha 64 x 128", MHA, (128,) * 64),
    ("mha 16 x 256..1216", MHA, tuple(range(256, 1280, 64))),
    ("mha 8 x 1K", MHA, (1024,) * 8),
)


def make_pool(num_keys: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """K, V and a random order of slots."""
    slots = torch.randperm(num_keys, device=DEVICE)
    return random(num_keys, num_kv_heads, HEAD_DIM), random(num_keys, num_kv_heads, HEAD_DIM), slots


def bench_decode(bench: Bench) -> None:
    for name, (heads, kv_heads), lens in DECODE:

        def make(heads: int = heads, kv_heads: int = kv_heads, lens: Lens = lens) -> Work:
            k, v, slots = make_pool(sum(lens), kv_heads)
            q = random(len(lens), heads, HEAD_DIM)
            cu_k = Spans((1,) * len(lens), lens, DEVICE).cu_k
            return partial(attend.split_kv, q, k, v, slots, None, cu_k, scale=SCALE)

        num_bytes = 2 * sum(lens) * kv_heads * HEAD_DIM * 2
        bench.memory("split_kv", name, num_bytes, make)
        fresh = partial(make_fresh, heads, kv_heads, lens)
        bench.memory("split_kv, fresh", name, num_bytes, fresh)


def make_fresh(heads: int, kv_heads: int, lens: Lens) -> Work:
    """As decode steps have it: each span's last key is rotated and stored by the same kernel."""
    k, v, slots = make_pool(sum(lens), kv_heads)
    num_spans = len(lens)
    qkv = random(num_spans, heads + 2 * kv_heads, HEAD_DIM)
    q, new_k, new_v = torch.split_with_sizes(qkv, [heads, kv_heads, kv_heads], dim=1)
    angles = random(num_spans, HEAD_DIM)
    cu_k = Spans((1,) * num_spans, lens, DEVICE).cu_k
    slots = slots.int()
    new = Fresh(new_k, new_v, angles.cos(), angles.sin(), slots[cu_k[1:].long() - 1])
    return partial(attend.split_kv, q, k, v, slots, None, cu_k, scale=SCALE, fresh=new)


def bench_pool(bench: Bench) -> None:
    heads, kv_heads = GQA
    k, v, slots = make_pool(POOL_KEYS, kv_heads)
    num_bytes = 2 * k.nbytes
    packed = k[slots], v[slots]
    scattered = PoolSlots((slots.cpu().numpy(),), DEVICE)
    in_run = PoolSlots((np.arange(POOL_KEYS),), DEVICE)
    backends = _libraries()
    for num_q in POOL_QUERIES:
        q = random(num_q, heads, HEAD_DIM)
        flop = 4.0 * heads * HEAD_DIM * num_q * POOL_KEYS
        ranges = ((0, num_q, 0, POOL_KEYS),)
        spans = Spans((num_q,), (POOL_KEYS,), DEVICE)
        of_pool = (q, k, v)
        works: dict[str, Work] = {
            **{
                f"over_pool {one.name}": partial(one.over_pool, *of_pool, scattered, spans)
                for one in backends
            },
            **{
                f"over_pool {one.name}, in a run": partial(one.over_pool, *of_pool, in_run, spans)
                for one in backends
            },
            "extend": partial(attend.extend, *of_pool, slots, ranges, scale=SCALE),
            "cudnn, packed keys": partial(cudnn.attention, q, *packed, scale=SCALE, causal=False),
        }
        # K and V are more than the cache: one set is enough
        makes = {kernel: partial(_same, work) for kernel, work in works.items()}
        bench.matrix(f"{num_q} x 128K gqa8", flop, num_bytes, makes)


def _same(work: Work) -> Work:
    return work


def _libraries() -> list[TritonBackend]:
    """What is chosen here; and cuDNN, where that is another."""
    chosen = select_cuda_backend(DEVICE, BF16, HEAD_DIM, SCALE)
    library = Cudnn(SCALE)
    with_cudnn = TritonBackend(SCALE, library, library)
    return list({one.name: one for one in (chosen, with_cudnn)}.values())


def bench_square(bench: Bench) -> None:
    backends = (*_libraries(), TritonBackend(SCALE), CudaFlashBackend(SCALE))
    for name, heads, lens in SQUARES:
        flop = sum(2.0 * heads[0] * HEAD_DIM * n * n for n in lens)
        num_bytes = 2 * sum(lens) * sum(heads) * HEAD_DIM * 2
        makes: dict[str, Make] = {}
        for backend in backends:
            lone = backend.planned is not None and len(lens) == 1
            spare = backend.planned.spare(lens[0]) if lone else 0
            spans = Spans(lens, lens, DEVICE, spare=spare)
            attention = partial(_of_spans, backend, spans)
            makes[f"square {backend.name}"] = partial(_square, heads, sum(lens), attention, spare)
        if len(lens) == 1:
            alone = partial(cudnn.attention, scale=SCALE, causal=True)
            makes["cudnn alone"] = partial(_square, heads, sum(lens), alone)
        bench.matrix(name, flop, num_bytes, makes)


def _square(
    heads: tuple[int, int], num_tokens: int, attention: Callable[..., object], spare: int = 0
) -> Work:
    """Queries, keys and values as the model has them: the values with gaps, all with `spare` rows
    behind. Zeros there are made by the linear layers, and not timed."""
    num_heads, num_kv_heads = heads
    whole = num_tokens + spare
    q, k = (random(whole, n, HEAD_DIM)[:num_tokens] for n in heads)
    qkv = random(whole, num_heads + 2 * num_kv_heads, HEAD_DIM)[:num_tokens]
    return partial(attention, q, k, qkv[:, num_heads + num_kv_heads :])


def _of_spans(
    backend: AttentionBackend, spans: Spans, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    return backend.square_causal(q, k, v, spans)


def make_norm() -> Work:
    return partial(elementwise.rms_norm, random(8192, 4096), random(4096), 1e-5)


def make_add_norm() -> Work:
    x, residual = random(8192, 4096), random(8192, 4096)
    return partial(elementwise.add_rms_norm, x, residual, random(4096), 1e-5)


def make_silu() -> Work:
    both = random(1524, 22016)
    return partial(elementwise.silu_mul, both[:, :11008], both[:, 11008:])


def make_heads() -> tuple[Tensor, ...]:
    """q, k, v of 4,096 tokens as views with gaps, a pool (K, V) and slots in random order."""
    tokens = 4096
    qkv = random(tokens, 96, HEAD_DIM)
    k_pool, v_pool, slots = make_pool(2 * tokens, 32)
    at = slots[:tokens].contiguous()
    return qkv[:, :32], qkv[:, 32:64], qkv[:, 64:], at, k_pool, v_pool


def make_angles() -> tuple[Tensor, Tensor]:
    return random(4096, HEAD_DIM), random(4096, HEAD_DIM)


def make_store() -> Work:
    return partial(pool.store_kv, *make_heads()[1:])


def make_rope_store() -> Work:
    q, k, v, *into = make_heads()
    return partial(pool.rope_store_kv, q, k, v, *make_angles(), *into)


def make_rotary() -> Work:
    q, k, *_ = make_heads()
    cos, sin = make_angles()
    return partial(pool.apply_rotary, q, k, cos, sin)


def make_merge() -> Work:
    out, part = (torch.randn(4096, 32, HEAD_DIM, device=DEVICE) for _ in range(2))
    lse, part_lse = (torch.randn(4096, 32, device=DEVICE) for _ in range(2))
    return partial(merge.merge_state_, out, lse, part, part_lse)


def make_best(rows: int) -> Work:
    return partial(sampling.best_tokens, torch.randn(rows, 128256, device=DEVICE))


def make_draw(rows: int, top_p: float) -> Work:
    """Drawing at temperature 1 from logits whose best tokens have most of the mass."""
    logits = 3.0 * torch.randn(rows, 128256, device=DEVICE)
    values = (1.0, 0.0, top_p, 0.0, 0.5)
    numbers = [torch.full((rows,), x, dtype=torch.float64, device=DEVICE) for x in values]
    return partial(draw.draw_tokens, logits, *numbers, filtered=top_p < 1)


HEADS_BYTES = 4096 * 32 * HEAD_DIM * 2
"""Queries, keys or values of the small kernels."""
SMALL: tuple[tuple[str, str, int, Make], ...] = (
    ("rms_norm", "8192 x 4096", 2 * MIB64, make_norm),
    ("add_rms_norm", "8192 x 4096", 4 * MIB64, make_add_norm),
    ("silu_mul", "1524 x 2 x 11008", 3 * 1524 * 11008 * 2, make_silu),
    ("store_kv", "4096 x mha", 4 * HEADS_BYTES, make_store),
    # q and k read and written, v read, K and V written
    ("rope_store_kv", "4096 x mha", 7 * HEADS_BYTES, make_rope_store),
    ("apply_rotary", "4096 x mha", 4 * HEADS_BYTES, make_rotary),
    ("merge_state_", "4096 x 32 x 128", 3 * 2 * HEADS_BYTES, make_merge),
    ("best_tokens", "131 x 128256", 131 * 128256 * 4, partial(make_best, 131)),
    ("best_tokens", "1 x 128256", 128256 * 4, partial(make_best, 1)),
    ("draw_tokens", "256 x 128256", 256 * 128256 * 4, partial(make_draw, 256, 1.0)),
    ("draw_tokens, top-p", "256 x 128256", 256 * 128256 * 4, partial(make_draw, 256, 0.9)),
    ("draw_tokens, top-p", "1 x 128256", 128256 * 4, partial(make_draw, 1, 0.9)),
)
"""Small kernels at 64 MiB of input or more, with the bytes that they must move."""


def bench_small(bench: Bench) -> None:
    for kernel, shape, num_bytes, make in SMALL:
        bench.memory(kernel, shape, num_bytes, make)


FEW_ROWS = (1, 16, 32, 64)
PRODUCTS: tuple[tuple[str, int, int, bool], ...] = (
    ("qkv", 6144, 4096, False),
    ("out", 4096, 4096, False),
    ("gate_up", 28672, 4096, True),
    ("down", 4096, 14336, False),
)
"""Llama-3.1-8B's products: name, outputs, inputs, whether gated."""


def bench_few(bench: Bench) -> None:
    """Products of few rows, bound by reading the weights: the own one and the library's."""
    for name, num_outs, dim, gated in PRODUCTS:
        for rows in FEW_ROWS:
            sizes = (rows, num_outs, dim)
            shape = f"{name} {rows} x {dim} x {num_outs}"
            own = partial(_own_product, sizes, gated=gated)
            library = partial(_library_product, sizes, gated=gated)
            bench.memory("product_of_few", shape, 2 * num_outs * dim, own)
            bench.memory("library product", shape, 2 * num_outs * dim, library)


def _own_product(sizes: tuple[int, int, int], *, gated: bool) -> Work:
    rows, num_outs, dim = sizes
    x, weight = random(rows, dim), random(num_outs, dim)
    if gated:
        return partial(skinny.gated_linear_of_few, x, weight, None)
    return partial(skinny.linear_of_few, x, weight, None, skinny.new_tickets(DEVICE))


def _library_product(sizes: tuple[int, int, int], *, gated: bool) -> Work:
    rows, num_outs, dim = sizes
    x, weight, half = random(rows, dim), random(num_outs, dim), num_outs // 2
    if not gated:
        return partial(torch.nn.functional.linear, x, weight)

    def work() -> Tensor:
        both = torch.nn.functional.linear(x, weight)
        return elementwise.silu_mul(both[:, :half], both[:, half:])

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="runs whose median is reported")
    parser.add_argument("--commit", help="commit of the figures; default: this checkout's")
    parser.add_argument("--only", choices=("decode", "pool", "square", "small", "few"))
    options = parser.parse_args()
    torch.manual_seed(0)
    bench = Bench(options.runs)
    parts: dict[str, Callable[[], None]] = {
        "decode": lambda: bench_decode(bench),
        "pool": lambda: bench_pool(bench),
        "square": lambda: bench_square(bench),
        "small": lambda: bench_small(bench),
        "few": lambda: bench_few(bench),
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
        "rows": with_ratios(bench.rows),
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
