"""What a device did when: a profiler's trace reduced to sends and computing, and pictures of it.

Knows: chrome traces of torch.profiler. Does not know: attention, rings, what was run.
NCCL's point-to-point kernels and copies between devices are sends; its collectives (barriers
around what is measured) are left out; all others compute.

    python tools/esp_timeline.py RESULT_OF_BENCH_ESP.json PICTURE.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH = 100
"""Characters of a picture in text."""


def reduce_trace(trace: dict[str, Any]) -> dict[str, Any]:
    """How much of the sending was hidden, and the intervals from one send to the next.

    Returns `num_sends`, `send_us` (median), `overlapped` (the part of all sending time in which a
    kernel computed), and `intervals` around the middle send: start_us and end_us from the first
    of them, name, kind and stream.
    """
    events = sorted(_intervals(trace), key=lambda e: e["start_us"])
    sends = [e for e in events if e["kind"] == "send"]
    if not sends:
        return {"num_sends": 0, "send_us": 0.0, "overlapped": None, "intervals": []}
    busy = _union([(e["start_us"], e["end_us"]) for e in events if e["kind"] == "compute"])
    hidden_us = sum(_covered(e, busy) for e in sends)
    sending_us = sum(e["end_us"] - e["start_us"] for e in sends)
    return {
        "num_sends": len(sends),
        "send_us": round(statistics.median(e["end_us"] - e["start_us"] for e in sends), 1),
        "overlapped": round(hidden_us / sending_us, 4),
        "intervals": _around(events, sends),
    }


def _intervals(trace: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for event in trace["traceEvents"]:
        if event.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start_us, name = float(event["ts"]), str(event["name"])
        is_send = "SendRecv" in name or "PtoP" in name
        if "nccl" in name.lower() and not is_send:
            continue
        found.append(
            {
                "start_us": start_us,
                "end_us": start_us + float(event["dur"]),
                "name": _short(name),
                "kind": "send" if is_send else "compute",
                "stream": event["args"].get("stream"),
            }
        )
    return found


def _short(name: str) -> str:
    """A kernel's name without its template arguments and parameters."""
    return name.removeprefix("void ").split("<")[0].split("(")[0][:60]


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _covered(event: dict[str, Any], busy: Sequence[tuple[float, float]]) -> float:
    start, end = event["start_us"], event["end_us"]
    return sum(max(0.0, min(end, hi) - max(start, lo)) for lo, hi in busy)


def _around(events: list[dict[str, Any]], sends: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One period: from shortly before the middle send to the next one."""
    middle = sends[len(sends) // 2]
    later = [e["start_us"] for e in sends if e["start_us"] > middle["start_us"]]
    end_us = later[0] if later else middle["end_us"]
    begin_us = middle["start_us"] - 0.1 * (end_us - middle["start_us"])
    return [
        event
        | {
            "start_us": round(event["start_us"] - begin_us, 1),
            "end_us": round(event["end_us"] - begin_us, 1),
        }
        for event in events
        if event["end_us"] > begin_us and event["start_us"] < end_us
    ]


def draw_text(intervals: Sequence[dict[str, Any]]) -> list[str]:
    """Two bars of one time axis, `#` where a kind was at work."""
    if not intervals:
        return []
    last_us = max(e["end_us"] for e in intervals)
    lines = []
    for kind in ("send", "compute"):
        busy = _union([(e["start_us"], e["end_us"]) for e in intervals if e["kind"] == kind])
        cells = [last_us * i / WIDTH for i in range(WIDTH + 1)]
        bar = "".join(
            "#" if any(lo < right and hi > left for lo, hi in busy) else "."
            for left, right in itertools.pairwise(cells)
        )
        lines.append(f"{kind:>8} |{bar}|")
    lines.append(f"{'':>8}  0{'':{WIDTH - 12}}{last_us:8.0f} us")
    return lines


def draw_png(intervals: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """The same as a picture; needs matplotlib (the `plot` extra)."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(10, 2.2), layout="constrained")
    axes = figure.subplots()
    colours = {"send": "tab:orange", "compute": "tab:blue"}
    for row, (kind, colour) in enumerate(colours.items()):
        bars = [
            (max(e["start_us"], 0.0), e["end_us"] - max(e["start_us"], 0.0))
            for e in intervals
            if e["kind"] == kind
        ]
        axes.broken_barh(bars, (row - 0.35, 0.7), color=colour, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(colours)), list(colours))
    axes.set_xlabel("microseconds")
    axes.set_title(title)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Draw the timeline of a result of `bench_esp`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    found = next((case for case in result["cases"] if case["case"] == "timeline"), None)
    if found is None:
        parser.error(f"{args.result} has no timeline")
    tokens, hidden = found["tokens_per_instance"], found["overlapped"]
    title = f"{result['device']}: ring prefill, {tokens:,} tokens each, {hidden:.1%} hidden"
    draw_png(found["intervals"], args.picture, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
