"""P90 goodput on 8 x A800 (LoongServe, Figure 12): LoongServe against fixed parallelism.

Modelled: see `loongd.sim.engine`; step times from etc/profiles (their `source` says which numbers
were published and which are derived), 210,000 KV tokens per tp 2 instance and 900,000 for tp 8, the
trace's lengths and arrivals, stretched to each rate, N = 1000 * rate. Every system is judged by the
same SLO: TTFT <= max(25 * T(len) of sp 4 tp 2, 15 s) and TPOT <= 50 ms. The fixed systems are run
with whole prompts (as in the paper) and several batch limits; the best one counts. `TP8 chunked`
is not in the paper: chunks and decode steps in turn on one tp 8 instance.
Not modelled: HTTP, tokenising, the scheduler's own time, interference between groups.

Each search says the commit, the date and the machine. A checkout with changes that are not
committed is refused, since nobody could run the same again; --dirty runs it and says so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import Provenance, provenance

from loongd.sched.sib import Sib
from loongd.sim.engine import Options
from loongd.sim.goodput import Goodput, find_goodput
from loongd.sim.metrics import Slo, attainment
from loongd.sim.systems import System, load_profile
from loongd.sim.trace import at_rate, read_trace

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "etc" / "profiles"
RESULT = ROOT / "tools" / "results" / "goodput_a800.json"
TP2, TP8 = "a800-llama2-7b-tp2", "a800-llama2-7b-tp8"


@dataclass(frozen=True, slots=True)
class Entry:
    """A system of the comparison."""

    name: str
    policy: str
    profile: str
    num_instances: int
    slots: int
    max_batched_tokens: tuple[int, ...]


ENTRIES = (
    Entry("loongserve", "loongserve", TP2, 4, 210_000, (16384,)),
    Entry("fcfs", "fcfs", TP2, 4, 210_000, (16384,)),
    Entry("TP8", "static_tp", TP8, 1, 900_000, (4096, 16384, 65536)),
    Entry("SP4TP2", "static_sp", TP2, 4, 210_000, (4096, 16384, 65536)),
    Entry("TP2x4", "replicas", TP2, 4, 210_000, (4096, 16384, 65536)),
    Entry("TP8 chunked", "chunked", TP8, 1, 900_000, (512, 2048)),
)
# Requests/s, LoongServe's published notebook output.
PAPER = {
    "1.0": {"loongserve": 1.122, "TP8": 0.405, "SP4TP2": 0.481, "TP2x4": 0.360},
    "1.2": {"loongserve": 2.925, "TP8": 1.355, "SP4TP2": 1.478, "TP2x4": 1.289},
    "1.4": {"loongserve": 8.757, "TP8": 5.723, "SP4TP2": 5.447, "TP2x4": 5.000},
}
STATIC = ("TP8", "SP4TP2", "TP2x4")
# What decides the figures, beside the traces.
SOURCES = ("loongd", "etc/profiles", "tools/bench_goodput.py")


@dataclass(frozen=True, slots=True)
class Job:
    """One search for one crossing."""

    entry: Entry
    alpha: str
    max_batched_tokens: int
    trace: Path
    oracle: bool
    width: float


def search(job: Job) -> tuple[Job, Goodput, float]:
    """The goodput of a system on a trace, and the seconds that it took to find."""
    began_s = time.perf_counter()
    entry = job.entry
    trace = read_trace(job.trace)
    system = System(
        entry.policy, load_profile(entry.profile, PROFILES), entry.num_instances, entry.slots
    ).limited(max_num_batched_tokens=job.max_batched_tokens)
    reference = Sib(load_profile(TP2, PROFILES))
    slo = Slo(lambda num_tokens: reference.prefill_s(4, [(0, num_tokens)]))

    def run(rate_rps: float) -> float:
        num_requests = max(200, round(1000 * rate_rps))
        part = at_rate(trace[:num_requests], rate_rps)
        return attainment(system.run(part, Options(oracle=job.oracle)).outcomes, slo)

    guess = PAPER[job.alpha].get(entry.name, PAPER[job.alpha]["loongserve"])
    return job, find_goodput(run, guess, width=job.width), time.perf_counter() - began_s


def sha256(path: Path) -> str:
    """As the command sha256sum says it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe(job: Job, found: Goodput, took_s: float, source: Provenance) -> dict[str, Any]:
    return {
        **asdict(source),
        "system": job.entry.name,
        "zipf": job.alpha,
        "max_batched_tokens": job.max_batched_tokens,
        "oracle": job.oracle,
        "trace_sha256": sha256(job.trace),
        "profile_sha256": sha256(PROFILES / f"{job.entry.profile}.json"),
        "goodput_rps": found.rate_rps and round(found.rate_rps, 4),
        "paper_rps": PAPER[job.alpha].get(job.entry.name),
        "points": [[round(p.rate_rps, 4), round(p.attainment, 4)] for p in found.points],
        "took_s": round(took_s),
    }


