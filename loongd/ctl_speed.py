"""`loongctl profile` and `loongctl plan`: how fast this daemon is, measured and predicted.

Knows: the stream of progress that the daemon sends, the bar, the tables. Does not know: sockets
(callers hand in an answer's lines), or how anything is measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, TextIO

from loongd.ctl_render import WIDTH, bar, numbers, seconds

Json = Mapping[str, Any]
GOOD_ERROR = 0.10
"""The largest error with which `--check` is content."""


_NOISY = 0.10
_MOST_LINKS = 10
"""Pairs that are shown one by one."""


def follow(lines: Iterable[bytes], progress: TextIO) -> dict[str, Any]:
    """Show progress until the last word, and return that. Raises ValueError when there is none.

    On a terminal one bar that moves, elsewhere a line for each stage and each tenth of the whole.
    """
    shown: tuple[str, int] = ("", 0)
    last: dict[str, Any] = {}
    for line in lines:
        last = json.loads(line)
        if "stage" not in last:
            continue
        stage = last["stage"] + _left(last.get("left_s", 0.0))
        if progress.isatty():
            text = f"{bar(last['fraction'], 30)} {last['fraction']:4.0%}  {stage}"
            progress.write("\r" + text.ljust(WIDTH - 1))
        elif (last["stage"], int(10 * last["fraction"])) != shown:
            progress.write(f"{last['fraction']:4.0%} {stage}\n")
        shown = last["stage"], int(10 * last["fraction"])
        progress.flush()
    if progress.isatty():
        progress.write("\r" + " " * (WIDTH - 1) + "\r")
        progress.flush()
    if "stage" in last or not last:
        raise ValueError("the daemon stopped in the middle of it")
    return last


def _left(left_s: float) -> str:
    """How long it may still take, in whole minutes; nothing is said of less than one."""
    minutes = round(left_s / 60)
    return f", some {minutes} min left" if minutes else ""


def write_profile(profile: Json, path: str) -> None:
    """The profile as indented JSON. Raises OSError."""
    # imported late: loongctl should start in no time, and hardly any call comes here
    import msgspec  # noqa: PLC0415

    from loongd.sched.sib_profile import Profile, dump_profile  # noqa: PLC0415

    Path(path).write_text(dump_profile(msgspec.convert(profile, Profile)), encoding="utf-8")


def profile(answer: Json) -> str:
    """A profile as tables of its coefficients and their errors on the measured points."""
    # imported late, as above
    from loongd.profiling.facts import device_words  # noqa: PLC0415

    one = answer["profile"]
    head = [f"{one['model']} on {device_words(one['device'])}", f"tp {one['tp']}", one["dtype"]]
    rows = [
        fill(", ".join(filter(None, head)), WIDTH),
        "",
        "PREFILL  STEP       PER REQUEST  PER 1K TOKENS  PER (1K)^2  MEAN ERR  WORST",
    ]
    for fit in one["prefill"]:
        c = fit["coefficients"]
        step = seconds(max(c["alpha_s"], c.get("floor_s", 0.0)))
        rows.append(
            f"dop {fit['dop']:<4} {step:<10} {seconds(c.get('item_s', 0.0)):<12} "
            f"{seconds(c['beta_s'] * 1e3):<14} {seconds(c['gamma_s'] * 1e6):<11} {_error(fit)}"
        )
    rows += ["", "DECODE   MASTERS  STEP       PER REQUEST  PER 1K KV TOKENS  MEAN ERR  WORST"]
    for fit in one["decode"]:
        c = fit["coefficients"]
        step = seconds(max(c["alpha_s"], c.get("floor_s", 0.0)))
        each = c["request_s"] + c.get("over_s", 0.0)
        rows.append(
            f"dop {fit['dop']:<4} {fit['num_masters']:<8} {step:<10} {seconds(each):<12} "
            f"{seconds(c['kv_token_s'] * 1e3):<17} {_error(fit)}"
        )
    bound = one["compute_bound_batch"]
    beyond = bound > max(fit["max_batch"] for fit in one["decode"])
    rows += ["", *_moves(one["migrate"], one["link_bytes_per_s"])]
    rows += ["", f"compute-bound from {_requests(bound, beyond=beyond)}"]
    if answer.get("path"):
        rows.append(f"saved as {answer['path']}")
    if answer.get("doubt"):
        again = "profile again when nothing else runs on it"
        rows += ["", fill(f"{answer['doubt']}: {again}", WIDTH)]
    return "\n".join(rows)


def _moves(migrate: Json, bytes_per_s: float) -> list[str]:
    """What moving KV costs: over all pairs of instances, and the pairs of few."""
    rows = [
        "MIGRATE  STEP       PER 1K TOKENS  BANDWIDTH   MEAN ERR  WORST",
        f"all      {seconds(migrate['alpha_s']):<10} {seconds(migrate['token_s'] * 1e3):<14} "
        f"{_bandwidth(bytes_per_s):<11} {_error(migrate)}",
    ]
    links = migrate.get("links", [])
    if 1 < len(links) <= _MOST_LINKS:
        for link in links:
            pair = "-".join(map(str, link["instances"]))
            bandwidth = _bandwidth(link["bytes_per_s"])
            rows.append(f"{pair:<8} {seconds(link['alpha_s']):<10} {'':<14} {bandwidth}")
    elif links:
        speeds = [link["bytes_per_s"] for link in links]
        least, most = _bandwidth(min(speeds)), _bandwidth(max(speeds))
        rows.append(f"pairs    {len(links)}, {least} to {most}")
    return rows


def _requests(bound: int, *, beyond: bool) -> str:
    return "more than measured" if beyond else f"{bound:,} requests"


def _bandwidth(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def check(found: Json) -> str:
    """Predictions beside measurements, the worst last, and the verdict."""
    rows = [f"profile of {found['date']}: {found['source']}"[:WIDTH], ""]
    rows.append(f"{'STEP':<46} {'PREDICTED':>10} {'MEASURED':>10} {'ERROR':>7}")
    for point in sorted(found["points"], key=lambda p: float(p["error"])):
        times = f"{seconds(point['predicted_s']):>10} {seconds(point['measured_s']):>10}"
        rows.append(f"{_what(point):<46} {times} {point['error']:>7.1%}")
    verdict = "good" if is_good(found) else f"not good: more than {GOOD_ERROR:.0%}"
    rows += [
        "",
        f"{found['num_points']} unseen batches: mean error {found['mean']:.1%}, "
        f"worst {found['worst']:.1%}: {verdict}",
    ]
    if moves := found.get("migrate"):
        bandwidth = _bandwidth(moves["bytes_per_s"])
        bound = moves["compute_bound_batch"]
        rows.append(
            f"not checked: migration {seconds(moves['alpha_s'])} and "
            f"{seconds(moves['token_s'] * 1e3)} per 1K tokens ({bandwidth});\n"
            f"compute-bound from {_requests(bound, beyond=bound > moves['max_batch'])}"
        )
    if found.get("doubt"):
        rows.append(fill(f"this profile is {found['doubt']}", WIDTH))
    if found["noise"] > _NOISY:
        rows.append(
            f"repetitions of a step typically take {found['noise']:.0%} longer than the fastest: "
            "is the machine busy?"
        )
    return "\n".join(rows)


def is_good(found: Json) -> bool:
    """Whether every prediction was near enough."""
    return bool(found["num_points"]) and float(found["worst"]) <= GOOD_ERROR


def plan(answer: Json) -> str:
    """What would happen to a prompt now."""
    if not answer["dop"]:
        return f"not served: {answer['reason']}"
    if answer.get("at_most"):
        how = "at most predicted (running answers may end earlier)"
    else:
        rough = "roughly predicted (no full profile has measured the like: loongctl profile)"
        how = rough if answer["rough"] else "predicted"
    members = f": instances {numbers(answer['members'])}" if answer["members"] else ""
    rows = [
        ("prompt", f"{answer['prompt_tokens']:,} tokens, up to {answer['max_tokens']:,} more"),
        ("group", f"dop {answer['dop']}{members}"),
        ("wait", seconds(answer["queue_s"])),
        ("prefill", seconds(answer["prefill_s"])),
        ("ttft", f"{seconds(answer['ttft_s'])} {how}"),
        ("why", answer["reason"]),
    ]
    return "\n".join(f"{name:<9} {text}" for name, text in rows)


def _error(fit: Json) -> str:
    error = fit.get("error")
    return "-" if error is None else f"{error['mean']:<9.1%} {error['worst']:.1%}"


def _what(point: Json) -> str:
    if point["phase"] == "decode":
        masters = f"{point['num_masters']} masters" if point["num_masters"] > 1 else "1 master"
        return (
            f"decode, dop {point['dop']}, {masters}, {point['batch']} over "
            f"{point['kv_tokens']:,} tokens"
        )
    return f"prefill, dop {point['dop']}: {_items(point['items'])}"[:46]


def _items(items: Sequence[Sequence[int]]) -> str:
    parts = [f"{new:,} after {cached:,}" if cached else f"{new:,}" for cached, new in items]
    return " + ".join(parts)
