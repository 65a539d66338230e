"""Small prefill steps from the plan to the report, where they run as graphs.

Knows: which steps have a graph, alone or on a group, and how numbers, graphs and drawn tokens
belong together.
Does not know: steps of other kinds, sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from loongd.model.sampler import begin_sample
from loongd.wire import Extend, PaddedSizes, RunStep, Sampling
from loongd.worker.flight import Airborne, Flight, Landed, Undrawn
from loongd.worker.group_graphs import GroupGraphs, GroupSpace
from loongd.worker.group_layout import GroupShape, GroupWork, lay_out_group
from loongd.worker.prefill_graphs import PrefillGraphs, PrefillParts
from loongd.worker.prefill_layout import (
    BUCKETS,
    PrefillShape,
    bucket_of,
    is_lone,
    lay_out_prefill,
)
from loongd.worker.striped_graphs import StripedGraphs
from loongd.worker.striped_layout import StripedShape, StripedWork, lay_out_striped, padded_sizes
from loongd.worker.validate import validate

StepShape = PrefillShape | StripedShape | GroupShape | GroupWork
"""Of a step alone, of one on a group that shares its rows, or whose members compute all of them,
and of one in which this member has no part."""


class Prefiller:
    """Runs small steps of a worker that is all of its instance."""

    def __init__(
        self,
        parts: PrefillParts,
        graphs: PrefillGraphs,
        rank: int,
        group: GroupGraphs | None = None,
        striped: StripedGraphs | None = None,
        *,
        num_instances: int = 1,
    ) -> None:
        """Without `group` and `striped`, steps on several instances run another way."""
        self._parts = parts
        self._graphs = graphs
        self._rank = rank
        self._group = group
        self._striped = striped
        self._num_instances = num_instances

    @classmethod
    def build(cls, parts: PrefillParts, rank: int, world_size: int, pool: Any) -> Prefiller:
        """Maps the peers' memory: collective over all workers, each of them a whole instance.

        `pool` is memory of other graphs.
        """
        space = GroupSpace.map(parts, rank, world_size)
        group = GroupGraphs(parts, space, pool) if space is not None else None
        striped = StripedGraphs.map(parts, space, world_size, pool)
        alone = PrefillGraphs(parts, pool)
        return cls(parts, alone, rank, group, striped, num_instances=world_size)

    def padded_sizes(self) -> dict[int, PaddedSizes]:
        """As a worker tells them (`wire.Ready`)."""
        alone = list(BUCKETS)
        sizes = {1: PaddedSizes(alone, alone)}
        for dop in range(2, self._num_instances + 1):
            sizes[dop] = PaddedSizes(alone, alone)
            if self._striped is not None:
                prompts, chunks = (padded_sizes(dop, older=older) for older in (False, True))
                sizes[dop] = PaddedSizes(prompts, chunks)
        return sizes

    def capture(self) -> Iterator[float]:
        """Capture all buckets; yields the fraction done."""
        captures = [self._graphs.capture()]
        if self._group is not None:
            captures.append(self._group.capture())
        if self._striped is not None:
            captures.append(self._striped.capture())
        for number, capture in enumerate(captures):
            for fraction in capture:
                yield (number + fraction) / len(captures)

    def shape_of(self, step: RunStep) -> StepShape | None:
        """The step's shape; None when it must run another way, on all of its members."""
        bucket = bucket_of(step, self._rank)
        if bucket is not None:
            return self._graphs.shape_of(bucket, is_lone=is_lone(step))
        dealt = None if self._striped is None else StripedWork.of(step)
        if self._striped is not None and dealt is not None:
            return self._striped.shape_of(dealt)
        work = None if self._group is None else GroupWork.of(step)
        if self._group is None or work is None or not self._group.can_run(work):
            return None
        return self._group.shape_of(work) if self._rank in work.workers else work

    def launch(self, step: RunStep, shape: StepShape) -> Flight:
        """Start a step. Raises PlanError for a plan that contradicts the pool, or when that is
        full; the pool is then as before."""
        grown: list[tuple[int, int]] = []
        with ExitStack() as undo:
            undo.callback(self._parts.kv.take_back, grown)
            match shape:
                case PrefillShape():
                    flight = self._alone(step, shape, grown)
                case StripedShape():
                    flight = self._dealt(step, shape, grown)
                case GroupShape():
                    flight = self._together(step, shape, grown)
                case GroupWork():
                    validate(step, self._rank)
                    flight = Landed([])
            undo.pop_all()
        return flight

    def _alone(self, step: RunStep, shape: PrefillShape, grown: list[tuple[int, int]]) -> Flight:
        numbers = lay_out_prefill(step, self._rank, shape, self._parts.table, grown)
        return self._draw(self._graphs.launch(numbers), numbers.sampled)

    def _together(self, step: RunStep, shape: GroupShape, grown: list[tuple[int, int]]) -> Flight:
        assert self._group is not None
        numbers = lay_out_group(step, shape, self._parts.kv, self._parts.table, grown)
        return self._draw(self._group.launch(numbers), numbers.sampled)

    def _dealt(self, step: RunStep, shape: StripedShape, grown: list[tuple[int, int]]) -> Flight:
        assert self._striped is not None
        numbers = lay_out_striped(step, shape, self._parts.kv, self._parts.table, grown)
        return self._draw(self._striped.launch(numbers), numbers.sampled)

    def _draw(self, hidden_BD: Tensor | None, sampled: tuple[Extend, ...]) -> Flight:
        """As the eager way does it: the head is one product, launched while the layers run."""
        if hidden_BD is None:
            return Airborne(Undrawn(self._parts.kv.device), ())
        logits_BV = self._parts.model.logits(hidden_BD)
        params = [extend.sampling or Sampling() for extend in sampled]
        positions = [extend.start + len(extend.tokens) // 4 for extend in sampled]
        return Airborne(begin_sample(logits_BV, params, positions), sampled)
