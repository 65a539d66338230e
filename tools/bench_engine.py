#!/usr/bin/env python3
"""Time the engine's steps beside a roofline, vLLM and the goals: prefill and decode, dummy weights.

Starts one process per instance (no daemon) and runs the very steps that the daemon would send.
A prefill is timed from a common start to its end on the slowest member, three times. Decode runs
real consecutive steps: the batch grows by the tokens that it draws; a step's time is that of its
slowest member, and a run's figure is the median of its steps. Every figure is the median of three
runs. Writes JSON; a line for each row goes to stderr.

    python tools/bench_engine.py --shape tools/shapes/llama-2-7b --instances 2 --out FILE

Layouts of a batch in decode
- one: all KV and the only master on instance 0.
- own: a master on each instance, each request's KV on its own master.
- spread: a master on each instance, each request's KV half on either instance.
- scaled: KV on both instances, one master (one that grew beyond its instance).

`host_ms` is what the launch of a step takes of the host; about the step's own time where the runner
launches such a step kernel by kernel and waits for it.
`gpu_idle` is the share of the time of consecutive steps in which no kernel ran, by torch.profiler;
`gpu_gaps` counts only the idle spans of 20 us and more: kernels that follow each other in a CUDA
graph have about 1 us between them, if they are not launched early. `kernels_us` (with --kernels) is
what each kernel takes of a step, all of its launches together, under the profiler; an early one's
time has its wait for the one ahead. Kernels whose first 80 letters agree count as one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_kit import Decoding, Harness, Setup, commit, fullest_tokens, on_all_ranks
from engine_table import CASES, SOURCE, Case, Row, finished, line

_WARM_STEPS = 4
_LEAST_PROFILED = 32
"""Requests of a batch from which its idle shares are measured."""
_MOST_SHARED = 256
"""Requests of a batch up to which its KV is also laid over several instances."""
_SPARE_TOKENS = 1024
"""Slots beyond what the largest case holds."""
_GAP_US = 20.0
_NAME_LETTERS = 80
"""Of a kernel's name, which may be a whole template."""


@dataclass(frozen=True)
class Layout:
    """A batch's members, where each request's KV lies, and each one's master."""

    name: str
    members: list[int]
    places: list[list[int]]
    masters: list[int]


def layouts(case: Case, instances: int) -> list[Layout]:
    """The layouts that a decode case is measured in."""
    n = case.batch
    one = Layout("one", [0], [[0]] * n, [0] * n)
    if instances == 1:
        return [one]
    everyone = list(range(instances))
    masters = [i % instances for i in range(n)]
    scaled = Layout("scaled", everyone, [everyone] * n, [0] * n)
    if n == 1:
        return [one, scaled]
    own = Layout("own", everyone, [[master] for master in masters], masters)
    if n > _MOST_SHARED:
        return [one, own]
    return [one, own, Layout("spread", everyone, [everyone] * n, masters), scaled]


