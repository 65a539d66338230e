#!/usr/bin/env python3
"""How well the SIB predicts steps that it has not seen: profile, then check, as JSON.

    tools/bench_sib.py --runtime-dir DIR [--quick] [--out FILE]         a running daemon
    tools/bench_sib.py [--quick] [--out FILE] -- --model DIR ...        one started for it

What follows `--` is handed to loongd. The result names the command, the commit, the machine and
every point. Exit code 1 when the worst error is above 10 % or the mean above 4 %.
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
from typing import Any

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


def measure(runtime_dir: Path, *, quick: bool) -> dict[str, Any]:
    """Profile and check, with how long each took."""
    effort = ["--quick"] if quick else []
    began_s = time.monotonic()
    profile = ctl(runtime_dir, "profile", *effort)["profile"]
    profiled_s = time.monotonic()
    check = ctl(runtime_dir, "profile", "--check", *effort)
    return {
        "profile_seconds": round(profiled_s - began_s, 1),
        "check_seconds": round(time.monotonic() - profiled_s, 1),
        "check": check,
        "profile": profile,
    }


def errors_by_group(points: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean and worst error for each phase and degree of parallelism."""
    groups: dict[str, list[float]] = {}
    for point in points:
        groups.setdefault(f"{point['phase']} dop {point['dop']}", []).append(point["error"])
    return {
        name: {"mean": sum(errors) / len(errors), "worst": max(errors), "points": len(errors)}
        for name, errors in sorted(groups.items())
    }


def commit() -> str:
    """The commit of this checkout, marked when files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    """Run, write the result, judge it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runtime-dir", type=Path, help="of a running daemon")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, help="default: tools/results/sib-DEVICE-MODEL.json")
    parser.add_argument("loongd", nargs="*", help="arguments of a daemon to start")
    args = parser.parse_args()
    if (args.runtime_dir is None) == (not args.loongd):
        parser.error("give either --runtime-dir, or -- and loongd's arguments")
    load = os.getloadavg()[0]
    where = contextlib.nullcontext(args.runtime_dir) if args.runtime_dir else serving(args.loongd)
    with where as runtime_dir:
        found = measure(runtime_dir, quick=args.quick)
    check, profile = found["check"], found["profile"]
    result = {
        "command": " ".join(["tools/bench_sib.py", *sys.argv[1:]]),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "device": profile["device"],
            "cores": len(os.sched_getaffinity(0)),
            "platform": platform.platform(),
            "load_before": round(load, 2),
        },
        "goal": {"mean": MAX_MEAN, "worst": MAX_WORST},
        "mean": check["mean"],
        "worst": check["worst"],
        "by_group": errors_by_group(check["points"]),
        **found,
    }
    words = f"{profile['device']}-{profile['model']}-{profile['prefill'][-1]['dop']}"
    name = re.sub(r"[^a-z0-9.]+", "-", words.lower())
    path = args.out or ROOT / "tools" / "results" / f"sib-{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for group, errors in result["by_group"].items():
        print(f"{group}: mean {errors['mean']:.1%}, worst {errors['worst']:.1%}")
    print(f"mean {check['mean']:.1%}, worst {check['worst']:.1%}; {path}")
    return 0 if check["mean"] <= MAX_MEAN and check["worst"] <= MAX_WORST else 1


if __name__ == "__main__":
    sys.exit(main())
