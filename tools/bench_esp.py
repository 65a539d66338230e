"""What elasticity costs and gains on real devices: retention, migration, scale-up, the ring.

Starts one process per instance (no daemon), loads dummy weights of a given shape, and runs the
very steps that the daemon would send. All members time each step; the slowest counts; medians of
`--repeats` after one warm-up. Writes JSON.

    python tools/bench_esp.py --shape tools/shapes/llama-2-7b --device cuda --instances 2 \
        --out tools/results/esp_2xh200.json

Cases
- retention: prefill over all instances, with KV kept on instance 0 (proactive scale-down) against
  each member keeping its own stripe (no scale-down), and the reactive migration of the same KV.
- decode: the same batch with its KV on one instance against spread over two with two masters.
- ring: prefill of n tokens per instance over all instances against the rate of one instance for
  the same attention work (n * sqrt(instances) tokens alone have as many query-key pairs per
  instance; linear work is compared per token).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from loongd.wire import Extend, RunMigrate, RunStep, Sampling, Start, pack_tokens
from loongd.worker import runner as runner_module
from loongd.worker.geometry import lay_out
from loongd.worker.heart import Pulse
from loongd.worker.layout import Keep, StepLayout
from loongd.worker.runner import Runner

GREEDY = Sampling()


class Bench:
    """One rank's side; every rank runs the same calls in the same order."""

    def __init__(self, rank: int, args: argparse.Namespace, rendezvous: str) -> None:
        self.rank, self.world, self.args = rank, args.instances, args
        self.ids = 0
        self.kept: list[int] = []
        start = Start(
            rank=rank,
            world_size=args.instances,
            epoch=1,
            rendezvous=rendezvous,
            model_dir=str(args.shape),
            load_format="dummy",
            dtype=args.dtype,
            device=args.device,
            cores=[],
            kv_pool_tokens=args.pool_tokens,
            gpu_memory_utilization=0.9,
            max_step_tokens=8192,
            seed=0,
        )
        self.runner = Runner.start(start, lambda *_: None, Pulse())
        self.on_gpu = args.device == "cuda"

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, members: list[int], work: Callable[[], object]) -> float:
        """Wall seconds of the slowest member; the others wait at the barriers."""
        dist.barrier()
        self.sync()
        began = time.perf_counter()
        if self.rank in members:
            work()
        self.sync()
        spent = torch.tensor([time.perf_counter() - began if self.rank in members else 0.0])
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, float(spent))
        return max(everyone)

    def median(self, members: list[int], prepare: Callable[[], Callable[[], object]]) -> float:
        """Median over repeats of a freshly prepared step; segments are freed after each."""
        times = []
        for number in range(self.args.repeats + 1):
            work = prepare()
            spent = self.timed(members, work)
            self.runner.keep(self.kept)
            if number:
                times.append(spent)
        return statistics.median(times)

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def step(self, members: list[int], batch: list[Extend]) -> RunStep:
        return RunStep(step_id=self.new_id(), epoch=1, members=members, batch=batch)

    def prefill(self, members: list[int], lengths: list[int], keep_on: list[int]) -> RunStep:
        """A striped prefill whose KV is dealt to `keep_on` in equal consecutive runs."""
        batch = []
        for number, length in enumerate(lengths):
            share, left = divmod(length, len(keep_on))
            keep = [(i, share + (n < left)) for n, i in enumerate(keep_on)]
            tokens = pack_tokens([(7 * i + number) % 1000 for i in range(length)])
            batch.append(
                Extend(
                    request_id=str(number),
                    tokens=tokens,
                    start=0,
                    master=None,
                    segment=self.new_id(),
                    keep=[(i, n) for i, n in keep if n],
                    cached=[],
                    holders=[],
                    sampling=GREEDY,
                )
            )
        return self.step(members, batch)

    def fill(
        self, lengths: list[int], keep_on: list[list[int]]
    ) -> list[tuple[int, dict[int, int]]]:
        """Slots with random KV, without computing it: (segment, instance -> tokens) a request."""
        requests = []
        for length, places in zip(lengths, keep_on, strict=True):
            segment, share = self.new_id(), length // len(places)
            placed = {
                i: share + (length - share * len(places)) * (n == 0) for n, i in enumerate(places)
            }
            first = 0
            for instance, tokens in placed.items():
                if instance == self.rank:
                    self.runner.parts.kv.extend(
                        segment, torch.arange(first, first + tokens).numpy()
                    )
                first += tokens
            requests.append((segment, placed))
        return requests

    def decode(
        self,
        members: list[int],
        requests: list[tuple[int, dict[int, int]]],
        lengths: list[int],
        masters: list[int],
    ) -> RunStep:
        batch = []
        for number, ((segment, placed), length, master) in enumerate(
            zip(requests, lengths, masters, strict=True)
        ):
            holders = [m for m in members if placed.get(m)]
            batch.append(
                Extend(
                    request_id=str(number),
                    tokens=pack_tokens([number % 1000]),
                    start=length,
                    master=master,
                    segment=self.new_id(),
                    keep=[],
                    cached=[segment],
                    holders=holders,
                    sampling=GREEDY,
                    holder_tokens=[placed[m] for m in holders],
                )
            )
        return self.step(members, batch)


