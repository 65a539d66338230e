"""The tokens of a step that was queued before the one it follows had drawn them.

Knows: which step ran last on this worker and what was drawn here in it.
Does not know: how steps are computed or tokens drawn.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from loongd.errors import PlanError
from loongd.wire import RunStep, Sampled, pack_tokens


class LastDraw:
    """What the last step has drawn on this worker."""

    def __init__(self) -> None:
        self._step_id = 0
        self._tokens: dict[str, int] = {}

    def fill(self, step: RunStep) -> RunStep:
        """`step` with its tokens filled in, when it follows another; else `step` itself.

        A request that nothing was drawn for here gets token 0: this worker is not its master, so
        that only the number of its tokens counts, or nothing could be drawn for it and the
        scheduler drops what comes of it.
        Raises PlanError when the step before was not the one that `step` follows, or failed.
        """
        before, tokens = self._step_id, self._tokens
        self._step_id, self._tokens = 0, {}
        if not step.follows:
            return step
        if step.follows != before:
            last = f"step {before} was" if before else "no step was"
            raise PlanError(
                f"step {step.step_id} follows step {step.follows}, but {last} the last to run"
            )
        batch = [
            msgspec.structs.replace(extend, tokens=pack_tokens([tokens.get(extend.request_id, 0)]))
            for extend in step.batch
        ]
        return msgspec.structs.replace(step, batch=batch)

    def ran(self, step: RunStep, sampled: Iterable[Sampled]) -> None:
        """Remember a step that has run and what was drawn here."""
        self._step_id = step.step_id
        self._tokens = {one.request_id: one.token for one in sampled}
