"""Moving tensors between the members of a group, without process groups of their own.

Knows: pairs of instances; a `Transport` posts one batch of sends and receives and waits for it.
Does not know: what the tensors mean. Members derive every exchange from the same plan, in the
same order, so two sides always agree on counts, order and shapes: no deadlock by construction.
Groups are only lists of ranks on one world: `new_group` costs 11 ms a group and its
local-synchronisation form hangs when members' histories differ. The workers of one instance have
one group of their own for tensor parallelism, made at start by all workers in the same order.
"""

from __future__ import annotations

import datetime
import queue
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from loongd.errors import WorkerError
from loongd.model import arithmetic
from loongd.worker import local
from loongd.worker.local_ranks import LocalTensorParallel


class Pending(Protocol):
    """A posted exchange."""

    def wait(self) -> None:
        """Return when all received tensors are filled (on CUDA: for the current stream)."""


class Transport(Protocol):
    """One instance's end of the world; `rank` is the instance id.

    `lingers` says whether messages may be on their way while the model computes between two calls
    of attention, as tensor parallelism must not meet them.
    """

    rank: int
    sent_bytes: int
    lingers: bool

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Pending:
        """Start sending each tensor to its instance and filling each receive buffer.

        Tensors must be contiguous, not empty, and left alone until `wait`. Between two
        instances, messages arrive in the order in which they were posted.
        """


class TensorParallel(arithmetic.TensorParallel, Protocol):
    """The workers of one instance, as all of a worker's parts need them.

    A call returns when its result is in place (on CUDA: for the current stream). It never
    overlaps with point-to-point transfers: attention has waited for all of them.
    """

    rank: int
    size: int

    def smallest(self, value: int, device: torch.device) -> int:
        """The smallest of the ranks' values."""


_TIMEOUT = datetime.timedelta(seconds=local.TIMEOUT_S)


class DistTransport:
    """A worker of the world: NCCL's point-to-point on CUDA, `worker.local` on CPU.

    Worker `instance * tensor_parallel_size + t` talks to the workers of other instances with the
    same `t`: each holds the same heads. `tensor_parallel` is its group with the other workers of
    its instance, None when there is none.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        device: torch.device,
        tensor_parallel_size: int = 1,
    ) -> None:
        """Join the world as worker `rank` of `world_size`; raises WorkerError.

        Opens a connection to every worker that this one will talk to.
        """
        self.rank = rank // tensor_parallel_size
        self.sent_bytes = 0
        self.lingers = tensor_parallel_size == 1
        self.tensor_parallel: TensorParallel | None = None
        self._local: local.LocalLinks | None = None
        self._size = tensor_parallel_size
        self._offset = rank % tensor_parallel_size
        on_gpu = device.type == "cuda"
        try:
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                # not as a URL, in which a path's "#" or "?" would end it
                store=dist.FileStore(rendezvous, world_size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=world_size,
                timeout=_TIMEOUT,
                device_id=device if on_gpu else None,
            )
            num_instances = world_size // tensor_parallel_size
            if not on_gpu:
                base = Path(f"{rendezvous}.{self._offset}")
                peers = local.connect(self.rank, num_instances, base, dist.barrier)
                self._local = local.LocalLinks(peers)
            self._open_pairs(num_instances, device)
            if tensor_parallel_size > 1:
                self.tensor_parallel = (
                    self._open_groups(world_size) if on_gpu else self._connect_ranks(rendezvous)
                )
        except (OSError, RuntimeError, ValueError) as error:
            raise WorkerError(f"instances cannot reach each other: {error}") from error

    def _open_pairs(self, num_instances: int, device: torch.device) -> None:
        # NCCL wants the first point-to-point batch from all ranks.
        mine = torch.full((1,), self.rank, dtype=torch.int64, device=device)
        others = [rank for rank in range(num_instances) if rank != self.rank]
        theirs = {rank: torch.empty_like(mine) for rank in others}
        self.post([(rank, mine) for rank in others], list(theirs.items())).wait()
        wrong = [rank for rank, seen in theirs.items() if int(seen) != rank]
        if wrong:
            raise WorkerError(f"instance {self.rank} got another's greeting from {wrong}")

    def _connect_ranks(self, rendezvous: str) -> LocalTensorParallel:
        base = Path(f"{rendezvous}.instance{self.rank}")
        peers = local.connect(self._offset, self._size, base, dist.barrier)
        links = local.LocalLinks(peers, kind="tp_rank")
        return LocalTensorParallel(links, self._offset, self._size)

    def _open_groups(self, world_size: int) -> DistTensorParallel:
        # Every worker makes every instance's group, in the same order, and keeps its own.
        size = self._size
        groups = [
            dist.new_group(list(range(first, first + size)), timeout=_TIMEOUT)
            for first in range(0, world_size, size)
        ]
        return DistTensorParallel(groups[self.rank], self._offset, size)

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Pending:
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        if self._local is not None:
            return self._local.post(sends, receives)
        ops = [dist.P2POp(dist.isend, tensor, self._worker(peer)) for peer, tensor in sends]
        ops += [dist.P2POp(dist.irecv, tensor, self._worker(peer)) for peer, tensor in receives]
        with _reaching():
            return _Works(dist.batch_isend_irecv(ops) if ops else [], [t for _, t in sends])

    def _worker(self, instance: int) -> int:
        return instance * self._size + self._offset


@contextmanager
def _reaching() -> Iterator[None]:
    """What the library says of another worker that is gone, as one line: that is no fault here.

    Raises WorkerError for it. Memory that runs out stays what it is.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first = str(error).partition("\n")[0]
        raise WorkerError(f"another worker does not answer: {first}") from error


