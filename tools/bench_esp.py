"""What elasticity costs and gains on real devices: retention, migration, scale-up, the ring.

Starts one process per instance (no daemon), loads dummy weights of a given shape, and runs the
very steps that the daemon would send. All members time each step; the slowest counts; medians of
`--repeats` after one warm-up. Writes JSON after each case, so that an early end loses only the
case at hand.

    python tools/bench_esp.py --shape tools/shapes/llama-2-7b --cases retention,ring \
        --out tools/results/esp_2xh200.json

Cases
- retention: prefill over all instances, with KV kept on instance 0 (proactive scale-down) against
  each member keeping its own stripe (no scale-down), and the reactive migration of the same KV.
- decode: the same batch with its KV on one instance, on two with a master each, and spread over
  two; seconds a step, of `--decode-steps` steps of which one is always queued.
- ring: prefill of n tokens per instance over all instances, against what two prefills on one
  instance say that linear work and attention take (`ideal_s`).
- prefill (only when asked for): one long prompt over all instances, once.
- chunk (only when asked for): a later chunk of a long prompt on two instances, wherever its older
  tokens are, against half of it on one (`tools/esp_chunk.py`).
- small (only when asked for): steps of few tokens on all instances, in each way that they can run,
  and how far these differ (`tools/esp_small.py`).
- hammer (only when asked for): many such steps of random plans, compared with a ring now and then.
- timeline: one ring prefill under the profiler: how much of the sending is hidden by computing,
  and what both did from one send to the next (`tools/esp_timeline.py` draws it).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_kit import Decoding, Harness, Setup, commit, fullest_tokens, on_all_ranks
from esp_chunk import chunk, run_laid_out
from esp_small import hammer, small
from esp_timeline import draw_text, reduce_trace

from loongd.wire import RunMigrate, RunStep
from loongd.worker.geometry import lay_out
from loongd.worker.layout import Keep, StepLayout
from loongd.worker.runner import Runner

Case = Callable[[], dict[str, Any]]
Work = Callable[[], object]


class Bench:
    """One rank's harness, and figures that are medians over repeats."""

    def __init__(self, harness: Harness, args: argparse.Namespace) -> None:
        self.harness = harness
        self.args = args

    def prefill(self, members: list[int], lengths: list[int], keep_on: list[int]) -> Work:
        """A prefill to be run."""
        step = self.harness.prefill(members, lengths, keep_on)
        return lambda: self.harness.runner.run(step)

    def median(self, members: list[int], *prepare: Callable[[], Work]) -> list[float]:
        """Median seconds of freshly prepared steps, one figure for each of `prepare`.

        They take turns, so that a device that slows down does so for all; segments are freed after
        each.
        """
        times: list[list[float]] = [[] for _ in prepare]
        for number in range(self.args.repeats + 1):
            for figures, one in zip(times, prepare, strict=True):
                spent = self.harness.timed(members, one())
                self.harness.runner.keep([])
                if number:
                    figures.append(spent)
        return [statistics.median(figures) for figures in times]


def retention(bench: Bench, length: int, batch: int) -> dict[str, Any]:
    """Prefill with proactive scale-down to instance 0, without, and migration afterwards."""
    harness = bench.harness
    everyone, last = harness.everyone, harness.world - 1
    lengths = [length] * batch

    def own_stripes() -> Work:
        step = harness.prefill(everyone, lengths, [0])
        return lambda: _run_keeping_stripes(harness.runner, step)

    def move() -> Work:
        share = length // harness.world
        segments = [harness.fill(share, [last])[0] for _ in range(batch)]
        message = RunMigrate(
            step_id=harness.new_id(),
            epoch=1,
            source=last,
            target=0,
            moves=[(segment, share) for segment in segments],
        )
        return lambda: harness.runner.migrate(message)

    scaled, plain = bench.median(
        everyone, lambda: bench.prefill(everyone, lengths, [0]), own_stripes
    )
    (moved,) = bench.median([0, last], move)
    return {
        "prompt_tokens": length,
        "batch": batch,
        "prefill_with_retention_s": scaled,
        "prefill_keeping_stripes_s": plain,
        "overhead": scaled / plain - 1,
        "reactive_migration_s": moved,
        "migration_share_of_prefill": moved / plain,
    }


def _run_keeping_stripes(runner: Runner, step: RunStep) -> None:
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
        return dataclasses.replace(layout, ring=ring, gathered=None, grown=((segment, own),))

    run_laid_out(runner, step, stripes)