def join(earlier: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Earlier searches, except those that were done again, and the new ones."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["system"], row["zipf"], row["max_batched_tokens"]

    again = {key(row) for row in new}
    # Of the first recorded searches nobody knows what they ran.
    kept = [{"commit": "unknown", **row} for row in earlier if key(row) not in again]
    return kept + new


def conclude(searches: list[dict[str, Any]]) -> dict[str, Any]:
    """For each trace the best of each system, and the ratios to the best fixed one."""
    tables: dict[str, Any] = {}
    for alpha, paper in PAPER.items():
        best: dict[str, float] = {}
        for result in searches:
            if result["zipf"] == alpha and result["goodput_rps"]:
                name = result["system"]
                best[name] = max(best.get(name, 0.0), result["goodput_rps"])
        fixed = max((best[name] for name in STATIC if name in best), default=math.nan)
        paper_fixed = max(paper[name] for name in STATIC)
        tables[alpha] = {
            "goodput_rps": best,
            "paper_rps": paper,
            "ratio_to_best_fixed": {
                n: round(best[n] / fixed, 3) for n in best if n not in STATIC and fixed > 0
            },
            "paper_ratio": round(paper["loongserve"] / paper_fixed, 3),
        }
    return tables


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench_goodput.py", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the Zipf traces")
    parser.add_argument("--systems", default=",".join(e.name for e in ENTRIES))
    parser.add_argument("--zipf", default=",".join(PAPER))
    parser.add_argument("--oracle", action="store_true", help="admission knows output lengths")
    parser.add_argument("--width", type=float, default=0.05, help="of the bracket (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--dirty", action="store_true", help="run a checkout with changes")
    parser.add_argument(
        "--with", type=Path, nargs="*", default=[], dest="earlier", help="results to join with"
    )
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args()
    args.systems, args.zipf = args.systems.split(","), args.zipf.split(",")
    unknown = {*args.systems} - {e.name for e in ENTRIES} | {*args.zipf} - {*PAPER}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    return args


def plan_jobs(args: argparse.Namespace) -> list[Job]:
    return [
        Job(entry, alpha, limit, trace, args.oracle, args.width)
        for alpha in args.zipf
        for trace in (args.data / f"paper_zipf{alpha}_unitpoisson.csv.gz",)
        for entry in ENTRIES
        if entry.name in args.systems
        for limit in entry.max_batched_tokens
    ]


def main() -> int:
    args = parse_arguments()
    # Before the run: what is committed meanwhile is not what ran.
    source = provenance(ROOT, SOURCES)
    if source.dirty and not args.dirty:
        print(
            f"tools/bench_goodput.py: error: {', '.join(SOURCES)} differ from commit "
            f"{source.commit[:10]}: commit first, or say --dirty",
            file=sys.stderr,
        )
        return 2
    searches = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for job, found, took_s in pool.map(search, plan_jobs(args)):
            searches.append(describe(job, found, took_s, source))
            shown = f"{found.rate_rps:.3f}" if found.rate_rps else "not found"
            print(
                f"zipf {job.alpha} {job.entry.name} (batches up to {job.max_batched_tokens:,}): "
                f"{shown} requests/s ({took_s:.0f} s)",
                flush=True,
            )
    earlier = [s for path in args.earlier for s in json.loads(path.read_text())["searches"]]
    searches = join(earlier, searches)
    tables = conclude(searches)
    result = {
        "what": " ".join((__doc__ or "").split()),
        "entries": [asdict(e) for e in ENTRIES],
        "tables": tables,
        "searches": searches,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")
    print(json.dumps(tables, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