class DistTensorParallel:
    """`TensorParallel` over a group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    def all_reduce(self, x_TD: Tensor) -> None:
        with _reaching():
            dist.all_reduce(x_TD, group=self._group)

    def all_gather(self, x_BV: Tensor) -> Tensor:
        parts = [torch.empty_like(x_BV) for _ in range(self.size)]
        with _reaching():
            dist.all_gather(parts, x_BV.contiguous(), group=self._group)
        return torch.cat(parts, dim=1)

    def smallest(self, value: int, device: torch.device) -> int:
        everyones = torch.tensor([value], dtype=torch.int64, device=device)
        with _reaching():
            dist.all_reduce(everyones, dist.ReduceOp.MIN, group=self._group)
        return int(everyones)


class _Works:
    """Keeps sent tensors alive until they have left."""

    def __init__(self, works: list[dist.Work], held: list[Tensor]) -> None:
        self._works = works
        self._held = held

    def wait(self) -> None:
        with _reaching():
            for work in self._works:
                work.wait()
        self._held.clear()


class LoopbackWorld:
    """All instances in one process, one thread each: for tests, and for a world of one."""

    def __init__(self, world_size: int, *, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self._boxes: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {
            (a, b): queue.SimpleQueue() for a in range(world_size) for b in range(world_size)
        }

    def transport(self, rank: int) -> LoopbackTransport:
        """The end of instance `rank`."""
        return LoopbackTransport(self, rank)

    def box(self, source: int, target: int) -> queue.SimpleQueue[Tensor]:
        return self._boxes[source, target]


class LoopbackTransport:
    """Copies through queues; a message that never comes is an error, not a silent wait."""

    def __init__(self, world: LoopbackWorld, rank: int) -> None:
        self.rank = rank
        self.sent_bytes = 0
        self.lingers = True
        self.world = world
        self._unfilled: deque[tuple[int, Tensor]] = deque()

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> Pending:
        for peer, tensor in sends:
            assert tensor.is_contiguous()
            assert tensor.numel()
            self.sent_bytes += tensor.nbytes
            self.world.box(self.rank, peer).put(tensor.clone())
        self._unfilled.extend(receives)
        return _Mail(self, [buffer for _, buffer in receives])

    def fill(self, buffers: Sequence[Tensor]) -> None:
        """Fill receive buffers in the order in which they were posted, up to these."""
        missing = {id(buffer) for buffer in buffers}
        while missing & {id(buffer) for _, buffer in self._unfilled}:
            peer, buffer = self._unfilled.popleft()
            try:
                message = self.world.box(peer, self.rank).get(timeout=self.world.timeout_s)
            except queue.Empty:
                raise WorkerError(f"nothing came from instance {peer}") from None
            if message.shape != buffer.shape or message.dtype != buffer.dtype:
                raise WorkerError(
                    f"instance {peer} sent {tuple(message.shape)} {message.dtype}, "
                    f"{tuple(buffer.shape)} {buffer.dtype} expected"
                )
            buffer.copy_(message)


class _Mail:
    def __init__(self, transport: LoopbackTransport, buffers: list[Tensor]) -> None:
        self._transport = transport
        self._buffers = buffers

    def wait(self) -> None:
        self._transport.fill(self._buffers)
