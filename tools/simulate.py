"""Run a length trace through the real scheduler in virtual time; see tools/simulate.

Knows: options. The work is in `loongd.sim`, which also says what is modelled.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import NoReturn

from loongd.errors import ConfigError, LoongError
from loongd.sim.engine import Options
from loongd.sim.metrics import Slo, summarise
from loongd.sim.outcome import Run
from loongd.sim.report import as_json, as_table
from loongd.sim.systems import LIMITS, System, load_profile
from loongd.sim.trace import MOST_TOKENS, at_rate, read_trace

PROFILES = Path(__file__).resolve().parent.parent / "etc" / "profiles"
PICTURES = (".png", ".svg", ".pdf")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # The usual error repeats the usage of all flags, and the one line that matters drowns.
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def whole(least: int, most: int = MOST_TOKENS) -> Callable[[str], int]:
    """The type of an option that is a whole number in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            message = f"{text!r} is not a whole number from {least} to {most:,}"
            raise argparse.ArgumentTypeError(message)
        return value

    return parse


def real(most: float, *, above: float | None = None) -> Callable[[str], float]:
    """The type of an option that is a number of at least 0, or more than `above`."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        is_in = 0.0 <= value <= most if above is None else above < value <= most
        if not is_in:
            least = "from 0" if above is None else f"above {above:g} and up"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {least} to {most:g}")
        return value

    return parse


def output(text: str) -> Path:
    """The type of an option that names a file to be written: said before a long run, not after."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} may not be written")
    return path


def picture(text: str) -> Path:
    """As `output`, of a kind that can be drawn."""
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} does not end in one of {', '.join(PICTURES)}")
    return output(text)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="tools/simulate", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    tokens = whole(1)
    add("--trace", type=Path, required=True, help="CSV(.gz): arrival_s,input_len,output_len")
    add("--profile", required=True, help=f"a name in {PROFILES.name}/, or a path to a JSON file")
    add(
        "--policy",
        default="loongserve",
        help="loongserve, fcfs, static_tp, static_sp, replicas or chunked (static with chunks of "
        "--max-batched-tokens); for static_tp choose a profile of that tp and one instance "
        "(%(default)s)",
    )
    add("--instances", type=whole(1, 256), default=8, help="elastic instances (%(default)s)")
    add("--slots", type=tokens, default=210_000, help="KV tokens of each (%(default)s)")
    add("--rate", type=real(1e9, above=0), help="requests/s; default: as in the trace")
    add("--num-requests", type=whole(1), help="only the first so many")
    add("--input-cap", type=tokens, help="cut prompts to so many tokens")
    add("--max-tokens", type=tokens, default=1024, help="what each client asks for (%(default)s)")
    add(
        "--reserve", type=tokens, default=1024, help="growth that admission counts on (%(default)s)"
    )
    add("--oracle", action="store_true", help="the scheduler knows each output length")
    noise = real(3.0)
    add("--noise", type=noise, default=0.0, help="log-normal sigma of step times (%(default)s)")
    add("--seed", type=int, default=0, help="of the noise (%(default)s)")
    add("--overhead-ms", type=real(1e6), default=0.0, help="added to every step (%(default)s)")
    add("--max-batched-tokens", type=tokens, default=LIMITS.max_num_batched_tokens)
    add("--prefill-wait", type=real(1e9), default=LIMITS.max_prefill_wait_s, help="bound, seconds")
    add("--check", action="store_true", help="check all invariants after each event (slow)")
    add("--json", type=output, metavar="FILE", help="write the summary here")
    add(
        "--picture",
        type=picture,
        help="write an image of instances x time here: .png, .svg or .pdf (plot extra)",
    )
    add("--picture-to", type=real(1e9, above=0), metavar="SECONDS", help="end of the picture")
    add("--worst", type=whole(0), default=0, help="also show the requests with the longest TTFT")
    return parser.parse_args(argv)


def drawing() -> Callable[..., None]:
    """`loongd.sim.picture.draw`. Raises ConfigError where matplotlib is missing."""
    try:
        from loongd.sim.picture import draw  # noqa: PLC0415 - matplotlib is optional
    except ImportError as error:
        message = "--picture needs matplotlib, which is the plot extra: pip install -e '.[plot]'"
        raise ConfigError(message) from error
    return draw


def show_worst(run: Run, num: int) -> None:
    for outcome in sorted((o for o in run.outcomes if o.ok), key=lambda o: -o.ttft_s)[:num]:
        print(
            f"{outcome.request_id}: {outcome.input_tokens:,} tokens arrived "
            f"{outcome.arrival_s:.2f} s, TTFT {outcome.ttft_s:.2f} s, TPOT "
            f"{1000 * outcome.tpot_s:.1f} ms over {outcome.num_tokens:,} tokens"
        )


def simulate(args: argparse.Namespace) -> None:
    draw = None if args.picture is None else drawing()
    trace = read_trace(args.trace, num_requests=args.num_requests, input_cap=args.input_cap)
    if args.rate is not None:
        trace = at_rate(trace, args.rate)
    profile = load_profile(args.profile, PROFILES)
    if args.policy == "static_tp" and args.instances > 1:
        raise ConfigError(
            f"--policy static_tp is one instance, not {args.instances}: choose a profile of "
            "that tp and --instances 1; several instances side by side are --policy replicas"
        )
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
        record_steps=draw is not None,
    )
    began_s = time.process_time()
    run = system.run(trace, options)
    took_s = max(time.process_time() - began_s, 1e-6)
    slo = Slo(system.predict_alone_s)
    summary = summarise(run, slo)
    print(as_table(summary))
    print(
        f"simulated in {took_s:.1f} s of CPU time: {len(trace) / took_s:,.0f} requests/s, "
        f"{run.num_events / took_s:,.0f} events/s"
    )
    show_worst(run, args.worst)
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(summary), indent=1) + "\n", encoding="ascii")
    if draw is not None:
        draw(run, args.picture, to_s=args.picture_to)


def main() -> int:
    try:
        simulate(parse_arguments())
    except (LoongError, OSError) as error:
        print(f"tools/simulate: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
