"""Whether a step's work has room in memory: asked before a large step, and what to say when not.

Knows: how much a step of so many tokens takes (`memory.StepBytes`), and how the workers of a step
come to one answer before the first of them waits for another in vain.
Does not know: how a step runs, what becomes of its requests.
"""

from __future__ import annotations

import torch

from loongd.errors import StepRefusedError, WorkerError
from loongd.wire import RunStep
from loongd.worker.comm import TensorParallel, Transport
from loongd.worker.memory import StepBytes

LEAST_CHECKED_TOKENS = 4096
"""New tokens of one member from which a step is checked: the reserve is large enough for less."""
_ADVICE = "lower max_step_tokens or gpu_memory_utilization"


class Room:
    """One worker's memory for the work of steps."""

    def __init__(
        self,
        step_bytes: StepBytes | None,
        transport: Transport,
        tensor_parallel: TensorParallel | None,
        device: torch.device,
    ) -> None:
        """`step_bytes` is None where nothing was measured, on all workers or on none."""
        self.instance = transport.rank
        self._step_bytes = step_bytes
        self._transport = transport
        self._tensor_parallel = tensor_parallel
        self._device = device

    def agree(self, step: RunStep) -> None:
        """Make sure that a large step that several workers run has room on all of them.

        Collective over the workers of the step's members, as one worker that runs out of memory
        later would leave the others waiting. Raises StepRefusedError on all of them or on none.
        """
        tokens = max(new_tokens(step, member) for member in step.members)
        shared = len(step.members) > 1 or self._tensor_parallel is not None
        if self._step_bytes is None or not shared or tokens < LEAST_CHECKED_TOKENS:
            return
        keys_travel = len(step.members) > 1 and any(e.holders for e in step.batch)
        wanted_bytes = self._step_bytes.of(tokens, keys_travel=keys_travel)
        fits = self.fits(wanted_bytes)
        if self._tensor_parallel is not None:
            fits = bool(self._tensor_parallel.smallest(int(fits), self._device))
        short = self._short_of_it(step.members, fits=fits)
        if short:
            raise StepRefusedError(
                f"a step of {tokens:,} new tokens an instance takes {wanted_bytes / 2**30:,.1f} "
                f"GiB, which instances {short} do not have; {_ADVICE}"
            )

    def fits(self, wanted_bytes: int) -> bool:
        """Whether so much can be had now: it is taken in one block and given back."""
        try:
            torch.empty(wanted_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return False
        return True

    def ran_out(self, num_tokens: int) -> WorkerError:
        """Give cached memory back after torch's OutOfMemoryError in a step of so many new tokens of
        this instance; the error to raise instead.

        To be called when the first error is gone: its traceback holds the step's tensors.
        """
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        return WorkerError(
            f"out of memory in a step of {num_tokens:,} new tokens on instance {self.instance}; "
            f"{_ADVICE}"
        )

    def _short_of_it(self, members: list[int], *, fits: bool) -> list[int]:
        """The members that have no room, after all have told each other."""
        mine = torch.full((1,), int(fits), dtype=torch.int32, device=self._device)
        flags = {m: torch.empty_like(mine) if m != self.instance else mine for m in members}
        others = [(member, flag) for member, flag in flags.items() if member != self.instance]
        self._transport.post([(member, mine) for member, _ in others], others).wait()
        answers = torch.cat(list(flags.values())).tolist()
        return [member for member, answer in zip(flags, answers, strict=True) if not answer]


def new_tokens(step: RunStep, member: int) -> int:
    """New tokens of the step that this member computes: of a striped request, every DoP-th."""
    first, dop, count = step.members.index(member), len(step.members), 0
    for extend in step.batch:
        tokens = len(extend.tokens) // 4
        if extend.master is None:
            count += len(range(first, tokens, dop))
        elif extend.master == member:
            count += tokens
    return count
