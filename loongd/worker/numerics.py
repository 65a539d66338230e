"""How a worker computes: one choice, made at start, of what must go together.

Knows: fast (the best kernels of the device) and deterministic (exact sums; the same bits however
work is batched and placed).
Does not know: the operations themselves, steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from loongd.kernels.attention import AttentionBackend, select_backend
from loongd.kernels.exact_attention import ExactBackend, ExactPartials
from loongd.kernels.partials import FloatPartials, Partials
from loongd.model.arithmetic import Arithmetic, Exact, Fast


@dataclass(frozen=True, slots=True)
class Numerics:
    """`partials` is the form of the backend's results."""

    arithmetic: Arithmetic
    backend: AttentionBackend
    partials: Partials

    @classmethod
    def choose(
        cls, device: torch.device, dtype: torch.dtype, head_dim: int, *, deterministic: bool
    ) -> Numerics:
        """For a model of this type and head size."""
        scale = head_dim**-0.5
        if deterministic:
            partials = ExactPartials(dtype, scale)
            return cls(Exact(), ExactBackend(partials), partials)
        return cls(Fast.on(device), select_backend(device, dtype, head_dim, scale), FloatPartials())
