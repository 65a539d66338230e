"""Tensor parallelism among workers of one machine: each sends all others its whole part.

Knows: the workers of one instance, and sums in the order of their ranks, so all get the same bits.
Does not know: sockets, other instances, the model.

Parts on a CPU are small, and few workers share an instance: with all in one step nothing is
forwarded, and nobody waits for two others in turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loongd.worker.local import LocalLinks


class LocalTensorParallel:
    """`worker.comm.TensorParallel` over connections to the other ranks."""

    def __init__(self, links: LocalLinks, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._links = links

    def all_reduce(self, x_TD: Tensor) -> None:
        total_TD, *others = self._parts(x_TD)
        for part_TD in others:
            total_TD = total_TD + part_TD
        x_TD.copy_(total_TD)

    def all_gather(self, x_BV: Tensor) -> Tensor:
        return torch.cat(self._parts(x_BV.contiguous()), dim=1)

    def smallest(self, value: int, device: torch.device) -> int:
        mine = torch.tensor([value], dtype=torch.int64, device=device)
        return min(int(part) for part in self._parts(mine))

    def _parts(self, mine: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have the same shape."""
        if not mine.numel():  # there are no empty messages
            return [mine] * self.size
        parts = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.size)]
        others = [(rank, part) for rank, part in enumerate(parts) if rank != self.rank]
        self._links.post([(rank, mine) for rank, _ in others], others).wait()
        return parts
