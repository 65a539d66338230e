"""Small prefill steps on a group: what they cost in each way that they can run, and that all of
them give the same, for any plan and many times over.

Knows: the steps and the ways. Does not know: how time is taken.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from engine_kit import Harness
from esp_chunk import chunk_step
from torch import Tensor

from loongd.wire import RunStep, Sampled, Sampling
from loongd.worker.runner import Runner

Way = Callable[[Runner, RunStep], list[Sampled]]
Left = tuple[Tensor, list[float]]
"""K and V of the last layer that a step has stored on a rank, and the drawn log-probabilities."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """A step: its members in group order, where older tokens lie and new ones will."""

    members: list[int]
    new: int
    cached: int
    places: list[int]
    keep_on: list[int]

    def step(self, harness: Harness) -> RunStep:
        """To be run once; older tokens are there."""
        if not self.cached:
            return harness.prefill(self.members, [self.new], self.keep_on)
        where = (self.cached, self.places, self.new, self.keep_on)
        return chunk_step(harness, self.members, *where)


def small(
    harness: Harness, median: Callable[..., list[float]], new: int, cached: int
) -> dict[str, Any]:
    """Seconds of a step of `new` tokens over `cached` older ones, which lie on all instances.

    On all instances as the plan is carried out (`group_s`, a graph where it is small enough), with
    launches one by one (`eager_s`), with blocks passed in a ring besides (`ring_s`); and on
    instance 0 alone with all KV there (`alone_s`). `worst_kv` and `worst_logprob` are the largest
    differences of a way to the ring's: of the KV that the last layer has stored, beside its
    largest element, and of the drawn token's log-probability. `median(members, *prepare)` measures.
    """
    everyone = harness.everyone
    plan = _Plan(everyone, new, cached, everyone, everyone)
    ways: dict[str, Way] = {"group_s": Runner.run, "eager_s": _eager, "ring_s": _in_ring}
    works = [functools.partial(_prepare, harness, way, plan) for way in ways.values()]
    figures: dict[str, Any] = {"new_tokens": new, "cached_tokens": cached}
    figures |= zip(ways, median(everyone, *works), strict=True)
    alone = _Plan([0], new, cached, [0], [0])
    (figures["alone_s"],) = median([0], functools.partial(_prepare, harness, Runner.run, alone))
    left = {name: _run(harness, way, plan, barrier=True) for name, way in ways.items()}
    for name in ("group_s", "eager_s"):
        worst = _worst(harness, _differences(left[name], left["ring_s"]))
        figures |= {f"{kind}_of_{name[:-2]}": value for kind, value in worst.items()}
    return figures


def hammer(harness: Harness, steps: int, check_every: int) -> dict[str, Any]:
    """That many small steps of random plans, each member at its own pace; every so many of them is
    run again in a ring, after a barrier, and compared as in `small`."""
    chance = random.Random(1)
    worst = (0.0, 0.0)
    began = time.perf_counter()
    for number in range(steps):
        plan = _random_plan(chance, harness.world)
        checked = number % check_every == 0
        left = _run(harness, Runner.run, plan, barrier=checked)
        if checked:
            truth = _run(harness, _in_ring, plan, barrier=True)
            kv, logprob = _differences(left, truth)
            worst = (max(worst[0], kv), max(worst[1], logprob))
    return {
        "steps": steps,
        "compared": -(-steps // check_every),
        **_worst(harness, worst),
        "steps_per_s": round(steps / (time.perf_counter() - began), 1),
    }


def _random_plan(chance: random.Random, world: int) -> _Plan:
    members = chance.sample(range(world), world)

    def some() -> list[int]:
        return sorted(chance.sample(members, chance.randint(1, world)))

    new = int(2 ** chance.uniform(0, 13.2))
    cached = int(2 ** chance.uniform(3, 14)) if chance.random() < 0.8 else 0
    return _Plan(members, new, cached, some(), some())


def _prepare(harness: Harness, way: Way, plan: _Plan) -> Callable[[], object]:
    step = plan.step(harness)
    return lambda: way(harness.runner, step)


def _eager(runner: Runner, step: RunStep) -> list[Sampled]:
    saved, runner._prefiller = runner._prefiller, None
    try:
        return runner.run(step)
    finally:
        runner._prefiller = saved


def _in_ring(runner: Runner, step: RunStep) -> list[Sampled]:
    saved = runner._row_bytes
    runner._row_bytes = dataclasses.replace(saved, gathered_rows=0)
    try:
        return _eager(runner, step)
    finally:
        runner._row_bytes = saved


def _run(harness: Harness, way: Way, plan: _Plan, *, barrier: bool) -> Left:
    step = plan.step(harness)
    (extend,) = step.batch
    drawn = msgspec.structs.replace(extend, sampling=Sampling(num_logprobs=1))
    if barrier:
        harness.barrier()
    sampled = way(harness.runner, msgspec.structs.replace(step, batch=[drawn]))
    kv = harness.runner.parts.kv
    at = torch.from_numpy(kv.slots_of([extend.segment])).to(kv.device)
    left = torch.stack(kv.read_layer(len(kv.k_LSKH) - 1, at)).float()
    harness.runner.keep([])
    return left, [one.logprob for one in sampled if one.logprob is not None]


def _differences(left: Left, truth: Left) -> tuple[float, float]:
    """Of KV, the largest beside the largest element; of log-probabilities, the largest."""
    pairs = list(zip(left[1], truth[1], strict=True))
    logprob = max((abs(mine - other) for mine, other in pairs), default=0.0)
    if not truth[0].numel():
        return 0.0, logprob
    return float((left[0] - truth[0]).abs().max() / truth[0].abs().max()), logprob


def _worst(harness: Harness, mine: tuple[float, float]) -> dict[str, float]:
    """Of all ranks."""
    everyones = harness.gather(mine)
    kinds = ("worst_kv", "worst_logprob")
    return {kind: max(one[n] for one in everyones) for n, kind in enumerate(kinds)}
