"""Random plans for minutes over real processes: no hang, and attention as dense float64 has it.

One process per instance, over sockets (CPU) or NCCL (CUDA). All make the same endless
sequence of plans from one seed (`random_plans`) and each runs those it is a member of, in order
and at its own pace: groups work at once, and members cross between them. After every plan each
member compares its rows with dense attention in float64 of the same inputs, and what its pool
holds with what it should hold, bit for bit; freed slots are poisoned.

    python tools/soak_plans.py --minutes 3 --instances 4 --seed 0
    python tools/soak_plans.py --minutes 1 --instances 2 --device cuda --dtype bfloat16

Exit code 0: no difference, no hang. A process that stands still for `--hang-s` counts as a hang.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from random_plans import (
    MOST_DECODED,
    MOST_REQUESTS,
    Free,
    Plan,
    RandomPlans,
    Step,
    rows_of,
)
from torch import Tensor

from loongd.errors import WorkerError
from loongd.kernels.attention import select_backend
from loongd.wire import RunMigrate
from loongd.worker.attention import EspAttention
from loongd.worker.comm import DistTransport
from loongd.worker.geometry import lay_out
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import RowBytes
from loongd.worker.migrate import migrate

NUM_LAYERS = 2
NUM_HEADS, NUM_KV_HEADS = 6, 2
ROUND_PLANS = 50
"""Plans between two looks at the clock, which all processes share."""
REPORT_S = 5.0
"""Seconds between two lines of progress."""
_SLOW_MATH = 1 << 30
"""Operations a pair: keys travel however few queries there are."""
START_S = 120.0
"""Most seconds that the processes take to find each other."""
TOLERANCE = {"float32": 5e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Most that `|got - exact| / (1 + |exact|)` may be."""


class Truths:
    """Random q, k, v of every position and layer of a request, the same in all processes."""

    def __init__(self, args: argparse.Namespace, dtype: torch.dtype, device: torch.device) -> None:
        self._args, self._dtype, self._device = args, dtype, device
        self._known: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def of(self, request: int) -> tuple[Tensor, Tensor, Tensor]:
        """q (L, T, N, H), k and v (L, T, K, H)."""
        if request not in self._known:
            generator = torch.Generator().manual_seed(self._args.seed * 1_000_003 + request)
            length, width = self._args.longest + MOST_DECODED, self._args.head_dim
            q, k, v = (
                torch.randn(NUM_LAYERS, length, heads, width, generator=generator)
                .to(self._dtype)
                .to(self._device)
                for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
            )
            self._known[request] = (q, k, v)
        return self._known[request]

    def forget(self, request: int) -> None:
        self._known.pop(request, None)

    def exact(self, request: int, positions: list[int], layer: int, window: int | None) -> Tensor:
        """Float64 attention of the queries at these positions over all keys before them."""
        q, k, v = (x[layer].double() for x in self.of(request))
        end = positions[-1] + 1
        at = torch.tensor(positions, device=self._device)
        distance = at[:, None] - torch.arange(end, device=self._device)
        seen = (distance >= 0) & (distance < (window or end))
        out = torch.nn.functional.scaled_dot_product_attention(
            q[at].transpose(0, 1),
            k[:end].transpose(0, 1),
            v[:end].transpose(0, 1),
            attn_mask=seen,
            enable_gqa=True,
        )
        return out.transpose(0, 1)


