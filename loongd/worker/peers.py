"""Memory that the workers of a node write into each other, for exchanges without the host.

Knows: where what one worker writes for another lies, and its flags: a question (queries) and an
answer (partial output, log-sum-exp), or messages that nobody has asked for. Every worker has one
buffer with a part for each worker that may write to it.
Does not know: layers, steps, who asks whom.

A pair's question and answer each have one place: the next question leaves only after the answer
to the one before has been used, so nothing is overwritten before it was read. Messages have one
place too, and a flag on the way back that says when it is free.
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
REHEARSED_WORKERS = 2
"""Workers of a world that is only rehearsed: enough to exchange something."""


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
            [_Place(*_cut(buffer, source, shapes)) for source in range(len(buffers))]
            for buffer in buffers
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


@dataclass(frozen=True, slots=True)
class _Box:
    """One worker's for another: what the other writes here, and the flags that it raises here."""

    message: Tensor
    full: Tensor
    taken: Tensor
    """The other has read what this worker wrote into its box."""


class Boxes:
    """What workers send each other unasked: from each to each a box for one message.

    A box is empty or full. `send` fills one, `await_message` waits for that, `take` says that it
    has been read and `await_taken` waits for that: to be called between two `send` to one peer,
    and after the last one, so that every exchange finds all boxes empty and all flags 0.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        rank: int,
        *,
        length: int,
        dtype: torch.dtype,
        owner: object = None,
    ) -> None:
        """`buffers`: as for `PeerMemory`, at least `box_bytes` long; a message has at most `length`
        elements; `owner` is kept with the buffers."""
        self._owner = owner
        self._rank = rank
        self._kernels = pick("signal", buffers[rank].device)
        shapes = _box_shapes(length, dtype)
        self._boxes = [
            [_Box(*_cut(buffer, source, shapes)) for source in range(len(buffers))]
            for buffer in buffers
        ]

    def send(self, peer: int, message: Tensor) -> None:
        """Write a (contiguous) message into the (empty) box of `peer`."""
        box = self._boxes[peer][self._rank]
        self._kernels.push_rows(message, box.message, box.full)

    def await_taken(self, peer: int) -> None:
        """Hold this stream until `peer` has read what was sent last."""
        self._kernels.await_flag(self._boxes[self._rank][peer].taken)

    def await_message(self, peer: int, num_elements: int) -> Tensor:
        """What `peer` has sent, of so many elements, once it is there."""
        box = self._boxes[self._rank][peer]
        self._kernels.await_flag(box.full, self._kernels.push_counts(num_elements))
        return box.message[:num_elements]

    def take(self, peer: int) -> None:
        """Tell `peer` that its message has been read by all that this stream has done."""
        self._kernels.raise_flag(self._boxes[peer][self._rank].taken)


class PartialBoxes(Boxes):
    """Partial results that workers send each other: float32 outputs and log-sum-exps of some
    rows."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        rank: int,
        *,
        max_rows: int,
        num_heads: int,
        head_dim: int,
        owner: object = None,
    ) -> None:
        """`max_rows` is the most rows of a partial result; else as `Boxes`."""
        length = partial_length(max_rows, num_heads, head_dim)
        super().__init__(buffers, rank, length=length, dtype=torch.float32, owner=owner)
        self._heads = (num_heads, head_dim)

    def parts(self, partial: Tensor) -> tuple[Tensor, Tensor]:
        """The output (R, N, H) and the log-sum-exp (R, N) in a partial result, as views."""
        heads, head_dim = self._heads
        num_rows = len(partial) // (heads * (head_dim + 1))
        out, lse = partial.split_with_sizes((num_rows * heads * head_dim, num_rows * heads))
        return out.view(num_rows, heads, head_dim), lse.view(num_rows, heads)

    def await_partial(self, peer: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """`parts` of what `peer` has sent for so many rows, once it is there."""
        return self.parts(self.await_message(peer, partial_length(num_rows, *self._heads)))


Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def _shapes(max_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Shapes:
    rows = (max_rows, num_heads, head_dim)
    flag = ((1,), torch.int32)
    return ((rows, dtype), (rows, torch.float32), (rows[:2], torch.float32), flag, flag)


def _box_shapes(length: int, dtype: torch.dtype) -> Shapes:
    flag = ((1,), torch.int32)
    return (((length,), dtype), flag, flag)


def partial_length(num_rows: int, num_heads: int, head_dim: int) -> int:
    """Elements of a partial result of so many rows."""
    return num_rows * num_heads * (head_dim + 1)


def _part_bytes(shapes: Shapes) -> list[int]:
    exact = [prod(shape) * dtype.itemsize for shape, dtype in shapes]
    return [-(-size // _ALIGN_BYTES) * _ALIGN_BYTES for size in exact]


def buffer_bytes(
    world_size: int, max_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Length of one worker's buffer in `PeerMemory`."""
    return world_size * sum(_part_bytes(_shapes(max_rows, num_heads, head_dim, dtype)))


def box_bytes(world_size: int, length: int, dtype: torch.dtype) -> int:
    """Length of one worker's buffer in `Boxes`."""
    return world_size * sum(_part_bytes(_box_shapes(length, dtype)))


def _cut(buffer: Tensor, source: int, shapes: Shapes) -> list[Tensor]:
    """The part of a buffer that `source` writes, as tensors of these shapes."""
    sizes = _part_bytes(shapes)
    first = source * sum(sizes)
    parts = []
    for (shape, dtype), size in zip(shapes, sizes, strict=True):
        exact = prod(shape) * dtype.itemsize
        parts.append(buffer[first : first + exact].view(dtype).view(shape))
        first += size
    return parts


class MappedBuffers:
    """All workers' buffers; they are mapped for as long as this lives."""

    def __init__(self, buffers: list[Tensor], owners: tuple[object, ...]) -> None:
        self.buffers = buffers
        self._owners = owners


def map_buffers(num_bytes: int, device: torch.device) -> MappedBuffers | None:
    """All workers' buffers, zero; None where GPUs cannot map each other's memory.

    Collective over all workers of the default group, and all return the same kind of answer.
    Before there is one nothing can be sent, only rehearsed: own memory stands for the others'.
    """
    if not dist.is_initialized():
        own = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        return MappedBuffers([own] * REHEARSED_WORKERS, ())
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
