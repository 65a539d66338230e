#!/usr/bin/env python3
"""Time products of few rows on one GPU in many tiles beside the library's; writes JSON.

For each product of Llama-3.1-8B and Llama-2-7B and each number of rows: torch's linear (with
`silu_mul` after it where `gated`, with the addition to the residual stream and its norm where
`added`), and loongd's kernel, which does the same, in its five fastest tiles. Bf16, random, seeded;
graphs over rotating weights of four times the L2 cache (`kernel_clock`). `tests/kernels` holds the
rules for tiles and for where they are used against these figures.

    python tools/bench_few.py --rows 64 --out FILE
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_kit import commit
from kernel_clock import BF16, DEVICE, Work, random, time_us

from loongd.kernels.gpu import elementwise, skinny
from loongd.kernels.gpu.ahead import Compiling, Recording
from loongd.kernels.gpu.skinny import Tile

_KEPT = 5
"""Tiles of a row of the result."""
_SHARED_BYTES = 232_448
"""Of a program at most, on an H200."""
_EPS = 1e-5


@dataclass(frozen=True)
class Product:
    """y = x W^T: `num_outs` rows of W (twice the outputs if gated), `dim` columns."""

    name: str
    num_outs: int
    dim: int
    gated: bool = False
    added: bool = False

    def weight(self) -> Tensor:
        return random(self.num_outs, self.dim).mul_(self.dim**-0.5)

    def work(self, rows: int, tile: Tile | None) -> Work:
        """The product on new buffers: in that tile, or by the library."""
        x, w = random(rows, self.dim), self.weight()
        if self.gated:
            if tile is not None:
                return partial(skinny.gated_linear_of_few, x, w, None, tile=tile)
            return lambda: elementwise.silu_mul(*linear(x, w).chunk(2, dim=-1))
        tickets = skinny.new_tickets(DEVICE)
        if not self.added:
            if tile is not None:
                return partial(skinny.linear_of_few, x, w, None, tickets, tile=tile)
            return partial(linear, x, w)
        residual, norm = random(rows, self.num_outs), random(self.num_outs)
        if tile is not None:
            more = (residual, norm, _EPS, tickets)
            return partial(skinny.add_linear_of_few, x, w, None, *more, tile=tile)
        return lambda: elementwise.add_rms_norm(linear(x, w), residual, norm, _EPS)

    def tiles(self, rows: int) -> list[Tile]:
        """Those worth trying."""
        return [tile for tile in _all_tiles(rows) if self._is_sensible(tile)]

    def _is_sensible(self, tile: Tile) -> bool:
        per_stage = 2 * tile.block_d * (tile.block_o * (1 + self.gated) + tile.block_m)
        blocks = triton.cdiv(self.num_outs // (1 + self.gated), tile.block_o)
        if per_stage * tile.num_stages > _SHARED_BYTES:
            return False
        if tile.splits == 1:
            return True
        steps = self.dim // tile.block_d
        fits = blocks <= 64 and steps % tile.splits == 0
        return fits and not self.gated and self.num_outs < 16384


PRODUCTS = (
    Product("qkv", 6144, 4096),
    Product("out", 4096, 4096),
    Product("out", 4096, 4096, added=True),
    Product("gated", 28672, 4096, gated=True),
    Product("down", 4096, 14336),
    Product("down", 4096, 14336, added=True),
    Product("lm_head", 128256, 4096),
    Product("qkv7", 12288, 4096),
    Product("gated7", 22016, 4096, gated=True),
    Product("down7", 4096, 11008),
    Product("down7", 4096, 11008, added=True),
    Product("lm_head7", 32000, 4096),
)


def _all_tiles(rows: int) -> Iterator[Tile]:
    block_m = max(16, triton.next_power_of_2(rows))
    sizes = itertools.product((64, 128), (64, 128), (4, 8), (3, 4, 5, 6), (1, 2, 4))
    for block_o, block_d, num_warps, num_stages, splits in sizes:
        yield Tile(block_m, block_o, block_d, num_warps, num_stages, splits)


def _compile(cases: Sequence[tuple[Product, int]]) -> None:
    """All kernels at once, found by a rehearsal."""
    with Recording() as recording:
        for product, rows in cases:
            for tile in product.tiles(rows):
                product.work(rows, tile)()
    torch.cuda.synchronize()
    Compiling.start(recording.variants).finish(lambda _: None)


def _row(product: Product, rows: int, runs: int) -> dict[str, Any]:
    num_bytes = 2 * product.num_outs * product.dim
    times_us = []
    for tile in product.tiles(rows):
        us = time_us(partial(product.work, rows, tile), num_bytes, runs)
        times_us.append((round(us, 2), *astuple(tile)))
    library_us = time_us(partial(product.work, rows, None), num_bytes, runs)
    best = sorted(times_us)[:_KEPT]
    return {
        "name": product.name,
        "gated": product.gated,
        "added": product.added,
        "weight_shape": [product.num_outs, product.dim],
        "rows": rows,
        "library_us": round(library_us, 2),
        "gb_s": round(num_bytes / best[0][0] / 1e3),
        "tiles": best,
        "tried": len(times_us),
    }


def main() -> int:
    """Run all cases; a line for each goes to stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--commit", help="commit of the figures; default: this checkout's")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    cases = [(product, rows) for rows in args.rows for product in PRODUCTS]
    _compile(cases)
    done = []
    for product, rows in cases:
        row = _row(product, rows, args.runs)
        print({k: v for k, v in row.items() if k != "tiles"}, row["tiles"][0], file=sys.stderr)
        done.append(row)
    document = {
        "command": " ".join(["tools/bench_few.py", *sys.argv[1:]]),
        "commit": args.commit or commit(),
        "gpu": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "dtype": str(BF16),
        "tile_columns": "us, block_m, block_o, block_d, num_warps, num_stages, splits",
        "rows": done,
    }
    text = json.dumps(document, indent=1) + "\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
