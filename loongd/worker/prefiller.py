"""Small prefill steps from the plan to the report, where they run as graphs.

Knows: which steps have a graph, and how numbers, graphs and drawn tokens belong together.
Does not know: steps of other kinds, sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from torch import Tensor

from loongd.model.sampler import begin_sample
from loongd.wire import Extend, RunStep, Sampling
from loongd.worker.flight import Airborne, Flight, Undrawn
from loongd.worker.prefill_graphs import PrefillGraphs, PrefillParts
from loongd.worker.prefill_layout import BUCKETS, PrefillShape, bucket_of, lay_out_prefill


class Prefiller:
    """Runs small steps of a worker that is all of its instance, alone in its group."""

    def __init__(self, parts: PrefillParts, graphs: PrefillGraphs, rank: int) -> None:
        self._parts = parts
        self._graphs = graphs
        self._rank = rank

    @property
    def buckets(self) -> tuple[int, ...]:
        """Numbers of new tokens to which steps are padded."""
        return BUCKETS

    def capture(self) -> Iterator[float]:
        """Capture all buckets; yields the fraction done."""
        return self._graphs.capture()

    def shape_of(self, step: RunStep) -> PrefillShape | None:
        """The step's shape; None when it must run another way."""
        bucket = bucket_of(step, self._rank)
        return None if bucket is None else self._graphs.shape_of(bucket)

    def launch(self, step: RunStep, shape: PrefillShape) -> Flight:
        """Start a step. Raises PlanError for a plan that contradicts the pool, or when that is
        full; the pool is then as before."""
        grown: list[tuple[int, int]] = []
        with ExitStack() as undo:
            undo.callback(self._parts.kv.take_back, grown)
            numbers = lay_out_prefill(step, self._rank, shape, self._parts.table, grown)
            hidden_BD = self._graphs.launch(numbers)
            if hidden_BD is None:
                flight = Airborne(Undrawn(self._parts.kv.device), ())
            else:
                flight = self._draw(hidden_BD, numbers.sampled)
            undo.pop_all()
        return flight

    def _draw(self, hidden_BD: Tensor, sampled: tuple[Extend, ...]) -> Airborne:
        """As the eager way does it: the head is one product, launched while the layers run."""
        logits_BV = self._parts.model.logits(hidden_BD)
        params = [extend.sampling or Sampling() for extend in sampled]
        positions = [extend.start + len(extend.tokens) // 4 for extend in sampled]
        return Airborne(begin_sample(logits_BV, params, positions), sampled)