def retention(bench: Bench, length: int, batch: int) -> dict[str, Any]:
    """Prefill with proactive scale-down to instance 0, without, and migration afterwards."""
    everyone = list(range(bench.world))
    lengths = [length] * batch
    bench.kept = []

    def with_retention() -> Callable[[], object]:
        step = bench.prefill(everyone, lengths, [0])
        return lambda: bench.runner.run(step)

    def own_stripes() -> Callable[[], object]:
        step = bench.prefill(everyone, lengths, [0])
        return lambda: _run_keeping_stripes(bench, step)

    scaled = bench.median(everyone, with_retention)
    plain = bench.median(everyone, own_stripes)

    def move() -> Callable[[], object]:
        per_instance = length // bench.world
        requests = bench.fill([per_instance] * batch, [[bench.world - 1]] * batch)
        message = RunMigrate(
            step_id=bench.new_id(),
            epoch=1,
            source=bench.world - 1,
            target=0,
            moves=[(segment, per_instance) for segment, _ in requests],
        )
        return lambda: bench.runner.migrate(message)

    moved = bench.median([0, bench.world - 1], move)
    return {
        "case": "retention",
        "prompt_tokens": length,
        "batch": batch,
        "prefill_with_retention_s": scaled,
        "prefill_keeping_stripes_s": plain,
        "overhead": scaled / plain - 1,
        "reactive_migration_s": moved,
        "migration_share_of_prefill": moved / plain,
    }


def _run_keeping_stripes(bench: Bench, step: RunStep) -> None:
    """The baseline: the same step, each member storing its own block and nothing else."""

    def stripes(*args: Any, **kwargs: Any) -> StepLayout:
        layout = lay_out(*args, **kwargs)
        kv = args[2]
        for segment, count in layout.grown:
            kv.truncate(segment, count)
        own = layout.block_lens[layout.me]
        segment = step.batch[0].segment
        slots = kv.extend(segment, torch.arange(own).numpy())
        keep = Keep(slice(0, own), torch.from_numpy(slots).to(kv.device))
        ring = tuple(
            dataclasses.replace(part, keep=keep if part.source == layout.me else None)
            for part in layout.ring
        )
        return dataclasses.replace(layout, ring=ring, grown=((segment, own),))

    saved = runner_module.lay_out
    runner_module.lay_out = stripes
    try:
        bench.runner.run(step)
    finally:
        runner_module.lay_out = saved


