"""Steps that stop between two layers, so that others run in between.

Knows: how far a step has come, and which of them have layers left. Between two layers a step
holds its hidden states, the next layer's queries, keys and values, and its slots; the K and V of
the layers that are done are in the pool.
Does not know: why a step pauses, what runs meanwhile, when it goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass

from torch import Tensor

from loongd.errors import PlanError
from loongd.model.llama import run_until
from loongd.wire import RunStep
from loongd.worker.attention import EspAttention
from loongd.worker.layout import StepLayout


@dataclass(slots=True)
class LayerRun:
    """A step on its way through the layers; `segments` are those that it writes."""

    layout: StepLayout
    attention: EspAttention
    layers: Generator[int, None, Tensor]
    segments: frozenset[int]

    def advance(self, until_layer: int) -> Tensor | None:
        """Run up to that layer, or to the end if it is 0: hidden states (B, D) of the sampled rows
        at the end, None before. In inference mode; collective over the members.

        Raises PlanError when there is no such layer ahead.
        """
        hidden_BD = run_until(self.layers, until_layer)
        if hidden_BD is None:
            self.attention.settle()
        elif until_layer:
            raise PlanError(f"no layer {until_layer} is ahead to pause before")
        return hidden_BD


class PausedSteps:
    """Those of one worker, by the id of the step that paused."""

    def __init__(self) -> None:
        self._runs: dict[int, LayerRun] = {}

    def put(self, step_id: int, run: LayerRun) -> None:
        """It has layers left."""
        self._runs[step_id] = run

    def take(self, step: RunStep) -> LayerRun:
        """The one whose other layers `step` runs. Raises PlanError when it is not here."""
        run = self._runs.pop(step.resumes, None)
        if run is None:
            raise PlanError(
                f"step {step.step_id} resumes step {step.resumes}, which is not paused here"
            )
        return run

    def num_tokens(self, step_id: int) -> int:
        """New tokens of this instance in a step that is paused; 0 when it is not here."""
        run = self._runs.get(step_id)
        return 0 if run is None else len(run.layout.tokens)

    def forget(self, segments: Collection[int]) -> None:
        """Give up those that write any of these segments."""
        gone = [i for i, run in self._runs.items() if not run.segments.isdisjoint(segments)]
        for step_id in gone:
            del self._runs[step_id]

    def keep(self, segments: Collection[int]) -> None:
        """Give up each that writes any segment not among these."""
        gone = [i for i, run in self._runs.items() if not run.segments.issubset(segments)]
        for step_id in gone:
            del self._runs[step_id]

    def __len__(self) -> int:
        return len(self._runs)
