"""What a worker's steps are made of: the model's share, its memory, and the way to the others.

Knows: what belongs together. Does not know: how any of it is made or used.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from loongd.kernels.attention import AttentionBackend
from loongd.kernels.partials import FloatPartials, Partials
from loongd.model.llama import Llama
from loongd.model.spec import ModelSpec
from loongd.worker.comm import TensorParallel, Transport
from loongd.worker.kvcache import KvCache
from loongd.worker.memory import StepBytes


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runner works with; `spec` is this worker's share of the model.

    `rehearsing`: kernels are not launched, so results are good for nothing (`worker.rehearsal`).
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    weights_bytes: int
    model: Llama
    transport: Transport
    backend: AttentionBackend
    kv: KvCache
    tensor_parallel: TensorParallel | None
    partials: Partials = field(default_factory=FloatPartials)
    step_bytes: StepBytes | None = None
    rehearsing: bool = False