class Instance:
    """One process: its pool, its end of the world, and what it has found."""

    def __init__(self, rank: int, args: argparse.Namespace, rendezvous: str) -> None:
        self.rank, self.dtype = rank, getattr(torch, args.dtype)
        self.device = (
            torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
        )
        if args.device == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_tf32 = False
        self.transport = DistTransport(
            rank=rank, world_size=args.instances, rendezvous=rendezvous, device=self.device
        )
        self.kv = KvCache(
            num_layers=NUM_LAYERS,
            num_slots=args.slots,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=args.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self.kv.k_LSKH.fill_(math.nan)
        self.kv.v_LSKH.fill_(math.nan)
        self.scale = args.head_dim**-0.5
        self.backend = select_backend(self.device, self.dtype, args.head_dim, self.scale)
        self.row_bytes = RowBytes.of(
            NUM_HEADS, NUM_KV_HEADS, args.head_dim, self.kv.k_LSKH.element_size()
        )
        self.truths = Truths(args, self.dtype, self.device)
        self.tolerance = TOLERANCE[args.dtype]
        self.worst = 0.0
        self.owner: dict[int, int] = {}
        """segment -> request"""

    def run(self, plan: Plan) -> None:
        """This instance's part of a plan, checked. Raises AssertionError or LoongError."""
        match plan:
            case Step():
                self._step(plan)
            case RunMigrate():
                migrate(plan, self.rank, self.kv, self.transport)
                self._check_pool([segment for segment, _ in plan.moves])
            case Free():
                slots = torch.from_numpy(self.kv.slots_of(plan.segments)).to(self.device)
                self.kv.free(plan.segments)
                self.kv.k_LSKH[:, slots] = math.nan
                self.kv.v_LSKH[:, slots] = math.nan
                self.truths.forget(plan.request)
        self.kv.check()

    def know(self, plan: Plan) -> None:
        """Note which request a segment belongs to, member or not."""
        if isinstance(plan, Step):
            for extend in plan.message.batch:
                self.owner[extend.segment] = int(extend.request_id)

    def _step(self, plan: Step) -> None:
        layout = lay_out(
            plan.message,
            self.rank,
            self.kv,
            row_bytes=self._row_bytes(plan),
            windowed=plan.window is not None,
        )
        windows = (None, plan.window)
        attention = EspAttention(
            layout, self.kv, self.transport, self.backend, scale=self.scale, windows=windows
        )
        rows = [(r, positions) for r, positions in rows_of(plan.message, self.rank) if positions]
        for layer, window in enumerate(windows):
            out = attention(layer, *(self._packed(rows, layer, part) for part in range(3)))
            ends = itertools.accumulate((len(positions) for _, positions in rows), initial=0)
            for (request, positions), (lo, hi) in zip(rows, itertools.pairwise(ends), strict=True):
                exact = self.truths.exact(request, positions, layer, window)
                self._check(out[lo:hi].double(), exact, plan)
        self._check_pool([extend.segment for extend in plan.message.batch])

    def _row_bytes(self, plan: Step) -> RowBytes:
        """As for the model; or of a world where keys always arrive before they are needed. Every
        other step passes its blocks round, however small they are."""
        row_bytes = self.row_bytes
        if plan.message.step_id % 2:
            row_bytes = dataclasses.replace(row_bytes, gathered_rows=0)
        if plan.round_tokens is None:
            return row_bytes
        return dataclasses.replace(row_bytes, pair_flops=_SLOW_MATH, round_tokens=plan.round_tokens)

    def _packed(self, rows: list[tuple[int, list[int]]], layer: int, part: int) -> Tensor:
        parts = [self.truths.of(request)[part][layer, positions] for request, positions in rows]
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)[part]
        empty = self.kv.k_LSKH.new_empty((0, heads, self.kv.k_LSKH.shape[-1]))
        return torch.cat(parts) if parts else empty

    def _check(self, got: Tensor, exact: Tensor, plan: Step) -> None:
        error = ((got - exact).abs() / (1 + exact.abs())).max()
        worst = float(error.nan_to_num(nan=math.inf))
        self.worst = max(self.worst, worst)
        assert worst <= self.tolerance, f"instance {self.rank}: off by {worst:.1e} in {plan}"

    def _check_pool(self, segments: list[int]) -> None:
        for segment in segments:
            slots, positions = self.kv.slots_of([segment]), self.kv.positions_of([segment])
            assert len(np.unique(positions)) == len(positions)
            _, k, v = self.truths.of(self.owner[segment])
            for pool, truth in ((self.kv.k_LSKH, k), (self.kv.v_LSKH, v)):
                assert torch.equal(pool[:, slots], truth[:, positions]), f"segment {segment}"


