"""Short prompts beside long ones on 2 x H200: preemptible prefill against whole prompts.

Zipf 1.2 trace, prompts cut to 200,000 tokens, its first 100 requests at 1 request/s and its first
150 at 2. Modelled: see `loongd.sim.engine`; step times from etc/profiles/h200-llama2-7b-tp1.json
(its `source` says what was measured), 220,000 KV slots per GPU. Not modelled: HTTP, tokenising, the
scheduler's own time, interference between groups. `whole` is the same policy with an unbounded
chunk; `chunked` a fixed group of both GPUs with 2,048-token chunks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from provenance import provenance

from loongd.sched.sib import dump_profile
from loongd.sim.engine import Options
from loongd.sim.metrics import Summary, summarise
from loongd.sim.report import as_json
from loongd.sim.systems import System, load_profile
from loongd.sim.trace import at_rate, read_trace

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "etc" / "profiles"
RESULT = ROOT / "tools" / "results" / "short_prompts_h200.json"
PROFILE = "h200-llama2-7b-tp1"
SLOTS = 220_000
LOADS = ((1.0, 100), (2.0, 150))
# Seconds: TTFT p90 of prompts under 4K and of all, TPOT p90.
GOALS = {1.0: (0.5, 6.0, 0.020), 2.0: (1.0, 9.0, 0.030)}


@dataclass(frozen=True, slots=True)
class Entry:
    """A system of the comparison."""

    name: str
    policy: str
    max_prefill_wait_s: float = 0.3
    max_batched_tokens: int = 16384


ENTRIES = (
    Entry("loongserve, preemptible prefill (0.3 s)", "loongserve"),
    Entry("loongserve, preemptible prefill (0.1 s)", "loongserve", max_prefill_wait_s=0.1),
    Entry("loongserve, whole prompts", "loongserve", max_prefill_wait_s=1e6),
    Entry("fcfs", "fcfs"),
    Entry("replicas", "replicas"),
    Entry("static_sp", "static_sp"),
    Entry("chunked", "chunked", max_batched_tokens=2048),
)


def measure(entry: Entry, data: Path, rate_rps: float, num_requests: int) -> Summary:
    path = data / "paper_zipf1.2_unitpoisson.csv.gz"
    trace = read_trace(path, num_requests=num_requests, input_cap=200_000)
    system = System(entry.policy, load_profile(PROFILE, PROFILES), 2, SLOTS).limited(
        max_num_batched_tokens=entry.max_batched_tokens,
        max_prefill_wait_s=entry.max_prefill_wait_s,
    )
    return summarise(system.run(at_rate(trace, rate_rps), Options()))


def show(entry: Entry, rate_rps: float, summary: Summary) -> str:
    short, everyone = summary.of("< 4K").ttft_s, summary.of("all").ttft_s
    times = (short.p50, short.p90, short.p99, everyone.p50, everyone.p90, everyone.p99)
    numbers = " ".join(f"{t:>8.3f}" for t in times)
    return f"{entry.name:<42}{rate_rps:>5.1f}/s {numbers} {1000 * _tpot_s(summary):>9.1f}"


def meets(rate_rps: float, summary: Summary) -> bool:
    short_s, all_s, tpot_s = GOALS[rate_rps]
    ttft = (summary.of("< 4K").ttft_s.p90, summary.of("all").ttft_s.p90)
    return ttft[0] <= short_s and ttft[1] <= all_s and _tpot_s(summary) <= tpot_s


def _tpot_s(summary: Summary) -> float:
    return summary.of("all").tpot_s.p90


def main() -> None:
    parser = argparse.ArgumentParser(prog="tools/bench_short.py", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of the Zipf traces")
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args()
    profile = dump_profile(load_profile(PROFILE, PROFILES))
    print(f"{'TTFT in s: < 4K p50, p90, p99; all p50, p90, p99; TPOT p90 in ms':<50}")
    results: list[dict[str, Any]] = []
    for rate_rps, num_requests in LOADS:
        for entry in ENTRIES:
            summary = measure(entry, args.data, rate_rps, num_requests)
            print(show(entry, rate_rps, summary), flush=True)
            results.append(
                {
                    "system": entry.name,
                    "rate_rps": rate_rps,
                    "max_prefill_wait_s": entry.max_prefill_wait_s,
                    "max_batched_tokens": entry.max_batched_tokens,
                    "meets_goals": meets(rate_rps, summary),
                    "summary": as_json(summary),
                }
            )
    result = {
        "what": " ".join((__doc__ or "").split()),
        "origin": asdict(provenance(ROOT, ("loongd", "etc/profiles", "tools/bench_short.py"))),
        "profile": PROFILE,
        "profile_sha256": hashlib.sha256(profile.encode()).hexdigest(),
        "goals_s": {
            str(rate): {"ttft_p90_under_4k": a, "ttft_p90_all": b, "tpot_p90": c}
            for rate, (a, b, c) in GOALS.items()
        },
        "results": results,
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
