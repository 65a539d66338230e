"""Random inputs, poisoned memory and tolerances for kernel tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest ||got - expected|| / ||expected|| against float64 on the same rounded inputs."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that `torch.empty` hands out is NaN (or the largest integer) inside."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def assert_close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.shape == expected.shape
    got, expected = got.double().cpu(), expected.double().cpu()
    assert not got.isnan().any()
    assert torch.equal(got.isneginf(), expected.isneginf())
    got, expected = got.nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0)
    error = (got - expected).norm() / expected.norm().clamp(min=1e-12)
    assert error <= TOLERANCE[dtype], f"relative error {error:.2e} for {dtype}"


@dataclass
class Problem:
    """Spans of queries over a pool; all slots that no span owns hold NaN."""

    q: Tensor
    k: Tensor
    v: Tensor
    slots: Tensor
    ranges: tuple[tuple[int, int, int, int], ...]
    cu_q: Tensor
    cu_k: Tensor
    scale: float

    @property
    def doubled(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v in float64 and slots, on the CPU."""
        return (
            self.q.double().cpu(),
            self.k.double().cpu(),
            self.v.double().cpu(),
            self.slots.cpu(),
        )


def make_problem(
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    slot_type: torch.dtype = torch.int64,
    seed: int = 0,
) -> Problem:
    """Random q (a view with gaps, as a fused projection gives), k and v at random slots."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    num_q, num_k = sum(q_lens), sum(k_lens)
    num_slots = num_k + 7
    qkv = torch.randn(num_q, num_heads + 2, head_dim, generator=generator)
    slots = torch.randperm(num_slots, generator=generator)[:num_k]
    pools = []
    for _ in range(2):
        pool = torch.full((num_slots, num_kv_heads, head_dim), torch.nan)
        pool[slots] = torch.randn(num_k, num_kv_heads, head_dim, generator=generator)
        pools.append(pool.to(device, dtype))
    q_ends, k_ends = list(accumulate(q_lens, initial=0)), list(accumulate(k_lens, initial=0))
    return Problem(
        q=qkv.to(device, dtype)[:, :num_heads],
        k=pools[0],
        v=pools[1],
        slots=slots.to(device, slot_type),
        ranges=tuple(zip(q_ends[:-1], q_ends[1:], k_ends[:-1], k_ends[1:], strict=True)),
        cu_q=torch.tensor(q_ends, dtype=torch.int32, device=device),
        cu_k=torch.tensor(k_ends, dtype=torch.int32, device=device),
        scale=head_dim**-0.5,
    )
