"""How long workers take to be ready, by phase: with no kernel on disk, and with all of them.

Starts one process per instance as the daemon does (dummy weights of a given shape, an equal share
of the cores), and shows when each phase of the start began and ended, in seconds from the start of
the processes. `cold` begins with an empty directory for kernels, `warm` with that of the last run.

    python tools/bench_start.py --shape tools/shapes/llama-3.1-8b --instances 1 --runs cold,warm
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


def _worker(args: argparse.Namespace) -> None:
    """One instance's process: a JSON document on stdout."""
    phases: dict[str, list[float]] = {}

    def progress(stage: str, fraction: float) -> None:
        del fraction
        at_s = round(time.monotonic() - args.began_s, 2)
        phases.setdefault(stage, [at_s, at_s])[1] = at_s

    progress("python", 0.0)
    # how long these take is measured too
    from loongd.node import share_cores  # noqa: PLC0415
    from loongd.wire import Start  # noqa: PLC0415
    from loongd.worker.heart import Pulse  # noqa: PLC0415
    from loongd.worker.runner import Runner  # noqa: PLC0415

    progress("imports", 1.0)
    logging.basicConfig(level="INFO", format=f"instance {args.rank}: %(message)s")
    cores = sorted(os.sched_getaffinity(0))
    share = share_cores(cores, args.instances, device=args.device)[args.rank]
    start = Start(
        rank=args.rank,
        world_size=args.instances,
        epoch=1,
        rendezvous=args.rendezvous,
        model_dir=str(args.shape),
        load_format="dummy",
        dtype=args.dtype,
        device=args.device,
        cores=share.cores,
        num_threads=share.num_threads,
        kv_pool_tokens=args.pool_tokens,
        gpu_memory_utilization=0.9,
        max_step_tokens=65536,
        seed=0,
    )
    Runner.start(start, progress, Pulse())
    progress("ready", 1.0)
    print(json.dumps({"instance": args.rank, "phases_s": phases}), flush=True)
    # as workers do: communication libraries keep threads
    os._exit(0)


def _run(args: argparse.Namespace, kind: str, cache: str) -> dict[str, Any]:
    """All instances, to the end."""
    with tempfile.TemporaryDirectory() as scratch:
        more = ["--began-s", str(time.monotonic()), "--rendezvous", f"{scratch}/rendezvous"]
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], *more, "--rank", str(rank)],
                env=os.environ | {"TRITON_CACHE_DIR": cache},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(args.instances)
        ]
        texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a worker has failed")
    instances = [json.loads(text.splitlines()[-1]) for text in texts]
    ready_s = max(one["phases_s"]["ready"][1] for one in instances)
    return {"run": kind, "ready_s": ready_s, "instances": instances}


def main() -> None:
    """Run each kind in turn, and show it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=Path, default=ROOT / "tools/shapes/llama-3.1-8b")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pool-tokens", type=int)
    parser.add_argument("--runs", type=lambda t: t.split(","), default=["cold", "warm", "cold"])
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", default="", help=argparse.SUPPRESS)
    parser.add_argument("--began-s", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        _worker(args)
        return
    with tempfile.TemporaryDirectory() as caches:
        cache = f"{caches}/0"
        for number, kind in enumerate(args.runs):
            if kind == "cold":
                cache = f"{caches}/{number}"
            result = _run(args, kind, cache)
            print(f"{kind}: ready after {result['ready_s']:.1f} s")
            for stage, (begin_s, end_s) in result["instances"][0]["phases_s"].items():
                print(f"  {stage:16} {begin_s:6.2f} to {end_s:6.2f}")
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