def decode(bench: Bench, length: int, batch: int) -> dict[str, Any]:
    """Decode steps: all on instance 0; two masters with own KV; KV of each over both."""
    result: dict[str, Any] = {"kv_tokens": length, "batch": batch}
    harness, num_steps = bench.harness, bench.args.decode_steps
    grown = num_steps * (bench.args.repeats + 1)
    alternating = [n % 2 for n in range(batch)]
    layouts: dict[str, tuple[list[int], list[list[int]], list[int]]] = {
        "one_instance_s": ([0], [[0]] * batch, [0] * batch),
        "two_masters_s": ([0, 1], [[m] for m in alternating], alternating),
        "two_holders_s": ([0, 1], [[0, 1]] * batch, alternating),
        "one_master_two_holders_s": ([0, 1], [[0, 1]] * batch, [0] * batch),
    }
    for name, (members, places, masters) in layouts.items():
        result[name] = None
        if fullest_tokens(length, places, masters, grown) > harness.runner.parts.kv.total:
            continue
        decoding = Decoding.begin(harness, members, length=length, places=places, masters=masters)
        run = functools.partial(decoding.run_queued, num_steps - 1)
        spent: list[float] = []
        for _ in range(bench.args.repeats + 1):
            spent.append(harness.timed(members, run))
            if harness.rank not in members:
                decoding.skip(num_steps)
        result[name] = statistics.median(spent[1:]) / num_steps
        harness.runner.keep([])
    return result


def ring(bench: Bench, per_instance: int) -> dict[str, Any]:
    """Prefill over all instances, and alone at the same attention work per instance.

    With P instances, n tokens each: alone, n tokens take L + A (linear work and attention) and
    n * sqrt(P) tokens take sqrt(P) * L + P * A; together, each instance has L + P * A to do.
    """
    world, everyone = bench.harness.world, bench.harness.everyone
    root = world**0.5

    def seconds(members: list[int], tokens: int) -> float:
        return bench.median(members, lambda: bench.prefill(members, [tokens], members))[0]

    together_s = seconds(everyone, per_instance * world)
    alone_s = seconds([0], int(per_instance * root))
    same_s = seconds([0], per_instance)
    attention_s = (alone_s - root * same_s) / (world - root) if world > 1 else 0.0
    ideal_s = same_s + (world - 1) * attention_s
    return {
        "tokens_per_instance": per_instance,
        "all_instances_s": together_s,
        "alone_same_attention_tokens": int(per_instance * root),
        "alone_same_attention_s": alone_s,
        "alone_same_tokens_s": same_s,
        "ideal_s": ideal_s,
        "rate_of_ideal": ideal_s / together_s,
    }


def prefill(bench: Bench, tokens: int) -> dict[str, Any]:
    """One prompt over all instances, once and cold: for lengths that take minutes."""
    everyone = bench.harness.everyone
    spent = bench.harness.timed(everyone, bench.prefill(everyone, [tokens], everyone))
    bench.harness.runner.keep([])
    peak = torch.cuda.max_memory_allocated() if bench.harness.on_gpu else 0
    return {"prompt_tokens": tokens, "prefill_s": spent, "peak_bytes_instance_0": peak}


def _chunk(bench: Bench, cached: int, new: int) -> dict[str, Any]:
    return chunk(bench.harness, bench.median, cached, new)


def _small(bench: Bench, new: int, cached: int) -> dict[str, Any]:
    return small(bench.harness, bench.median, new, cached)


def _hammer(bench: Bench, steps: int, check_every: int) -> dict[str, Any]:
    return hammer(bench.harness, steps, check_every)


def timeline(bench: Bench, per_instance: int) -> dict[str, Any]:
    """One ring prefill under the profiler, as instance 0 sees it."""
    harness, everyone = bench.harness, bench.harness.everyone
    parts = harness.runner.parts
    activity = torch.profiler.ProfilerActivity

    def run_once() -> None:
        harness.timed(everyone, bench.prefill(everyone, [per_instance * harness.world], everyone))
        harness.runner.keep([])

    run_once()
    before = parts.transport.sent_bytes
    with torch.profiler.profile(
        activities=[activity.CUDA if harness.on_gpu else activity.CPU]
    ) as profiler:
        run_once()
    sent = parts.transport.sent_bytes - before
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        found = reduce_trace(json.loads(path.read_text()))
    least = parts.kv.empty_block(1).nbytes * per_instance * (harness.world - 1)
    return {
        "tokens_per_instance": per_instance,
        "sent_bytes": sent,
        "least_bytes": least,
        **found,
        "picture": draw_text(found["intervals"]),
    }


