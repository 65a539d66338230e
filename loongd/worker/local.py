"""Messages between workers of one machine, over sockets that the worker's own thread serves.

Knows: connections to peers; messages that have not left or come yet, in order; when to look again
and when to sleep. Does not know: what messages mean, who the peers are, tensor parallelism.

A library with threads of its own hands every message from thread to thread, and each hand-over may
wait for a core. Two processes on two cores that exchange 8 KB each way after 0.5 ms of work wait
820 us for that with gloo (p99 5 ms), 7 us with sockets that nobody else serves (p99 73 us).
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from loongd.errors import WorkerError

TIMEOUT_S = 120.0
_SPIN_S = 50e-6
"""How long to look again and again before sleeping. Two processes on two cores wait 19 us (p99 84)
for 8 KB of each other; without it 25 (509), with 200 us 14 (36). But beside other work a longer one
takes the core that they need: four members on two busy cores took 61 ms a decode step of a 135M
model with this, 66 with 200 us, 85 with 5 ms."""
_BUFFER_BYTES = 4 << 20
"""What a socket is asked to hold, so that messages leave while their receiver computes."""
_MOST_VIEWS = 64
"""Messages of one system call."""
_NAME_BYTES = 8


class LocalLinks:
    """A stream socket to each peer, with `worker.comm.Transport`'s `post`.

    `post` hands the sockets what they take at once. Whoever waits, for whichever exchange, moves
    the messages of all peers, in both directions: members that send each other any amount go on.
    """

    def __init__(
        self,
        peers: Mapping[int, socket.socket],
        *,
        kind: str = "instance",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`peers`: connected sockets; `kind` is what errors call a peer. `timeout_s`: the longest
        silence that a wait bears."""
        self._timeout_s = timeout_s
        self._links = {peer: _Link(f"{kind} {peer}", end) for peer, end in peers.items()}

    def post(
        self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]
    ) -> LocalExchange:
        links = self._links
        lasts = {peer: links[peer].leaving.add(tensor) for peer, tensor in sends}
        marks = [(links[peer].leaving, last) for peer, last in lasts.items()]
        for peer in lasts:
            links[peer].send()
        lasts = {peer: links[peer].arriving.add(tensor) for peer, tensor in receives}
        marks += [(links[peer].arriving, last) for peer, last in lasts.items()]
        return LocalExchange(self, marks)

    def move_until_over(self, marks: Sequence[_Mark]) -> None:
        """Move messages until the marked ones have left and come.

        Raises WorkerError when a peer is gone, or when nothing moves for too long.
        """
        last_moved = time.monotonic()
        while any(queue.num_over < last for queue, last in marks):
            num_moved = sum(link.move() for link in self._links.values())
            if num_moved:
                last_moved = time.monotonic()
            elif time.monotonic() < last_moved + _SPIN_S:
                os.sched_yield()
            else:
                self._sleep(last_moved + self._timeout_s)

    def _sleep(self, until: float) -> None:
        """Until something can move."""
        poll = select.poll()
        waiting = [link for link in self._links.values() if link.events]
        for link in waiting:
            poll.register(link.socket, link.events)
        if not poll.poll(max(0.0, 1000 * (until - time.monotonic()))):
            names = ", ".join(link.name for link in waiting)
            raise _no_answer(f"nothing came from or went to {names} in {self._timeout_s:g} s")

    def close(self) -> None:
        """Peers that wait for this end find it gone."""
        for link in self._links.values():
            link.socket.close()


class LocalExchange:
    """One `LocalLinks.post`, over when its last message from and to each peer is."""

    def __init__(self, links: LocalLinks, marks: list[_Mark]) -> None:
        self._links = links
        self._marks = marks

    def wait(self) -> None:
        self._links.move_until_over(self._marks)