def run_rank(rank: int, args: argparse.Namespace, directory: str, board: Any) -> None:
    """Plans until the time is over; `board[rank]` is the number of the plan in hand."""
    torch.set_num_threads(1)
    instance = Instance(rank, args, f"{directory}/rendezvous")
    plans = RandomPlans(args.seed, args.instances, num_slots=args.slots, longest=args.longest)
    clock = Clock(rank, args)
    counts = {"steps": 0, "migrations": 0}
    intervals: list[tuple[int, float, float]] = []
    for number, plan in enumerate(plans):
        if number % ROUND_PLANS == 0 and clock.is_over(number, instance.worst):
            break
        board[rank] = number
        instance.know(plan)
        members = _members(plan)
        if members is not None and rank not in members:
            continue
        started = time.monotonic()
        with torch.inference_mode():
            instance.run(plan)
        if members is not None:
            counts["steps" if isinstance(plan, Step) else "migrations"] += rank == members[0]
            intervals.append((number, started, time.monotonic()))
    report = {**counts, "worst": instance.worst, "intervals": intervals}
    Path(directory, f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    os._exit(0)


class Clock:
    """When to stop, agreed by all processes; rank 0 also tells how far they are."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self._rank, self._device, self._limit_s = rank, args.device, 60 * args.minutes
        self._began = self._told = time.monotonic()

    def is_over(self, num_plans: int, worst: float) -> bool:
        now = time.monotonic()
        if self._rank == 0 and now - self._told > REPORT_S:
            self._told = now
            print(
                f"{now - self._began:5.0f} of {self._limit_s:.0f} s  {num_plans:7,} plans  "
                f"worst error of instance 0: {worst:.1e}",
                flush=True,
            )
        over = torch.tensor([int(now - self._began > self._limit_s)], device=self._device)
        dist.all_reduce(over, dist.ReduceOp.MAX)
        return bool(over)


def _members(plan: Plan) -> list[int] | None:
    """Who takes part; None for what everyone does alone."""
    if isinstance(plan, Free):
        return None
    return plan.message.members if isinstance(plan, Step) else plan.members


def groups_at_once(reports: list[dict[str, Any]]) -> tuple[int, float]:
    """The most plans of several members in work at a time, and the share of time with two plans.

    A plan is in work while all of its members are.
    """
    spans: dict[int, tuple[float, float]] = {}
    for report in reports:
        for number, start, end in report["intervals"]:
            first, last = spans.get(number, (start, end))
            spans[number] = (max(first, start), min(last, end))
    edges = sorted(
        edge for start, end in spans.values() if start < end for edge in ((start, 1), (end, -1))
    )
    most = working = 0
    shared_s = busy_s = 0.0
    for (at, change), (following, _) in itertools.pairwise(edges):
        working += change
        most = max(most, working)
        busy_s += (following - at) * (working > 0)
        shared_s += (following - at) * (working > 1)
    return most, shared_s / max(busy_s, 1e-9)


def watch(context: Any, board: Any, hang_s: float) -> None:
    """Wait for all processes; raises what failed, or WorkerError when all stand still."""
    last, since = list(board), time.monotonic()
    while not context.join(timeout=1):
        now = list(board)
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > (hang_s if min(now) >= 0 else START_S):
            for process in context.processes:
                process.kill()
            raise WorkerError(f"no plan ends; in hand are {now} (-1: not started)")


def main() -> int:
    """Run, report, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(TOLERANCE), default="float32")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--longest", type=int, default=200, help="longest prompt, tokens")
    parser.add_argument("--slots", type=int, help="KV slots of an instance (default: 1.25x need)")
    parser.add_argument("--hang-s", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.slots is None:
        most = MOST_REQUESTS * (args.longest + MOST_DECODED)
        args.slots = math.ceil(1.25 * most / args.instances)
    board = mp.get_context("spawn").Array("q", [-1] * args.instances, lock=False)
    hang = None
    with tempfile.TemporaryDirectory() as directory:
        context = mp.spawn(run_rank, (args, directory, board), nprocs=args.instances, join=False)
        try:
            watch(context, board, args.hang_s)
        except WorkerError as error:
            hang = str(error)
        reports = [json.loads(path.read_text()) for path in Path(directory).glob("*.json")]
    most, share = groups_at_once(reports)
    result = {
        "command": " ".join(["tools/soak_plans.py", *sys.argv[1:]]),
        "transport": "nccl" if args.device == "cuda" else "sockets",
        "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu",
        "steps": sum(report["steps"] for report in reports),
        "migrations": sum(report["migrations"] for report in reports),
        "worst_error": max((report["worst"] for report in reports), default=None),
        "tolerance": TOLERANCE[args.dtype],
        "most_groups_at_once": most,
        "time_with_several_groups": round(share, 3),
        "hangs": int(hang is not None),
    }
    print(json.dumps(result | ({"hang": hang} if hang else {}), indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(hang is not None)


if __name__ == "__main__":
    sys.exit(main())
