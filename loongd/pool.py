"""The worker processes of this node: started, addressed, watched, stopped.

Knows: one subprocess and one ZeroMQ identity per worker, which workers make up an instance, their
start-up order and their death. To its users an instance is one: a message for it goes to all its
workers, its step is done when all have done it, and it is lost with any of them.
Does not know: requests, plans, scheduling; it carries messages and reports losses.

Each epoch has its own socket, so a late word of an old worker can never reach a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from loongd.errors import WorkerError
from loongd.vigil import Vigil
from loongd.wire import (
    Audit,
    Beat,
    Fatal,
    Hello,
    Progress,
    Ready,
    RunMigrate,
    RunStep,
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
_VIGIL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker process of an instance has ended without being asked to."""

    instance: int
    message: str

    def words(self, instance: int) -> str:
        """Why an instance is gone: all start again with the one that was lost."""
        culprit = "" if instance == self.instance else f"with {self.instance}: "
        return culprit + self.message


PoolEvent = StepDone | StepFailed | Audit | WorkerLost
OnProgress = Callable[[int, str, float], None]


@dataclass(slots=True)
class _Worker:
    instance: int
    tp_rank: int
    name: str
    process: asyncio.subprocess.Process
    watcher: asyncio.Task[None] | None = None
    last_words: str = ""


class StepParts:
    """Makes the reports of an instance's workers into the instance's report."""

    def __init__(self, tensor_parallel_size: int) -> None:
        self._size = tensor_parallel_size
        self._parts: dict[tuple[int, int], list[StepDone | StepFailed]] = {}

    def add(self, report: StepDone | StepFailed) -> StepDone | StepFailed | None:
        """Take one worker's report; the whole when it was the last of its instance and step.

        One failure makes the whole a failure; else time is the slowest worker's.
        """
        key = (report.instance, report.step_id)
        parts = self._parts.setdefault(key, [])
        parts.append(report)
        if len(parts) < self._size:
            return None
        del self._parts[key]
        failed = next((part for part in parts if isinstance(part, StepFailed)), None)
        if failed is not None:
            return failed
        done = [part for part in parts if isinstance(part, StepDone)]
        return StepDone(
            instance=report.instance,
            step_id=report.step_id,
            elapsed_s=max(part.elapsed_s for part in done),
            sampled=[sampled for part in done for sampled in part.sampled],
        )


def merge_ready(parts: list[Ready]) -> Ready:
    """What an instance offers: the fewest slots of its workers, and the sum of their bytes."""
    return msgspec.structs.replace(
        parts[0],
        pool_tokens=min(part.pool_tokens for part in parts),
        kv_bytes_per_token=sum(part.kv_bytes_per_token for part in parts),
        weights_bytes=sum(part.weights_bytes for part in parts),
    )