class Bench:
    """All cases on one rank."""

    def __init__(self, harness: Harness, args: argparse.Namespace) -> None:
        self._harness = harness
        self._args = args
        self._launch = harness.runner.launch

    def rows(self, case: Case) -> list[Row]:
        """The case in all of its layouts that the pool has room for."""
        if case.kind == "prefill":
            return [self._prefill(case)]
        room = self._harness.runner.parts.kv.total
        return [
            self._decode(case, layout)
            for layout in layouts(case, self._harness.world)
            if most_tokens(case, layout, self._args.steps) <= room
        ]

    def _prefill(self, case: Case) -> Row:
        harness = self._harness
        runs: list[float] = []
        # one more than asked for: the first is a warm-up, when there is time for that
        while len(runs) <= self._args.runs and self._in_time(runs):
            step = harness.prefill(harness.everyone, [case.tokens] * case.batch, harness.everyone)
            runs.append(1000 * harness.timed(harness.everyone, lambda: harness.runner.run(step)))  # noqa: B023
            harness.runner.keep([])
        runs = runs[-self._args.runs :]
        return Row(case.name, "all", harness.world, statistics.median(runs), runs)

    def _in_time(self, runs_ms: list[float]) -> bool:
        spent_s = sum(runs_ms) / 1000
        return not runs_ms or spent_s + runs_ms[-1] / 1000 <= self._args.case_budget_s

    def _decode(self, case: Case, layout: Layout) -> Row:
        harness, steps = self._harness, self._args.steps
        decoding = self._begin(case, layout)
        runs, hosts = [], []
        for _ in range(self._args.runs):
            step_ms, host_ms = self._run(decoding, steps)
            runs.append(statistics.median(step_ms))
            hosts.append(host_ms)
        row = Row(case.name, layout.name, len(layout.members), statistics.median(runs), runs)
        row.host_ms = statistics.median(hosts)
        harness.runner.keep([])
        return row

    def profile(self, case: Case, row: Row) -> None:
        """Fill in the idle shares of a row of `rows`, by other steps of the same batch."""
        layout = next(one for one in layouts(case, self._harness.world) if one.name == row.layout)
        decoding = self._begin(case, layout)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self._run(decoding, self._args.steps)
        self._harness.runner.keep([])
        spans = [
            (event.time_range.start, event.time_range.end, event.name)
            for event in profile.events() or ()
            if event.device_type == DeviceType.CUDA
        ]
        row.gpu_idle, row.gpu_gaps = idle_shares([(start, end) for start, end, _ in spans])
        if self._args.kernels:
            taken: Counter[str] = Counter()
            for start, end, name in spans:
                taken[name[:_NAME_LETTERS]] += end - start
            steps = self._args.steps + self._args.queued
            row.kernels_us = {name: round(us / steps, 2) for name, us in taken.most_common()}

    def _begin(self, case: Case, layout: Layout) -> Decoding:
        """The case's batch, after a few steps."""
        decoding = Decoding.begin(
            self._harness,
            layout.members,
            length=case.tokens,
            places=layout.places,
            masters=layout.masters,
        )
        self._run(decoding, _WARM_STEPS)
        return decoding

    def _run(self, decoding: Decoding, steps: int) -> tuple[list[float], float]:
        """Milliseconds of each step on its slowest member, and a launch's median on this rank."""
        harness = self._harness
        harness.barrier()
        taken: list[float] = []
        hosts = [0.0]
        if harness.rank in decoding.members:
            queued = self._args.queued
            taken, hosts = (
                decoding.run_queued(steps) if queued else self._one_by_one(decoding, steps)
            )
        else:
            decoding.skip(steps + self._args.queued)
        everyones = [times for times in harness.gather(taken) if times]
        slowest = [1000 * max(times) for times in zip(*everyones, strict=True)]
        return slowest, 1000 * statistics.median(hosts)

    def _one_by_one(self, decoding: Decoding, steps: int) -> tuple[list[float], list[float]]:
        """Seconds of each step and of its launch; the next is made when one has ended."""
        taken, hosts = [], []
        for _ in range(steps):
            step = decoding.next_step()
            began = time.perf_counter()
            launched = self._launch(step)
            hosts.append(time.perf_counter() - began)
            sampled = launched.wait()
            taken.append(time.perf_counter() - began)
            decoding.drew(sampled)
        return taken, hosts


