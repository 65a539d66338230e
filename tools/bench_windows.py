#!/usr/bin/env python3
"""What chunks in parts do to everybody: virtual time over many windows of the Zipf 1.2 trace.

Windows of 100 requests at 1 request/s and of 150 at 2, one behind the other, each on idle instances
after some quiet; the same scheduler with parts and with chunks of one step alone. A single window
is chaotic: which document meets which decides its figures. Modelled: see `loongd.sim.engine`; step
times from the profile of 7B on two H200, a constant beside each step (`--overhead`).

    tools/bench_windows.py --data DIR --json tools/results/windows_h200.json
    tools/bench_windows.py --data DIR --windows 1 --overhead 0.001 --input-cap 200000
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean
from typing import Any

from provenance import provenance

from loongd.sched.scheduler import Scheduler
from loongd.sched.sib import Sib
from loongd.sched.sib_default import layers_of
from loongd.sim.engine import Options, Simulation
from loongd.sim.metrics import summarise
from loongd.sim.systems import LIMITS, choose_policy, load_profile
from loongd.sim.trace import TracedRequest, read_trace

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "etc" / "profiles"
PROFILE = "h200-llama2-7b-tp1"
TRACE = "paper_zipf1.2_unitpoisson.csv.gz"
LOADS = ((1.0, 100), (2.0, 150))
NUM_REQUESTS = 3600
QUIET_S = 15.0


def run(window: list[TracedRequest], rate_rps: float, args: argparse.Namespace, layers: int) -> Any:
    """One window after a lone short prompt and the quiet; ninth deciles of the classes in it."""
    profile = load_profile(PROFILE, PROFILES)
    limits = replace(LIMITS, num_layers=layers)
    scheduler = Scheduler(choose_policy("loongserve", Sib(profile)), limits)
    simulation = Simulation(scheduler, Sib(profile), Options(overhead_s=args.overhead))
    first_s = window[0].arrival_s
    moved = [
        replace(one, arrival_s=QUIET_S + (one.arrival_s - first_s) / rate_rps) for one in window
    ]
    summary = summarise(simulation.run([TracedRequest(0.0, 50, 2), *moved], [args.slots] * 2))
    figures = {f"ttft_p90_s {one.name}": one.ttft_s.p90 for one in summary.classes}
    return figures | {"tpot_p90_s": summary.of("all").tpot_s.p90}


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/bench_windows.py", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the Zipf traces")
    parser.add_argument("--windows", type=int, help="of each load; default: all")
    parser.add_argument("--input-cap", type=int, default=190_000)
    parser.add_argument("--slots", type=int, default=198_136, help="KV slots of each instance")
    parser.add_argument("--overhead", type=float, default=0.003, help="seconds beside each step")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace = read_trace(args.data / TRACE, num_requests=NUM_REQUESTS, input_cap=args.input_cap)
    layers = layers_of(load_profile(PROFILE, PROFILES).shape)
    results: list[dict[str, Any]] = []
    for rate_rps, count in LOADS:
        starts = range(0, NUM_REQUESTS, count)[: args.windows]
        for name, num_layers in (("chunks of one step", 1), ("chunks in parts", layers)):
            found = [run(trace[at : at + count], rate_rps, args, num_layers) for at in starts]
            keys = dict.fromkeys(key for one in found for key in one)
            means = {key: mean(one[key] for one in found if key in one) for key in keys}
            print(f"{rate_rps:g}/s {name}: " + ", ".join(f"{k} {v:.3f}" for k, v in means.items()))
            results.append(
                {"rate_rps": rate_rps, "windows": len(found), "system": name, "mean": means}
            )
    if args.json is not None:
        asked = {k: v for k, v in vars(args).items() if k not in ("data", "json")}
        result = {
            "what": " ".join((__doc__ or "").split()),
            "origin": asdict(
                provenance(ROOT, ("loongd", "etc/profiles", "tools/bench_windows.py"))
            ),
            "options": asked,
            "results": results,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
