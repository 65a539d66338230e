"""Time of one scheduling decision (`Scheduler.handle`) with long queues; JSON to tools/results.

Each case runs the real scheduler in virtual time, with step times from a profile. 1,024 requests
(64 batches of 16) decode for ever; the queue is kept at the wanted length: whenever a request
leaves it, another arrives, of 20 to 100,000 tokens and a few tokens of answer. Measured is every
end of a step after a warm-up, for then instances become idle (arrivals mostly find all busy).
Two regimes: the pool is full (the queue waits for slots, and admission scans it at each event), or
it is not (idle instances get batches). Times are of the wall clock; CPU time is beside them,
because other work on the machine adds to the former.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from pathlib import Path
from random import Random

from loongd.sched.batching_loops import COMPILED
from loongd.sched.events import (
    Action,
    Arrived,
    InstanceJoined,
    Migrate,
    RunDecode,
    RunPrefill,
    StepDone,
)
from loongd.sched.plan import DecodePlan, MigratePlan, PrefillPlan
from loongd.sched.policies import make_policy
from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler
from loongd.sched.sib import Sib, parse_profile

ROOT = Path(__file__).resolve().parent.parent
PROFILE = ROOT / "etc" / "profiles" / "a800-llama2-7b-tp2.json"
RESULT = ROOT / "tools" / "results" / "bench_sched.json"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    num_instances: int
    num_pending: int
    num_decoding: int
    slots: int
    budget_ms: float


CASES = (
    Case("1,000 pending, full pool", 16, 1_000, 1024, 60_000, 5.0),
    Case("1,000 pending, room", 16, 1_000, 1024, 600_000, 5.0),
    Case("10,000 pending, full pool", 16, 10_000, 1024, 60_000, 10.0),
    Case("10,000 pending, room", 16, 10_000, 1024, 600_000, 10.0),
    Case("64 instances, full pool", 64, 1_000, 1024, 60_000, 20.0),
    Case("64 instances, room", 64, 1_000, 1024, 600_000, 20.0),
)


class Bench:
    """One case."""

    def __init__(self, case: Case, policy: str, *, seed: int) -> None:
        self._case = case
        self._random = Random(seed)
        self._sib = Sib(parse_profile(PROFILE.read_bytes(), where=str(PROFILE)))
        limits = Limits(max_num_seqs=4096, max_num_queued_reqs=1 << 30, num_layers=32)
        self._scheduler = Scheduler(make_policy(policy, self._sib), limits, self._sib)
        self._now = 0.0
        self._ends: list[tuple[float, int, StepDone]] = []
        self._num_arrived = 0
        self._times_s: list[float] = []
        self._cpu_s: list[float] = []

    def run(self, num_events: int) -> dict[str, object]:
        case = self._case
        for instance in range(case.num_instances):
            self._handle(InstanceJoined(0.0, instance, case.slots))
        for _ in range(case.num_decoding):
            self._arrive(self._random.randint(200, 600), 100_000)
        while self._scheduler.snapshot().num_waiting and self._ends:
            self._step()
        for _ in range(num_events // 4):
            self._fill()
            self._step()
        self._times_s.clear()
        self._cpu_s.clear()
        gc.collect()
        gc.freeze()
        for _ in range(num_events):
            self._fill()
            self._step()
        return self._result()

    def _result(self) -> dict[str, object]:
        wall_ms, cpu_ms = (
            sorted(1000 * t for t in times) for times in (self._times_s, self._cpu_s)
        )
        snapshot = self._scheduler.snapshot()

        def at(times_ms: list[float], share: float) -> float:
            return round(times_ms[min(len(times_ms) - 1, int(share * len(times_ms)))], 3)

        return {
            **asdict(self._case),
            "num_events": len(wall_ms),
            "p50_ms": at(wall_ms, 0.5),
            "p90_ms": at(wall_ms, 0.9),
            "p99_ms": at(wall_ms, 0.99),
            "max_ms": at(wall_ms, 1.0),
            "p99_cpu_ms": at(cpu_ms, 0.99),
            "max_cpu_ms": at(cpu_ms, 1.0),
            "num_running_at_end": snapshot.num_running,
            "num_waiting_at_end": snapshot.num_waiting,
            "prefill_steps": snapshot.totals.num_prefill_steps,
            "decode_steps": snapshot.totals.num_decode_steps,
            "migrations": snapshot.totals.num_migrations,
            "preemptions": snapshot.totals.num_preemptions,
        }

    def _fill(self) -> None:
        while self._scheduler.num_waiting < self._case.num_pending:
            length = int(min(100_000, 20 * self._random.paretovariate(0.7)))
            self._arrive(length, self._random.randint(1, 4))

    def _arrive(self, prompt: int, max_tokens: int) -> None:
        self._num_arrived += 1
        reserve = min(max_tokens, 500)
        name = f"r{self._num_arrived}"
        self._handle(Arrived(self._now, name, prompt, max_tokens, reserve))

    def _step(self) -> None:
        self._now, _, done = heappop(self._ends)
        self._handle(done)

    def _handle(self, event: InstanceJoined | Arrived | StepDone) -> None:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        actions = self._scheduler.handle(event)
        if isinstance(event, StepDone):
            self._times_s.append(time.perf_counter() - began_s)
            self._cpu_s.append(time.thread_time() - began_cpu_s)
        for action in actions:
            self._start(action)

    def _start(self, action: Action) -> None:
        if not isinstance(action, RunPrefill | RunDecode | Migrate):
            return
        plan = action.plan
        tokens: tuple[tuple[str, int], ...] = ()
        match plan:
            case PrefillPlan(items=prefills):
                lengths = [(item.start, item.num_tokens) for item in prefills]
                took_s = self._sib.prefill_s(plan.dop, lengths)
                tokens = tuple((item.request_id, 5) for item in prefills if item.samples)
            case DecodePlan(items=decodes):
                took_s = self._sib.decode_s(
                    dop=plan.dop,
                    num_masters=len(plan.masters),
                    batch=len(decodes),
                    kv_tokens=sum(item.position + 1 for item in decodes),
                )
                tokens = tuple((item.request_id, 5) for item in decodes)
            case MigratePlan():
                took_s = self._sib.migrate_s(plan.num_tokens)
        end_s = self._now + took_s
        heappush(self._ends, (end_s, plan.step_id, StepDone(end_s, plan.step_id, took_s, tokens)))


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/bench_sched.py", description=__doc__)
    parser.add_argument("--policy", default="loongserve")
    parser.add_argument("--events", type=int, default=2000, help="per case (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=RESULT)
    args = parser.parse_args()
    results = []
    for case in CASES:
        result = Bench(case, args.policy, seed=args.seed).run(args.events)
        results.append(result)
        verdict = "ok" if result["p99_ms"] < case.budget_ms else "OVER"
        print(
            f"{case.name:28} p50 {result['p50_ms']:7.3f}  p99 {result['p99_ms']:7.3f}  max "
            f"{result['max_ms']:7.3f} ms, p99 of CPU {result['p99_cpu_ms']:.3f}; "
            f"{result['num_running_at_end']:,} running  (budget {case.budget_ms:g} ms: {verdict})"
        )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    document = {
        "command": shlex.join(["tools/bench_sched.py", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "cores": os.cpu_count(),
        "load_per_core": round(os.getloadavg()[0] / (os.cpu_count() or 1), 2),
        "compiled": COMPILED,
        "policy": args.policy,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cases": results,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")
    return 0 if all(r["p99_ms"] < r["budget_ms"] for r in results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
