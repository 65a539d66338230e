"""A later chunk of a long prompt on two instances: what the place of its older tokens costs.

Knows: the steps and what they are measured against. Does not know: how time is taken.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from engine_kit import Harness

from loongd.wire import RunStep
from loongd.worker import runner as runner_module
from loongd.worker.geometry import lay_out
from loongd.worker.layout import RowBytes, StepLayout
from loongd.worker.runner import Runner

Work = Callable[[], object]


def chunk(
    harness: Harness, median: Callable[..., list[float]], cached: int, new: int
) -> dict[str, Any]:
    """Seconds of a chunk of `new` tokens over `cached` older ones, which keeps its KV beside them.

    On instances 0 and 1: all older tokens on 0, as the plan is carried out (`one_sided_s`) and
    with queries sent to them whatever it costs (`passing_queries_s`); half of them on each
    (`spread_s`). Half of the chunk on 0 alone (`half_alone_s`) is as much work as an instance of
    two has, but for an eighth of the square of the chunk. `median(members, *prepare)` measures.
    """
    runner = harness.runner
    sent: dict[str, int] = {}

    def prepare(name: str, members: list[int], places: list[int], count: int) -> Work:
        step = chunk_step(harness, members, cached, places, count)
        how = _passing_queries if name == "passing_queries_s" else lay_out

        def work() -> None:
            if harness.rank in members:
                before = runner.parts.transport.sent_bytes
                run_laid_out(runner, step, how)
                sent[name] = runner.parts.transport.sent_bytes - before

        return work

    ways: dict[str, tuple[list[int], list[int], int]] = {
        "one_sided_s": ([0, 1], [0], new),
        "passing_queries_s": ([0, 1], [0], new),
        "spread_s": ([0, 1], [0, 1], new),
        "half_alone_s": ([0], [0], new // 2),
    }
    works = [functools.partial(prepare, name, *way) for name, way in ways.items()]
    figures = dict(zip(ways, median([0, 1], *works), strict=True))
    alone_s = figures["half_alone_s"]
    return {
        "cached_tokens": cached,
        "new_tokens": new,
        **figures,
        "one_sided_of_half_alone": figures["one_sided_s"] / alone_s,
        "passing_queries_of_half_alone": figures["passing_queries_s"] / alone_s,
        "spread_of_half_alone": figures["spread_s"] / alone_s,
        "sent_bytes_instance_0": sent,
    }


def run_laid_out(runner: Runner, step: RunStep, other: Callable[..., StepLayout]) -> None:
    """A step with another function in place of `lay_out`."""
    saved = runner_module.lay_out
    runner_module.lay_out = other
    try:
        runner.run(step)
    finally:
        runner_module.lay_out = saved


def _passing_queries(*args: Any, row_bytes: RowBytes, **kwargs: Any) -> StepLayout:
    """`lay_out` with bytes alone deciding what travels."""
    return lay_out(*args, row_bytes=dataclasses.replace(row_bytes, pair_flops=0), **kwargs)


def chunk_step(
    harness: Harness,
    members: Sequence[int],
    cached: int,
    places: Sequence[int],
    new: int,
    keep_on: Sequence[int] | None = None,
) -> RunStep:
    """A striped chunk: its older tokens lie on `places` in equal runs, and then its own do on
    `keep_on`, by default the same."""
    segment, placed = harness.fill(cached, places)
    step = harness.prefill(members, [new], places if keep_on is None else keep_on)
    (extend,) = step.batch
    holders = [member for member in members if member in placed]
    over = msgspec.structs.replace(
        extend,
        start=cached,
        cached=[segment],
        holders=holders,
        holder_tokens=[placed[member] for member in holders],
    )
    return msgspec.structs.replace(step, batch=[over])
