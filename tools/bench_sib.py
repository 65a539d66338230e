#!/usr/bin/env python3
"""How well the SIB predicts steps that it has not seen: profile, then check, as JSON.

    tools/bench_sib.py --runtime-dir DIR [--quick] [--out FILE]         a running daemon
    tools/bench_sib.py [--quick] [--out FILE] -- --model DIR ...        one started for it
    tools/bench_sib.py --profile FILE [--out FILE] -- --model DIR ...   the same, check alone

What follows `--` is handed to loongd. Checked are batches of random sizes, lengths, KV and masters
(`loongd.profiling.grid`), none of which was profiled; `--seed` selects others. The result names the
command, the commit, the machine, every checked batch and every profiled step; `--profile-out` keeps
the profile itself, with where it comes from. `--refit RESULT` fits the steps of an earlier result
anew and judges that; so a measured profile becomes a shipped one:

    tools/bench_sib.py --refit RESULT --profile-out etc/profiles/h200-llama3-8b-tp1.json

`--profile FILE` checks a profile that there is, for instance one of two GPUs on one of them.

Exit code 1 when the worst error is above 10 % or the mean above 4 %.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from loongd.sched.sib import Profile, Sib, dump_profile
from loongd.sched.sib_fit import DecodePoint, PrefillPoint, fit_decode
from loongd.sched.sib_fit_detail import fit_measured
from loongd.sched.sib_fit_grid import refine_decode

MAX_WORST = 0.10
MAX_MEAN = 0.04
ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 600.0


@contextlib.contextmanager
def serving(arguments: list[str]) -> Iterator[Path]:
    """A daemon with these arguments; gives its runtime directory."""
    with tempfile.TemporaryDirectory(prefix="loongd-sib-") as name:
        directory = Path(name)
        log_path = directory / "log"
        command = [sys.executable, "-m", "loongd", "--port", "0", "--runtime-dir", name]
        environment = {**os.environ, "STATE_DIRECTORY": name}
        with log_path.open("wb") as log:
            process = subprocess.Popen([*command, *arguments], stderr=log, env=environment)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while "ready: " not in log_path.read_text(errors="replace"):
                if process.poll() is not None or time.monotonic() > deadline:
                    sys.exit(log_path.read_text(errors="replace"))
                time.sleep(0.1)
            yield directory
        except SystemExit:
            sys.stderr.write(log_path.read_text(errors="replace")[-4000:])
            raise
        finally:
            process.terminate()
            process.wait(60)


def ctl(runtime_dir: Path, *arguments: str) -> dict[str, Any]:
    """The JSON that a command of loongctl prints; its progress goes to stderr."""
    command = [sys.executable, "-m", "loongd.ctl", "--runtime-dir", str(runtime_dir), *arguments]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        sys.exit(done.returncode or 1)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measure(
    runtime_dir: Path, *, quick: bool, seed: int | None, known: Path | None
) -> dict[str, Any]:
    """Profile, unless the daemon was given a `known` one, and check; with how long each took."""
    effort = ["--quick"] if quick else []
    seeded = [] if seed is None else ["--seed", str(seed)]
    began_s = time.monotonic()
    if known is None:
        made = ctl(runtime_dir, "profile", *effort)
    else:
        made = {"profile": json.loads(known.read_text(encoding="utf-8")), "points": []}
    profiled_s = time.monotonic()
    check = ctl(runtime_dir, "profile", "--check", *effort, *seeded)
    return {
        "profile_seconds": round(profiled_s - began_s, 1),
        "check_seconds": round(time.monotonic() - profiled_s, 1),
        "check": check,
        "profile": made["profile"],
        "profiled": made["points"],
    }


def refit(found: dict[str, Any]) -> dict[str, Any]:
    """The same measurements under the fit of this checkout."""
    profile = msgspec.convert(found["profile"], Profile)
    prefill = []
    for old in profile.prefill:
        points, launches = (
            [
                PrefillPoint(tuple(map(tuple, p["items"])), p["seconds"])
                for p in found["profiled"]
                if p["phase"] == phase and p["dop"] == old.dop
            ]
            for phase in ("prefill", "launch")
        )
        sizes = {small.limits.prompts: small.detail.padded_sizes for small in old.small}
        prompts = sizes.get(True, ())  # one instance replays both in one way
        chunks = sizes.get(False, prompts)
        prefill.append(fit_measured(old.dop, points, launches, prompts, chunks))
    decode = []
    for fit in profile.decode:
        steps = [
            p
            for p in found["profiled"]
            if p["phase"] == "decode" and (p["dop"], p["num_masters"]) == (fit.dop, fit.num_masters)
        ]
        measured = [DecodePoint(p["batch"], p["kv_tokens"], p["seconds"]) for p in steps]
        levels = sorted({p["level"] for p in steps})
        new = fit_decode(fit.dop, fit.num_masters, measured)
        decode.append(refine_decode(new, measured, levels))
    profile = msgspec.structs.replace(profile, prefill=prefill, decode=decode)
    sib, check = Sib(profile), found["check"]
    for point in check["points"]:
        point["predicted_s"] = predict(sib, point)
        point["error"] = abs(point["predicted_s"] / point["measured_s"] - 1)
    errors = [point["error"] for point in check["points"]]
    check |= {"mean": sum(errors) / len(errors), "worst": max(errors)}
    return found | {"profile": msgspec.to_builtins(profile), "check": check}


def predict(sib: Sib, point: dict[str, Any]) -> float:
    """What a SIB says of a checked batch."""
    if point["phase"] == "prefill":
        return sib.prefill_s(point["dop"], [tuple(item) for item in point["items"]])
    names = ("dop", "num_masters", "batch", "kv_tokens")
    return sib.decode_s(**{name: point[name] for name in names})


def errors_by_group(points: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Errors of each phase, degree of parallelism and number of masters."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for point in points:
        name = f"{point['phase']} dop {point['dop']}"
        if point["phase"] == "decode" and point["dop"] > 1:
            name += f" masters {point['num_masters']}"
        groups.setdefault(name, []).append(point)
    return {name: summary(found) for name, found in sorted(groups.items())}


def summary(points: list[dict[str, Any]]) -> dict[str, float]:
    """Mean, ninth decile and worst error, and the bias: the median of the signed errors, which is
    far from 0 when the machine as a whole was faster or slower than in the profile."""
    ordered = sorted(point["error"] for point in points)
    ninth = ordered[min(len(ordered) - 1, len(ordered) * 9 // 10)]
    values = {
        "mean": sum(ordered) / len(ordered),
        "p90": ninth,
        "worst": ordered[-1],
        "bias": median(point["predicted_s"] / point["measured_s"] - 1 for point in points),
    }
    return {name: round(value, 5) for name, value in values.items()} | {"points": len(points)}


def with_origin(result: dict[str, Any]) -> Profile:
    """The profile of a result, whose source says where and how it was measured, and how good it
    is."""
    profile, machine = msgspec.convert(result["profile"], Profile), result["machine"]
    everything = result["all"]
    origin = (
        f"{profile.source}; {profile.max_dop} x {profile.device}, {machine['platform']}, loongd "
        f"{result['commit']}; {everything['points']} unseen batches: mean error "
        f"{everything['mean']:.1%}, worst {everything['worst']:.1%}"
    )
    return msgspec.structs.replace(profile, source=origin)


def commit() -> str:
    """The commit of this checkout, marked when files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime-dir", type=Path, help="of a running daemon")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, help="check other batches")
    parser.add_argument("--out", type=Path, help="default: tools/results/sib-DEVICE-MODEL.json")
    parser.add_argument("--profile-out", type=Path, help="write the profile too")
    parser.add_argument("--commit", help="default: this checkout's")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="check this one")
    parser.add_argument("--refit", type=Path, metavar="RESULT", help="an earlier result")
    parser.add_argument("loongd", nargs="*", help="arguments of a daemon to start")
    args = parser.parse_args()
    if sum((args.runtime_dir is not None, bool(args.loongd), args.refit is not None)) != 1:
        parser.error("give one of --runtime-dir, --refit, or -- and loongd's arguments")
    if args.profile is not None and not args.loongd:
        parser.error("--profile is for a daemon that is started here: give -- and its arguments")
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The result: measured, or fitted anew."""
    if args.refit is not None:
        earlier: dict[str, Any] = json.loads(args.refit.read_text(encoding="utf-8"))
        return earlier | refit(earlier)
    load = os.getloadavg()[0]
    known = [] if args.profile is None else ["--profile", str(args.profile)]
    where = (
        contextlib.nullcontext(args.runtime_dir)
        if args.runtime_dir
        else serving([*args.loongd, *known])
    )
    with where as runtime_dir:
        found = measure(runtime_dir, quick=args.quick, seed=args.seed, known=args.profile)
    return {
        "command": " ".join(["tools/bench_sib.py", *sys.argv[1:]]),
        "commit": args.commit or commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "device": found["profile"]["device"],
            "cores": len(os.sched_getaffinity(0)),
            "platform": platform.platform(),
            "load_before": round(load, 2),
        },
        "goal": {"mean": MAX_MEAN, "worst": MAX_WORST},
        **found,
    }


def write(result: dict[str, Any], path: Path) -> None:
    """As JSON: one line for each checked batch and each profiled step."""
    long = {"check", "profile", "profiled"}
    head = json.dumps({k: v for k, v in result.items() if k not in long}, indent=1)[:-2]
    check = {k: v for k, v in result["check"].items() if k != "points"}
    parts = [
        head,
        f' "check": {json.dumps(check)[:-1]}, "points": [\n  ' + lines(result["check"]["points"]),
        f' "profile": {json.dumps(result["profile"])}',
        ' "profiled": [\n  ' + ",\n  ".join(map(json.dumps, result["profiled"])) + "\n ]\n}\n",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(",\n".join(parts), encoding="utf-8")


def lines(points: list[dict[str, Any]]) -> str:
    rounded = [
        {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in point.items()}
        for point in points
    ]
    return ",\n  ".join(map(json.dumps, rounded)) + "\n ]}"


def main() -> int:
    """Run, write the result, judge it."""
    args = parse()
    result = run(args)
    check, profile = result["check"], result["profile"]
    everything = summary(check["points"])
    groups = errors_by_group(check["points"])
    result = result | {"all": everything, "by_group": groups}
    words = f"{profile['device']}-{profile['model']}-{profile['prefill'][-1]['dop']}"
    name = re.sub(r"[^a-z0-9.]+", "-", words.lower())
    path = args.out or ROOT / "tools" / "results" / f"sib-{name}.json"
    write(result, path)
    if args.profile_out is not None:
        args.profile_out.write_text(dump_profile(with_origin(result)), encoding="utf-8")
    for group, one in {**groups, "all": everything}.items():
        errors = ", ".join(f"{name} {one[name]:.1%}" for name in ("mean", "p90", "worst", "bias"))
        print(f"{group}: {errors} of {one['points']}")
    print(path)
    return 0 if everything["mean"] <= MAX_MEAN and everything["worst"] <= MAX_WORST else 1


if __name__ == "__main__":
    sys.exit(main())
