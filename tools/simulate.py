"""Run a length trace through the real scheduler in virtual time; see tools/simulate.

Knows: options. The work is in `loongd.sim`, which also says what is modelled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from loongd.errors import LoongError
from loongd.sim.engine import Options
from loongd.sim.metrics import Slo, summarise
from loongd.sim.report import as_json, as_table
from loongd.sim.systems import LIMITS, System, load_profile
from loongd.sim.trace import at_rate, read_trace

PROFILES = Path(__file__).resolve().parent.parent / "etc" / "profiles"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/simulate", description=__doc__)
    add = parser.add_argument
    add("--trace", type=Path, required=True, help="CSV(.gz): arrival_s,input_len,output_len")
    add("--profile", required=True, help=f"a name in {PROFILES.name}/, or a path to a JSON file")
    add(
        "--policy",
        default="loongserve",
        help="loongserve, fcfs, static_tp, static_sp, replicas or chunked (static with chunks of "
        "--max-batched-tokens); for static_tp choose a profile of that tp and one instance "
        "(%(default)s)",
    )
    add("--instances", type=int, default=8, help="elastic instances (%(default)s)")
    add("--slots", type=int, default=210_000, help="KV tokens of each (%(default)s)")
    add("--rate", type=float, help="requests/s; default: as in the trace")
    add("--num-requests", type=int, help="only the first so many")
    add("--input-cap", type=int, help="cut prompts to so many tokens")
    add("--max-tokens", type=int, default=1024, help="what each client asks for (%(default)s)")
    add("--reserve", type=int, default=1024, help="growth that admission counts on (%(default)s)")
    add("--oracle", action="store_true", help="the scheduler knows each output length")
    add("--noise", type=float, default=0.0, help="log-normal sigma of step times (%(default)s)")
    add("--seed", type=int, default=0, help="of the noise (%(default)s)")
    add("--overhead-ms", type=float, default=0.0, help="added to every step (%(default)s)")
    add("--max-batched-tokens", type=int, default=LIMITS.max_num_batched_tokens)
    add("--prefill-wait", type=float, default=LIMITS.max_prefill_wait_s, help="bound, seconds")
    add("--check", action="store_true", help="check all invariants after each event (slow)")
    add("--json", type=Path, help="write the summary here")
    add("--picture", type=Path, help="write an image of instances x time here (plot extra)")
    add("--picture-to", type=float, metavar="SECONDS", help="end of the picture")
    add("--worst", type=int, default=0, help="also show the requests with the longest TTFT")
    return parser.parse_args()


def simulate(args: argparse.Namespace) -> None:
    trace = read_trace(args.trace, num_requests=args.num_requests, input_cap=args.input_cap)
    if args.rate is not None:
        trace = at_rate(trace, args.rate)
    profile = load_profile(args.profile, PROFILES)
    system = System(args.policy, profile, args.instances, args.slots).limited(
        max_num_batched_tokens=args.max_batched_tokens,
        max_prefill_wait_s=args.prefill_wait,
    )
    options = Options(
        max_tokens=args.max_tokens,
        reserve_tokens=args.reserve,
        oracle=args.oracle,
        noise=args.noise,
        seed=args.seed,
        overhead_s=args.overhead_ms / 1000,
        check=args.check,
        record_steps=args.picture is not None,
    )
    began_s = time.perf_counter()
    run = system.run(trace, options)
    took_s = time.perf_counter() - began_s
    slo = Slo(system.predict_alone_s)
    summary = summarise(run, slo)
    print(as_table(summary))
    print(f"simulated in {took_s:.1f} s: {run.num_events / took_s:,.0f} events/s")
    worst = sorted((o for o in run.outcomes if o.ok), key=lambda o: -o.ttft_s)[: args.worst]
    for outcome in worst:
        print(
            f"{outcome.request_id}: {outcome.input_tokens:,} tokens arrived "
            f"{outcome.arrival_s:.2f} s, TTFT {outcome.ttft_s:.2f} s, TPOT "
            f"{1000 * outcome.tpot_s:.1f} ms over {outcome.num_tokens:,} tokens"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(summary), indent=1) + "\n", encoding="ascii")
    if args.picture is not None:
        from loongd.sim.picture import draw  # noqa: PLC0415 - matplotlib is optional

        draw(run, args.picture, to_s=args.picture_to)


def main() -> int:
    try:
        simulate(parse_arguments())
    except LoongError as error:
        print(f"tools/simulate: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