def idle_shares(spans: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """Shares of the time from the first start to the last end (us) that no span covers.

    The second counts only gaps of `_GAP_US` and more.
    """
    if not spans:
        return None, None
    ordered = sorted(spans)
    first, reached = ordered[0][0], ordered[0][0]
    idle = long = 0.0
    for start, end in ordered:
        gap = max(0.0, start - reached)
        idle += gap
        long += gap if gap >= _GAP_US else 0.0
        reached = max(reached, end)
    whole = max(reached - first, 1e-9)
    return idle / whole, long / whole


def most_tokens(case: Case, layout: Layout, steps: int) -> int:
    """Slots that the fullest instance needs for a decode case, all of its steps included."""
    grown = 5 * (steps + _WARM_STEPS)
    return fullest_tokens(case.tokens, layout.places, layout.masters, grown)


def pool_tokens(cases: Sequence[Case], instances: int, steps: int, limit: int | None) -> int:
    """A pool that has room for every case (in one layout at least), or `limit` tokens."""
    most = 0
    for case in cases:
        if case.kind == "prefill":
            needs = [case.batch * case.tokens]
        else:
            needs = [most_tokens(case, layout, steps) for layout in layouts(case, instances)]
        fits = [need for need in needs if limit is None or need + _SPARE_TOKENS <= limit]
        most = max([most, *fits])
    return most + _SPARE_TOKENS


def run_rank(rank: int, setup: Setup, args: argparse.Namespace, directory: str) -> None:
    """All cases on one rank; rank 0 prints and writes after each."""
    harness = Harness(rank, setup, f"{directory}/rendezvous")
    bench = Bench(harness, args)
    shape = setup.shape.name
    measured: list[tuple[Case, Row]] = []

    def write() -> None:
        done = finished([row for _, row in measured], shape)
        attention = harness.runner.parts.backend.name
        text = json.dumps({"attention": attention, "start_s": harness.start_s, "rows": done})
        Path(directory, "rows.json").write_text(text)

    for case in args.cases:
        began = time.perf_counter()
        new = bench.rows(case)
        measured += [(case, row) for row in new]
        if rank == 0:
            for done in finished(new, shape):
                print(line(done), file=sys.stderr, flush=True)
            spent_s = time.perf_counter() - began
            print(f"  {case.name}: {spent_s:.1f} s, {len(new)} layouts", file=sys.stderr)
            write()
    # last, since a profiler may slow down whatever runs after it
    for case, row in measured:
        profiled = args.kernels or case.batch >= _LEAST_PROFILED
        if harness.on_gpu and case.kind == "decode" and profiled:
            bench.profile(case, row)
            if rank == 0:
                shares = f"gpu_idle {row.gpu_idle}, gpu_gaps {row.gpu_gaps}"
                print(f"{row.case:16} {row.layout:7} {shares}", file=sys.stderr, flush=True)
                for name, us in (row.kernels_us or {}).items():
                    print(f"  {us:10.1f} us  {name}", file=sys.stderr, flush=True)
                write()
    harness.barrier()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=Path, default=Path("tools/shapes/llama-2-7b"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--cases", help="prefill-16k,decode-b32x4k,...; default: the table's")
    parser.add_argument("--queued", action="store_true", help="launch steps one ahead in decode")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a run")
    parser.add_argument("--kernels", action="store_true", help="what each kernel takes of decode")
    parser.add_argument("--case-budget-s", type=float, default=31, help="of a prefill case")
    parser.add_argument(
        "--max-pool-tokens", type=int, help="larger layouts are left out; default: by the shape"
    )
    parser.add_argument("--commit", help="commit of the figures; default: this checkout's")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = args.cases or CASES.get((args.shape.name, args.instances))
    if names is None:
        parser.error("--cases is needed for this shape and number of instances")
    try:
        args.cases = [Case.parse(name) for name in names.split(",")]
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> int:
    """Run all cases and write the result."""
    args = _parse()
    limit = args.max_pool_tokens or {"llama-2-7b": 205_000}.get(args.shape.name)
    pool = pool_tokens(args.cases, args.instances, args.steps, limit)
    prefills = [case.batch * case.tokens for case in args.cases if case.kind == "prefill"]
    setup = Setup(
        args.shape,
        args.device,
        args.dtype,
        args.instances,
        pool,
        max_step_tokens=max([8192, *(n // args.instances for n in prefills)]),
    )
    with tempfile.TemporaryDirectory() as directory:
        on_all_ranks(args.instances, run_rank, setup, args, directory)
        measured = json.loads(Path(directory, "rows.json").read_text())
    document = {
        "command": " ".join(["tools/bench_engine.py", *sys.argv[1:]]),
        "commit": args.commit or commit(),
        "device": torch.cuda.get_device_name(0) if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "shape": args.shape.name,
        "dtype": args.dtype,
        "columns": SOURCE,
        "pool_tokens": pool,
        **measured,
    }
    text = json.dumps(document, indent=1) + "\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
