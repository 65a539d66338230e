"""A picture of a run: instances from bottom to top, time to the right, steps as boxes.

A prefill box has the colour of its longest request, a decode box is pale, a migration black.
Needs matplotlib (the `plot` extra), imported only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from loongd.sim.outcome import Run, StepRecord

PREFILL_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22"),
    *("#17becf", "#393b79", "#637939", "#8c6d31", "#843c39", "#7b4173"),
)
DECODE_COLOURS = ("#d9d9d9", "#bdbdbd", "#a6a6a6")
MIGRATE_COLOUR = "#000000"


def draw(run: Run, path: Path, *, from_s: float = 0.0, to_s: float | None = None) -> None:
    """Write the steps of `run` between two times as an image; the suffix gives the format."""
    to_s = run.end_s if to_s is None else to_s
    steps = [s for s in run.steps if s.ended_s > from_s and s.started_s < to_s]
    figure = Figure(figsize=(16, 1.5 + 0.6 * run.num_instances), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind in ("decode", "prefill", "migrate"):
        chosen = [s for s in steps if s.kind == kind]
        boxes = [_box(step, i) for step in chosen for i in step.members]
        colours = [_colour(step) for step in chosen for _ in step.members]
        edge = "none" if kind == "decode" else "white"
        axes.add_collection(
            PatchCollection(boxes, facecolors=colours, edgecolors=edge, linewidths=0.2)
        )
    axes.set_xlim(from_s, to_s)
    axes.set_ylim(-0.5, run.num_instances - 0.5)
    axes.set_yticks(range(run.num_instances), [f"instance {i}" for i in range(run.num_instances)])
    axes.set_xlabel("time, s")
    axes.legend(handles=_legend(), loc="upper right", ncols=4, fontsize="small")
    figure.savefig(path, dpi=120)


def _box(step: StepRecord, instance: int) -> Rectangle:
    height = 0.5 if step.kind == "decode" else 0.9
    width = step.ended_s - step.started_s
    return Rectangle((step.started_s, instance - height / 2), width, height)


def _colour(step: StepRecord) -> str:
    match step.kind:
        case "prefill":
            longest = max(step.items, key=lambda item: item[1])[0]
            return PREFILL_COLOURS[_number(longest) % len(PREFILL_COLOURS)]
        case "decode":
            # More requests, darker.
            return DECODE_COLOURS[min(len(DECODE_COLOURS) - 1, len(step.items) // 16)]
        case _:
            return MIGRATE_COLOUR


def _number(request_id: str) -> int:
    return int(request_id.removeprefix("r"))


def _legend() -> Sequence[Patch]:
    return [
        Patch(color=PREFILL_COLOURS[0], label="prefill (colour: its longest request)"),
        Patch(color=DECODE_COLOURS[0], label="decode, up to 15 requests"),
        Patch(color=DECODE_COLOURS[2], label="decode, 32 and more"),
        Patch(color=MIGRATE_COLOUR, label="migration"),
    ]
