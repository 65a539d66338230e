"""A picture of a run: instances from bottom to top, time to the right, steps as boxes.

Knows: a prefill is a tall box in the colour of its longest request; in decode each request has a
lane of its own on an instance, in a light tint of its colour, over the grey box of the step; a
migration is black. Does not know: schedulers, metrics.
Needs matplotlib (the `plot` extra), imported only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from loongd.sim.outcome import Run, StepRecord

Colour = str | tuple[float, float, float]

COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22"),
    *("#17becf", "#393b79", "#637939", "#8c6d31", "#843c39", "#7b4173"),
)
DECODE_COLOUR = "#d9d9d9"
MIGRATE_COLOUR = "#000000"
PREFILL_HEIGHT, DECODE_HEIGHT = 0.9, 0.7
MOST_LANES = 24
"""Of requests that decode on an instance at the same time, so many are told apart."""
LABEL_SHARE = 0.012
"""Of the picture's width: boxes at least so wide say whose they are."""
TOGETHER_S = 1e-9


@dataclass(slots=True)
class Span:
    """From a time to a time on one instance; `owner` is a request, or empty."""

    instance: int
    owner: str
    from_s: float
    to_s: float
    lane: int = 0


def draw(run: Run, path: Path, *, from_s: float = 0.0, to_s: float | None = None) -> None:
    """Write the steps of `run` between two times as an image; the suffix gives the format."""
    to_s = run.end_s if to_s is None else to_s
    to_s = max(to_s, from_s + TOGETHER_S)
    steps = [s for s in run.steps if s.ended_s > from_s and s.started_s < to_s]
    figure = Figure(figsize=(16, 1.5 + 0.8 * run.num_instances), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_decodes(axes, [s for s in steps if s.kind == "decode"])
    prefills = _spans(s for s in steps if s.kind == "prefill")
    _draw_boxes(axes, prefills, [_colour(span.owner) for span in prefills], edge="white")
    for span in prefills:
        left_s, right_s = max(span.from_s, from_s), min(span.to_s, to_s)
        if right_s - left_s > LABEL_SHARE * (to_s - from_s):
            at = ((left_s + right_s) / 2, span.instance)
            axes.annotate(
                span.owner, at, ha="center", va="center", fontsize=6, color="white", clip_on=True
            )
    moves = _spans(s for s in steps if s.kind == "migrate")
    _draw_boxes(axes, moves, [MIGRATE_COLOUR] * len(moves), edge="white")
    axes.set_xlim(from_s, to_s)
    axes.set_ylim(-0.5, run.num_instances - 0.5)
    axes.set_yticks(range(run.num_instances), [f"instance {i}" for i in range(run.num_instances)])
    axes.set_xlabel("time, s")
    figure.legend(handles=_legend(), loc="outside upper right", ncols=4, fontsize="small")
    figure.savefig(path, dpi=120)


def lanes(steps: Iterable[StepRecord]) -> list[Span]:
    """When each request decodes on each instance, steps that follow each other at once as one span.

    A request keeps the lowest lane that is free from its first step to its last one there.
    """
    whole: dict[tuple[int, str], Span] = {}
    spans: dict[tuple[int, str], list[Span]] = {}
    for step in steps:
        for instance in step.members:
            for owner, _ in step.items:
                key = (instance, owner)
                parts = spans.setdefault(key, [])
                if parts and step.started_s - parts[-1].to_s < TOGETHER_S:
                    parts[-1].to_s = step.ended_s
                else:
                    parts.append(Span(instance, owner, step.started_s, step.ended_s))
                whole.setdefault(key, Span(*key, step.started_s, 0.0)).to_s = step.ended_s
    taken: dict[int, list[float]] = {}
    for key, life in sorted(whole.items(), key=lambda found: found[1].from_s):
        ends_s = taken.setdefault(life.instance, [])
        free = (i for i, end_s in enumerate(ends_s) if end_s < life.from_s + TOGETHER_S)
        lane = next(free, len(ends_s))
        ends_s[lane : lane + 1] = [life.to_s]
        for part in spans[key]:
            part.lane = lane
    return [part for parts in spans.values() for part in parts]


def _draw_decodes(axes: Axes, steps: Sequence[StepRecord]) -> None:
    boxes = _spans(steps)
    _draw_boxes(axes, boxes, [DECODE_COLOUR] * len(boxes), height=DECODE_HEIGHT)
    spans = lanes(steps)
    num_lanes = min(MOST_LANES, 1 + max((span.lane for span in spans), default=0))
    shown = [span for span in spans if span.lane < num_lanes]
    colours = [_tint(_colour(span.owner)) for span in shown]
    _draw_boxes(axes, shown, colours, height=DECODE_HEIGHT, num_lanes=num_lanes)


def _spans(steps: Iterable[StepRecord]) -> list[Span]:
    """Of each member of each step; the owner is the longest request."""
    return [
        Span(instance, max(step.items, key=lambda item: item[1])[0], step.started_s, step.ended_s)
        for step in steps
        for instance in step.members
    ]


def _draw_boxes(
    axes: Axes,
    spans: Sequence[Span],
    colours: Sequence[Colour],
    *,
    height: float = PREFILL_HEIGHT,
    num_lanes: int = 1,
    edge: str = "none",
) -> None:
    each = height / num_lanes
    corners = []
    for span in spans:
        low = span.instance - height / 2 + span.lane * each
        x, y = (span.from_s, span.to_s), (low, low + each)
        corners.append([(x[0], y[0]), (x[1], y[0]), (x[1], y[1]), (x[0], y[1])])
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors=edge, linewidths=0.2)
    )


def _colour(request_id: str) -> str:
    return COLOURS[int(request_id.removeprefix("r")) % len(COLOURS)]


def _tint(colour: str) -> Colour:
    red, green, blue = (0.4 + 0.6 * part for part in to_rgb(colour))
    return red, green, blue


def _legend() -> Sequence[Patch]:
    return [
        Patch(color=COLOURS[0], label="prefill (colour: its longest request)"),
        Patch(color=DECODE_COLOUR, label="decode"),
        Patch(color=_tint(COLOURS[0]), label=f"its requests, a lane each (at most {MOST_LANES})"),
        Patch(color=MIGRATE_COLOUR, label="migration"),
    ]