@dataclass(slots=True)
class _Queue:
    """Messages in one direction, as what is left of their bytes; these keep the tensors alive."""

    views: deque[memoryview] = field(default_factory=deque)
    num_posted: int = 0
    num_over: int = 0

    def add(self, tensor: Tensor) -> int:
        """The message's number, from 1."""
        assert tensor.is_contiguous()
        assert tensor.numel()
        self.views.append(tensor.view(-1).view(torch.uint8).numpy().data)
        self.num_posted += 1
        return self.num_posted

    def next(self) -> list[memoryview]:
        return list(islice(self.views, _MOST_VIEWS))

    def moved(self, num_bytes: int) -> None:
        views = self.views
        while num_bytes:
            first = views[0]
            if num_bytes < len(first):
                views[0] = first[num_bytes:]
                return
            num_bytes -= len(first)
            views.popleft()
            self.num_over += 1


_Mark = tuple[_Queue, int]
"""A queue, and the number of the message that it has to come to."""


class _Link:
    """A socket, and what has to go over it. Raises WorkerError when the other end is gone."""

    def __init__(self, name: str, end: socket.socket) -> None:
        self.name = name
        self.socket = end
        self.leaving = _Queue()
        self.arriving = _Queue()
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)

    @property
    def events(self) -> int:
        """What to poll for."""
        return (select.POLLIN if self.arriving.views else 0) | (
            select.POLLOUT if self.leaving.views else 0
        )

    def move(self) -> bool:
        """One system call in each direction in which messages wait; whether bytes have moved."""
        return self.receive() | self.send()

    def send(self) -> bool:
        if not self.leaving.views:
            return False
        try:
            num_bytes = self.socket.sendmsg(self.leaving.next())
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone(error) from error
        self.leaving.moved(num_bytes)
        return True

    def receive(self) -> bool:
        if not self.arriving.views:
            return False
        try:
            num_bytes = self.socket.recvmsg_into(self.arriving.next())[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._gone(error) from error
        if num_bytes == 0:
            raise _no_answer(f"{self.name} has closed its connection")
        self.arriving.moved(num_bytes)
        return True

    def _gone(self, error: OSError) -> WorkerError:
        return _no_answer(f"{self.name}: {error.strerror}")


def _no_answer(why: str) -> WorkerError:
    return WorkerError(f"another worker does not answer: {why}")


def connect(
    rank: int, num_ranks: int, base: Path, all_listen: Callable[[], object]
) -> dict[int, socket.socket]:
    """Connections with all other ranks on this machine, by rank; each rank calls this.

    Args:
        base: ranks listen beside it, at its name with a suffix; only this user can connect.
        all_listen: returns when all ranks have called it.

    Raises OSError, or WorkerError when one that connects is none of the ranks.
    """
    directory = os.open(base.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    # an address has room for 107 bytes; a directory's path may be longer, its descriptor is not
    addresses = [f"/proc/self/fd/{directory}/{base.name}.{peer}" for peer in range(num_ranks)]
    own = Path(addresses[rank])
    own.unlink(missing_ok=True)
    try:
        with ExitStack() as opened, _stream() as listener:
            listener.bind(str(own))
            own.chmod(0o600)  # before `listen` nobody connects
            listener.listen(num_ranks)
            all_listen()
            peers: dict[int, socket.socket] = {}
            for peer in range(rank):
                end = peers[peer] = opened.enter_context(_stream())
                end.connect(addresses[peer])
                end.sendall(rank.to_bytes(_NAME_BYTES, "little"))
            for _ in range(rank + 1, num_ranks):
                end = opened.enter_context(listener.accept()[0])
                end.settimeout(TIMEOUT_S)
                name = end.recv(_NAME_BYTES, socket.MSG_WAITALL)
                peers[int.from_bytes(name, "little")] = end
            if sorted({*peers, rank}) != list(range(num_ranks)):
                raise WorkerError(f"rank {rank} of {num_ranks} has met {sorted(peers)}")
            opened.pop_all()
            return peers
    finally:
        own.unlink(missing_ok=True)
        os.close(directory)


def _stream() -> socket.socket:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(TIMEOUT_S)
    return end
