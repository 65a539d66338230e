"""A step's kernels over fixed tensors, captured once as a CUDA graph and then replayed.

Knows: how a step's numbers come from the host into the tensor that its kernels read; slots among
them (`storing`). Does not know: what else the kernels compute. Where there are no graphs they are
launched anew each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongd.kernels.pool import rope_store_kv
from loongd.model.llama import Store
from loongd.worker.kvcache import KvCache

STAGES = 4
"""Copies of a graph's numbers on the host: one is read by the device while the next is written."""
MOST_GRAPHS = 512
"""Of one kind. Each has some thousand nodes; many instances make many groups, few of which last."""
NO_GRAPHS = object()
"""In place of a pool: nothing is captured, as in a rehearsal."""


Shape = TypeVar("Shape")
Made = TypeVar("Made")


class Recent(Generic[Shape, Made]):
    """What was made for the shapes of steps asked for last."""

    def __init__(self, device: torch.device, most: int = MOST_GRAPHS) -> None:
        """`most` are kept; `device` runs what is made."""
        self._known: dict[Shape, Made] = {}
        self._device = device
        self._most = most

    def of(self, shape: Shape, make: Callable[[Shape], Made]) -> Made:
        """What was made for this shape, or is now. The one that nobody has asked for longest goes
        first, when the device is through with it."""
        known = self._known.pop(shape, None)
        if known is None:
            if len(self._known) == self._most:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                del self._known[next(iter(self._known))]
            known = make(shape)
        self._known[shape] = known
        return known


class Captured(Protocol):
    """Kernels that can be run again and again."""

    def replay(self, values: npt.NDArray[np.int32]) -> None:
        """Run them once, over these first columns of their numbers."""


def graph_pool(device: torch.device) -> Any:
    """Memory that graphs share which run one after the other; None where there are none."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def capture(run: Callable[[], None], numbers: Tensor, pool: Any) -> Captured:
    """`run` launches the kernels; they read `numbers` (int32), whose storage stays."""
    if numbers.is_cuda and pool is not NO_GRAPHS:
        return _Graph(run, numbers, pool)
    return _Direct(run, numbers)


class _Direct:
    """Kernels that are launched anew each time."""

    def __init__(self, run: Callable[[], None], numbers: Tensor) -> None:
        self._run = run
        self._numbers = numbers

    def replay(self, values: npt.NDArray[np.int32]) -> None:
        self._numbers[..., : values.shape[-1]] = torch.from_numpy(values)
        self._run()


class _Graph:
    """Captured kernels with the host's copies of their numbers."""

    def __init__(self, run: Callable[[], None], numbers: Tensor, pool: Any) -> None:
        self._numbers = numbers
        self._graph = torch.cuda.CUDAGraph()
        stages = [
            torch.zeros(numbers.shape, dtype=torch.int32, pin_memory=True) for _ in range(STAGES)
        ]
        self._stages = deque((stage, stage.numpy()) for stage in stages)
        # other threads of the process (NCCL's watchdog) may call CUDA meanwhile
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            run()

    def replay(self, values: npt.NDArray[np.int32]) -> None:
        stage, seen = self._stages[0]
        self._stages.rotate(-1)
        seen[..., : values.shape[-1]] = values
        self._numbers.copy_(stage, non_blocking=True)
        self._graph.replay()


def storing(kv: KvCache, slots_T: Tensor) -> Store:
    """Rotates queries and keys, and stores the new tokens' K and V in these slots, which are read
    when the kernels run; -1 for a token that is not kept."""

    def store(
        layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor
    ) -> None:
        pool = kv.k_LSKH[layer], kv.v_LSKH[layer]
        rope_store_kv(q_TNH, k_TKH, v_TKH, cos_TH, sin_TH, slots_T, *pool)

    return store
