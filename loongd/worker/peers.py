"""Memory that the workers of a node write into each other, for exchanges without the host.

Knows: where a question (queries) and an answer (partial output, log-sum-exp) of each pair lie, and
their flags. Every worker has one buffer with a part for each worker that may write to it.
Does not know: layers, steps, who asks whom.

A pair's question and answer each have one place: the next question leaves only after the answer
to the one before has been used, so nothing is overwritten before it was read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from loongd.kernels.dispatch import pick

_log = logging.getLogger(__name__)
_ALIGN_BYTES = 256


@dataclass(frozen=True, slots=True)
class _Place:
    """What one worker writes into another's buffer: (R, N, H), answer's lse (R, N), flags."""

    question: Tensor
    answer: Tensor
    answer_lse: Tensor
    asked: Tensor
    answered: Tensor


class PeerMemory:
    """All workers' buffers, as mapped on this worker's device."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        rank: int,
        *,
        max_rows: int,
        num_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        owner: object = None,
    ) -> None:
        """`buffers`: by worker, uint8, at least `buffer_bytes` long, zero; `buffers[rank]` is own.

        `max_rows` is the most rows of a question; `owner` is kept with the buffers.
        """
        self._owner = owner
        self._rank = rank
        self._kernels = pick("signal", buffers[rank].device)
        shapes = _shapes(max_rows, num_heads, head_dim, dtype)
        self._places = [
            [_place(buffer, source, shapes) for source in range(len(buffers))] for buffer in buffers
        ]

    def ask(self, peer: int, q_RNH: Tensor) -> None:
        """Send queries (contiguous) to `peer`."""
        place = self._places[peer][self._rank]
        self._kernels.push_rows(q_RNH, place.question, place.asked)

    def await_question(self, peer: int, num_rows: int) -> Tensor:
        """The queries of `peer`, once they are there."""
        place = self._places[self._rank][peer]
        q_RNH = place.question[:num_rows]
        self._kernels.await_flag(place.asked, self._kernels.push_counts(q_RNH.numel()))
        return q_RNH

    def answer_place(self, peer: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Where the answer to `peer` is to be written, in its memory: output and log-sum-exp."""
        place = self._places[peer][self._rank]
        return place.answer[:num_rows], place.answer_lse[:num_rows]

    def answered(self, peer: int) -> None:
        """Tell `peer` that its answer is there, after all that this stream has done."""
        self._kernels.raise_flag(self._places[peer][self._rank].answered)

    def await_answer(self, peer: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """The answer of `peer`, once it is there."""
        place = self._places[self._rank][peer]
        self._kernels.await_flag(place.answered)
        return place.answer[:num_rows], place.answer_lse[:num_rows]


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def _shapes(max_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Shapes:
    rows = (max_rows, num_heads, head_dim)
    flag = ((1,), torch.int32)
    return ((rows, dtype), (rows, torch.float32), (rows[:2], torch.float32), flag, flag)


def _part_bytes(shapes: Shapes) -> list[int]:
    exact = [prod(shape) * dtype.itemsize for shape, dtype in shapes]
    return [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in exact]


def buffer_bytes(
    world_size: int, max_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Length of one worker's buffer."""
    return world_size * sum(_part_bytes(_shapes(max_rows, num_heads, head_dim, dtype)))


def _place(buffer: Tensor, source: int, shapes: Shapes) -> _Place:
    sizes = _part_bytes(shapes)
    first = source * sum(sizes)
    parts = []
    for (shape, dtype), size in zip(shapes, sizes, strict=True):
        exact = prod(shape) * dtype.itemsize
        parts.append(buffer[first : first + exact].view(dtype).view(shape))
        first += size
    return _Place(*parts)


class MappedBuffers:
    """All workers' buffers; they are mapped for as long as this lives."""

    def __init__(self, buffers: list[Tensor], owners: tuple[object, ...]) -> None:
        self.buffers = buffers
        self._owners = owners


def map_buffers(num_bytes: int, device: torch.device) -> MappedBuffers | None:
    """All workers' buffers, zero; None where GPUs cannot map each other's memory.

    Collective over all workers of the default group, and all return the same kind of answer.
    """
    owners: tuple[object, ...] = ()
    try:
        symmetric = import_module("torch.distributed._symmetric_memory")
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device).zero_()
        handle = symmetric.rendezvous(own, dist.group.WORLD)
        owners = (own, handle)
        buffers = [
            handle.get_buffer(peer, (num_bytes,), torch.uint8)
            for peer in range(dist.get_world_size())
        ]
    except (ImportError, RuntimeError) as error:
        _log.warning("GPUs cannot write to each other: %s", error)
        buffers = []
    torch.cuda.synchronize(device)
    mapped = torch.tensor([len(buffers)], dtype=torch.int64, device=device)
    dist.all_reduce(mapped, dist.ReduceOp.MIN)
    return MappedBuffers(buffers, owners) if int(mapped) else None