def cases_of(bench: Bench, args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """The chosen cases by name, in the order in which they were chosen."""
    known: dict[str, tuple[Callable[..., dict[str, Any]], list[tuple[int, ...]]]] = {
        "retention": (retention, args.retention),
        "decode": (decode, args.decode),
        "ring": (ring, [(tokens,) for tokens in args.ring]),
        "prefill": (prefill, [(tokens,) for tokens in args.prefill]),
        "chunk": (_chunk, args.chunk),
        "small": (_small, args.small),
        "hammer": (_hammer, args.hammer),
        "timeline": (timeline, [(args.timeline_tokens,)]),
    }
    for name in args.cases:
        function, sizes = known[name]
        for size in sizes:
            yield name, functools.partial(function, bench, *size)


def run_rank(
    rank: int, setup: Setup, args: argparse.Namespace, rendezvous: str, head: dict[str, Any]
) -> None:
    """All cases on one rank; rank 0 prints and writes."""
    harness = Harness(rank, setup, rendezvous)
    if rank == 0:
        pool = harness.runner.parts.kv.total
        print(f"ready in {harness.start_s:.0f} s, pools of {pool:,} tokens", flush=True)
    results: list[dict[str, Any]] = []
    for name, case in cases_of(Bench(harness, args), args):
        began = time.perf_counter()
        result = {"case": name, **case()}
        results.append(result | {"took_s": round(time.perf_counter() - began, 1)})
        if rank == 0:
            _show(results[-1])
            if args.out is not None:
                args.out.write_text(json.dumps(head | {"cases": results}, indent=1) + "\n")
    harness.barrier()


def _show(result: dict[str, Any]) -> None:
    print(json.dumps({k: v for k, v in result.items() if not isinstance(v, list)}), flush=True)
    print("\n".join(result.get("picture", [])), flush=True)


def _pairs(text: str) -> list[tuple[int, int]]:
    """'1024x64,10240x16' as [(1024, 64), ...]."""
    return [(int(a), int(b)) for a, b in (part.split("x") for part in text.split(",") if part)]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=Path, default=Path("tools/shapes/llama-2-7b"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--pool-tokens", type=int, default=210_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cases", type=lambda t: t.split(","), default=["retention", "decode", "ring", "timeline"]
    )
    parser.add_argument("--retention", type=_pairs, default=_pairs("1024x64,10240x16,102400x2"))
    parser.add_argument(
        "--decode", type=_pairs, default=_pairs("1024x1,1024x8,4096x32,64x1024,24576x8")
    )
    parser.add_argument("--decode-steps", type=int, default=8)
    parser.add_argument("--ring", type=_numbers, default=[16384, 65536])
    parser.add_argument("--prefill", type=_numbers, default=[1_048_576])
    parser.add_argument(
        "--chunk", type=_pairs, default=_pairs("32768x8192,80000x6144,118000x4096,160000x3072")
    )
    parser.add_argument(
        "--small",
        type=_pairs,
        default=_pairs("40x0,400x0,1024x0,2048x0,40x4096,400x4096,400x65536,2048x65536"),
        help="new tokens x older ones",
    )
    parser.add_argument(
        "--hammer", type=_pairs, default=_pairs("400x5"), help="steps x every which is compared"
    )
    parser.add_argument("--timeline-tokens", type=int, default=16384, help="tokens an instance")
    parser.add_argument("--commit", help="what is measured (default: git's HEAD)")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def _setup(args: argparse.Namespace) -> Setup:
    """What all ranks start with; memory is kept for the longest prefill."""
    together = [
        *(length * batch for length, batch in args.retention if "retention" in args.cases),
        *(tokens for tokens in args.prefill if "prefill" in args.cases),
        *(new for _, new in args.chunk if "chunk" in args.cases),
    ]
    alone = [
        *(2 * tokens for tokens in args.ring if "ring" in args.cases),
        args.timeline_tokens if "timeline" in args.cases else 0,
    ]
    return Setup(
        args.shape,
        args.device,
        args.dtype,
        args.instances,
        args.pool_tokens,
        max_step_tokens=max([8192, *alone, *(tokens // args.instances for tokens in together)]),
    )


def main() -> int:
    """Run the chosen cases on all instances."""
    args = _parse()
    gpu = args.device == "cuda"
    head = {
        "command": " ".join(["tools/bench_esp.py", *sys.argv[1:]]),
        "commit": args.commit or commit(),
        "device": (
            f"{args.instances} x {torch.cuda.get_device_name(0)}" if gpu else platform.processor()
        ),
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as directory:
        rendezvous = f"{directory}/rendezvous"
        on_all_ranks(args.instances, run_rank, _setup(args), args, rendezvous, head)
    return 0


if __name__ == "__main__":
    sys.exit(main())
