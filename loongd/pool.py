"""The worker processes of this node: started, addressed, watched, stopped.

Knows: one subprocess and one ZeroMQ identity per instance, their start-up order and their death.
Does not know: requests, plans, scheduling; it carries messages and reports losses.

Each epoch has its own socket, so a late word of an old worker can never reach a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from loongd.errors import WorkerError
from loongd.wire import (
    Audit,
    Fatal,
    Hello,
    Progress,
    Ready,
    Start,
    StepDone,
    StepFailed,
    Stop,
    ToWorker,
    decode_to_daemon,
    encode,
)

_log = logging.getLogger(__name__)
_STOP_GRACE_S = 10.0
_MAX_SOCKET_PATH = 100


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker process has ended without being asked to."""

    instance: int
    message: str


PoolEvent = StepDone | StepFailed | Audit | WorkerLost
OnProgress = Callable[[int, str, float], None]


@dataclass(slots=True)
class _Worker:
    instance: int
    process: asyncio.subprocess.Process
    watcher: asyncio.Task[None] | None = None
    last_words: str = ""


class WorkerPool:
    """All workers of one node. One `start`, then `send` and `receive`, in the end `stop`."""

    def __init__(self, *, runtime_dir: Path, startup_timeout_s: float, log_level: str) -> None:
        self._runtime_dir = runtime_dir
        self._startup_timeout_s = startup_timeout_s
        self._log_level = log_level
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._workers: dict[int, _Worker] = {}
        self._inbox: asyncio.Queue[Hello | Progress | Ready | PoolEvent] = asyncio.Queue()
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each instance."""
        return {i: worker.process.pid for i, worker in self._workers.items()}

    async def start(self, starts: list[Start], on_progress: OnProgress) -> list[Ready]:
        """Start one worker for each message and wait until all are ready, by instance.

        Raises WorkerError with the first worker's own words when one cannot start, or when none
        has shown progress for the start-up time-out.
        """
        self._stopping = False
        epoch = starts[0].epoch
        address = self._fresh_address(epoch, Path(starts[0].rendezvous))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._reader = asyncio.create_task(self._read(self._socket), name="pool-reader")
        for start in starts:
            self._workers[start.rank] = await self._spawn(start.rank, address)
        return await self._await_ready({start.rank: start for start in starts}, on_progress)

    def send(self, instance: int, message: ToWorker) -> None:
        """Queue a message for a worker; messages to one worker stay in order."""
        assert self._socket is not None
        self._socket.send_multipart([b"%d" % instance, encode(message)])

    async def receive(self) -> PoolEvent:
        """The next word from any worker, or the news of a death."""
        while True:
            event = await self._inbox.get()
            if not isinstance(event, Hello | Progress | Ready):
                return event

    async def stop(self) -> None:
        """Ask all workers to end, kill those that do not, and close the socket."""
        self._stopping = True
        for instance in self._workers:
            self.send(instance, Stop())
        await self._end_workers(_STOP_GRACE_S)

    async def kill(self) -> None:
        """End all workers at once: after a loss, survivors may wait for the dead for ever."""
        self._stopping = True
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
        await self._end_workers(_STOP_GRACE_S)

    # ---- inside --------------------------------------------------------------------------------

    def _fresh_address(self, epoch: int, rendezvous: Path) -> str:
        path = self._runtime_dir / f"workers-{epoch}.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise WorkerError(f"runtime_dir {self._runtime_dir} is too long for a socket's path")
        path.unlink(missing_ok=True)
        rendezvous.unlink(missing_ok=True)
        return f"ipc://{path}"

    async def _spawn(self, instance: int, address: str) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "loongd.worker"),
            *("--instance", str(instance), "--socket", address, "--log-level", self._log_level),
            stdin=asyncio.subprocess.DEVNULL,
        )
        worker = _Worker(instance, process)
        worker.watcher = asyncio.create_task(self._watch(worker), name=f"watch-{instance}")
        return worker

    async def _watch(self, worker: _Worker) -> None:
        code = await worker.process.wait()
        # Its last message may still be on its way through the socket.
        await asyncio.sleep(0.05)
        if self._stopping:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        words = worker.last_words or f"worker process {how}"
        self._inbox.put_nowait(WorkerLost(worker.instance, words))

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            identity, data = await socket.recv_multipart()
            try:
                message = decode_to_daemon(data)
            except msgspec.ValidationError as error:
                _log.error("instance %s sent a bad message: %s", identity.decode(), error)
                continue
            if isinstance(message, Fatal):
                self._workers[message.instance].last_words = message.message
            else:
                self._inbox.put_nowait(message)

    async def _await_ready(self, starts: dict[int, Start], on_progress: OnProgress) -> list[Ready]:
        ready: dict[int, Ready] = {}
        while len(ready) < len(starts):
            try:
                event = await asyncio.wait_for(self._inbox.get(), self._startup_timeout_s)
            except TimeoutError:
                missing = sorted(set(starts) - set(ready))
                raise WorkerError(
                    f"instances {missing} showed no progress for {self._startup_timeout_s:g} s"
                ) from None
            match event:
                case Hello():
                    on_progress(event.instance, "started", 0.0)
                    self.send(event.instance, starts[event.instance])
                case Progress():
                    on_progress(event.instance, event.stage, event.fraction)
                case Ready():
                    ready[event.instance] = event
                    on_progress(event.instance, "ready", 1.0)
                case WorkerLost():
                    raise WorkerError(f"instance {event.instance}: {event.message}")
        return [ready[instance] for instance in sorted(ready)]

    async def _end_workers(self, grace_s: float) -> None:
        processes = [worker.process for worker in self._workers.values()]
        waits = [asyncio.create_task(process.wait()) for process in processes]
        if waits:
            _, late = await asyncio.wait(waits, timeout=grace_s)
            for process in processes if late else ():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.gather(*waits)
        watchers = [w.watcher for w in self._workers.values() if w.watcher is not None]
        await asyncio.gather(*watchers)
        self._workers.clear()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._inbox = asyncio.Queue()