def decode(bench: Bench, length: int, batch: int) -> dict[str, Any]:
    """One decode step: all on instance 0; two masters with own KV; KV of each over both."""
    result: dict[str, Any] = {"case": "decode", "kv_tokens": length, "batch": batch}
    lengths = [length] * batch
    layouts = {
        "one_instance_s": ([0], [[0]] * batch, [0] * batch),
        "two_masters_s": ([0, 1], [[n % 2] for n in range(batch)], [n % 2 for n in range(batch)]),
        "two_holders_s": ([0, 1], [[0, 1]] * batch, [n % 2 for n in range(batch)]),
        "one_master_two_holders_s": ([0, 1], [[0, 1]] * batch, [0] * batch),
    }
    room = bench.runner.parts.kv.total
    for name, (members, places, masters) in layouts.items():
        if length * batch // len(members) + batch > room:
            result[name] = None
            continue
        bench.runner.keep([])
        requests = bench.fill(lengths, places)
        bench.kept = [segment for segment, _ in requests]

        def work(
            members: list[int] = members,
            requests: list[tuple[int, dict[int, int]]] = requests,
            masters: list[int] = masters,
        ) -> Callable[[], object]:
            step = bench.decode(members, requests, lengths, masters)
            return lambda: bench.runner.run(step)

        result[name] = bench.median(members, work)
    bench.kept = []
    bench.runner.keep([])
    return result


def ring(bench: Bench, per_instance: int) -> dict[str, Any]:
    """Prefill over all instances, and alone at the same attention work per instance."""
    everyone = list(range(bench.world))
    bench.kept = []
    total = per_instance * bench.world
    alone = int(per_instance * bench.world**0.5)

    def prefill(members: list[int], tokens: int) -> float:
        def prepare() -> Callable[[], object]:
            step = bench.prefill(members, [tokens], members)
            return lambda: bench.runner.run(step)

        return bench.median(members, prepare)

    together_s, alone_s = prefill(everyone, total), prefill([0], alone)
    same_s = prefill([0], per_instance)
    return {
        "case": "ring",
        "tokens_per_instance": per_instance,
        "all_instances_s": together_s,
        "alone_same_attention_tokens": alone,
        "alone_same_attention_s": alone_s,
        "alone_same_tokens_s": same_s,
    }


def run_rank(rank: int, args: argparse.Namespace, rendezvous: str, out: str) -> None:
    """All cases on one rank; rank 0 writes and prints."""
    bench = Bench(rank, args, rendezvous)
    cases: list[Callable[[], dict[str, Any]]] = []
    for length, batch in args.retention:
        cases.append(lambda length=length, batch=batch: retention(bench, length, batch))
    for length, batch in args.decode:
        cases.append(lambda length=length, batch=batch: decode(bench, length, batch))
    cases.extend(lambda tokens=tokens: ring(bench, tokens) for tokens in args.ring)
    results = []
    for case in cases:
        results.append(case())
        if rank == 0:
            print(json.dumps(results[-1]), flush=True)
            Path(out).write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)


def _pairs(text: str) -> list[tuple[int, int]]:
    """'1024x64,10240x16' as [(1024, 64), ...]."""
    return [(int(a), int(b)) for a, b in (part.split("x") for part in text.split(",") if part)]


def main() -> int:
    """Run all cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=Path, default=Path("tools/shapes/llama-2-7b"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pool-tokens", type=int, default=210_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--retention", type=_pairs, default=_pairs("1024x64,10240x16,102400x2"))
    parser.add_argument(
        "--decode", type=_pairs, default=_pairs("1024x1,1024x8,4096x32,64x1024,32768x6")
    )
    parser.add_argument(
        "--ring", type=lambda t: [int(x) for x in t.split(",") if x], default=[16384, 65536]
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        partial = Path(directory) / "cases.json"
        mp.spawn(run_rank, (args, f"{directory}/rendezvous", str(partial)), args.instances)
        cases = json.loads(partial.read_text())
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    result = {
        "command": " ".join(["tools/bench_esp.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip() or "unknown",
        "device": torch.cuda.get_device_name(0) if args.device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "cases": cases,
    }
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