class WorkerPool:
    """All workers of one node. One `start`, then `send` and `receive`, in the end `stop`."""

    def __init__(
        self, *, runtime_dir: Path, startup_timeout_s: float, vigil: Vigil, log_level: str
    ) -> None:
        self._runtime_dir = runtime_dir
        self._startup_timeout_s = startup_timeout_s
        self._log_level = log_level
        self._vigil = vigil
        self._watcher: asyncio.Task[None] | None = None
        self._all_ready = False
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self._workers: dict[bytes, _Worker] = {}
        self._parts = StepParts(1)
        self._inbox: asyncio.Queue[tuple[_Worker, Hello | Progress | Ready | PoolEvent]] = (
            asyncio.Queue()
        )
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pids(self) -> dict[int, list[int]]:
        """Process ids of each instance's workers, by tp rank."""
        found: dict[int, list[int]] = {}
        for worker in self._workers.values():
            found.setdefault(worker.instance, []).append(worker.process.pid)
        return found

    async def start(self, starts: list[Start], on_progress: OnProgress) -> list[Ready]:
        """Start one worker for each message and wait until all are ready; one answer an instance.

        Raises WorkerError with the first worker's own words when one cannot start, or when none
        has shown progress for the start-up time-out.
        """
        self._stopping = False
        epoch = starts[0].epoch
        address = self._fresh_address(epoch)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.bind(address)
        self._reader = asyncio.create_task(self._read(self._socket), name="pool-reader")
        self._parts = StepParts(starts[0].tensor_parallel_size)
        for start in starts:
            self._workers[_identity(start.instance, start.tp_rank)] = await self._spawn(
                start, address
            )
        ready = await self._await_ready(starts, on_progress)
        now = time.monotonic()
        for name in self._workers:
            self._vigil.begin(name, now)
        self._watcher = asyncio.create_task(self._keep_vigil(), name="vigil")
        self._all_ready = True
        return ready

    def send(self, instance: int, message: ToWorker) -> None:
        """Queue a message for all workers of an instance; messages to one stay in order."""
        data = encode(message)
        now = time.monotonic()
        for name, worker in self._workers.items():
            if worker.instance == instance:
                self._post(worker, data)
                if isinstance(message, RunStep | RunMigrate):
                    self._vigil.given_step(name, now)

    async def receive(self) -> PoolEvent:
        """The next word from any worker, or the news of a death."""
        while True:
            _, event = await self._inbox.get()
            if not isinstance(event, Hello | Progress | Ready):
                return event

    async def stop(self) -> None:
        """Ask all workers to end, kill those that do not, and close the socket."""
        if not self._all_ready:  # some do not listen yet
            await self.kill()
        self._stopping = True
        for worker in self._workers.values():
            self._post(worker, encode(Stop()))
        await self._end_workers(_STOP_GRACE_S)
        self._context.term()

    async def kill(self) -> None:
        """End all workers at once: after a loss, survivors may wait for the dead for ever."""
        self._stopping = True
        for worker in self._workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
        await self._end_workers(_STOP_GRACE_S)

    # ---- inside --------------------------------------------------------------------------------

    def _post(self, worker: _Worker, data: bytes) -> None:
        assert self._socket is not None
        self._socket.send_multipart([_identity(worker.instance, worker.tp_rank), data])

    def _fresh_address(self, epoch: int) -> str:
        path = self._runtime_dir / f"workers-{epoch}.sock"
        if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
            raise WorkerError(f"runtime_dir {self._runtime_dir} is too long for a socket's path")
        self._tidy()  # a daemon that was killed could not
        return f"ipc://{path}"

    def _tidy(self) -> None:
        """Remove what pools leave in the runtime directory, which is this daemon's alone: their
        socket, where workers met, and sockets of workers that died while they connected."""
        for pattern in ("workers-*.sock", "rendezvous*"):
            for left in self._runtime_dir.glob(pattern):
                left.unlink(missing_ok=True)

    async def _spawn(self, start: Start, address: str) -> _Worker:
        instance, tp_rank = start.instance, start.tp_rank
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "loongd.worker"),
            *("--instance", str(instance), "--tp-rank", str(tp_rank)),
            *("--socket", address, "--log-level", self._log_level),
            stdin=asyncio.subprocess.DEVNULL,
            env=_environment(),
        )
        part = f" tp_rank {tp_rank}" if start.tensor_parallel_size > 1 else ""
        worker = _Worker(instance, tp_rank, f"worker{part}", process)
        worker.watcher = asyncio.create_task(
            self._watch(worker), name=f"watch-{instance}.{tp_rank}"
        )
        return worker

    async def _watch(self, worker: _Worker) -> None:
        code = await worker.process.wait()
        # Its last message may still be on its way through the socket.
        await asyncio.sleep(0.05)
        if self._stopping:
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        words = worker.last_words or f"{worker.name} process {how}"
        self._inbox.put_nowait((worker, WorkerLost(worker.instance, words)))

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            identity, data = await socket.recv_multipart()
            try:
                message = decode_to_daemon(data)
            except msgspec.ValidationError as error:
                _log.error("worker %s sent a bad message: %s", identity.decode(), error)
                continue
            if isinstance(message, Beat):
                self._vigil.beat(message.worker.encode(), message.layers, time.monotonic())
                continue
            worker = self._workers[identity]
            match message:
                case Fatal():
                    worker.last_words = message.message
                case StepDone() | StepFailed():
                    self._vigil.step_over(identity, time.monotonic())
                    whole = self._parts.add(message)
                    if whole is not None:
                        self._inbox.put_nowait((worker, whole))
                case _:
                    self._inbox.put_nowait((worker, message))

    async def _keep_vigil(self) -> None:
        """Kill workers that are silent or hang; their watchers report the loss."""
        while True:
            await asyncio.sleep(_VIGIL_INTERVAL_S)
            for name, why in self._vigil.overdue(time.monotonic()):
                worker = self._workers[name]
                worker.last_words = f"{worker.name} process {why} and was killed"
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()

    async def _await_ready(self, starts: list[Start], on_progress: OnProgress) -> list[Ready]:
        size = starts[0].tensor_parallel_size
        waiting = {(start.instance, start.tp_rank): start for start in starts}
        ready: dict[int, list[Ready]] = {start.instance: [] for start in starts}
        while waiting:
            try:
                worker, event = await asyncio.wait_for(self._inbox.get(), self._startup_timeout_s)
            except TimeoutError:
                missing = sorted({instance for instance, _ in waiting})
                raise WorkerError(
                    f"instances {missing} showed no progress for {self._startup_timeout_s:g} s"
                ) from None
            match event:
                case Hello():
                    self._post(worker, encode(waiting[worker.instance, worker.tp_rank]))
                    self._say(on_progress, worker, "started", 0.0)
                case Progress():
                    self._say(on_progress, worker, event.stage, event.fraction)
                case Ready():
                    del waiting[worker.instance, worker.tp_rank]
                    ready[worker.instance].append(event)
                    if len(ready[worker.instance]) == size:
                        on_progress(worker.instance, "ready", 1.0)
                case WorkerLost():
                    raise WorkerError(f"instance {event.instance}: {event.message}")
        return [merge_ready(parts) for _, parts in sorted(ready.items())]

    def _say(self, on_progress: OnProgress, worker: _Worker, stage: str, fraction: float) -> None:
        """Workers of an instance start in step: the first speaks for all."""
        if worker.tp_rank == 0:
            on_progress(worker.instance, stage, fraction)

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
        self._vigil.clear()
        self._all_ready = False
        for task in (self._reader, self._watcher):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._tidy()
        self._inbox = asyncio.Queue()


def _identity(instance: int, tp_rank: int) -> bytes:
    """The name of a worker on the socket, as the worker itself builds it."""
    return b"%d.%d" % (instance, tp_rank)


def _environment() -> dict[str, str]:
    """What workers find: what this process has, and what it lacks of this."""
    # all workers are on this node; gloo would else need the host's name to resolve
    found = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    if "OMP_WAIT_POLICY" not in found:
        # two threads beside a busy process took 320 to 450 ms where they take 26 alone, as each
        # spins for its peer's whole time slice; so 94, and 27 alone (never spinning: 55, 44)
        found.setdefault("GOMP_SPINCOUNT", "10000")
    return found
