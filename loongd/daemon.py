"""The daemon of one node: builds the parts, says ready, waits, and takes them down in order.

Knows: which parts there are and in which order they start and stop; signals; the service manager.
Does not know: what any part does inside.

Start: runtime directory, model (a GGUF file is converted once, in a process of its own), API
sockets (live at once, ready later), workers, READY=1. Stop on SIGTERM or SIGINT: refuse new
requests, let accepted ones finish within `shutdown_timeout`, end the workers, exit 0. A second
signal stops waiting; none changes the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from loongd import __version__, node, systemd
from loongd.checkpoint import Checkpoint, open_checkpoint
from loongd.config import Config
from loongd.errors import BusyError, ConfigError, WorkerError
from loongd.manager import GlobalManager, Starts
from loongd.metrics import Metrics
from loongd.pool import WorkerPool
from loongd.profiling import store
from loongd.profiling.facts import model_facts
from loongd.profiling.profiler import Profiler
from loongd.profiling.speed import Speed
from loongd.rest.app import RestContext, make_admin_app, make_app
from loongd.rest.auth import load_keys
from loongd.sched.policies import make_policy
from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler
from loongd.sched.words import plural
from loongd.vigil import Vigil
from loongd.wire import Start

_log = logging.getLogger(__name__)
_AUDIT_INTERVAL_S = 5.0
_DRAIN_POLL_S = 0.05
_START_EXTENSION_S = 120.0
_PROGRESS_INTERVAL_S = 1.0
_LAST_WORDS_S = 0.2
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PASSING_ERRNOS = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


class Daemon:
    """One run of the daemon."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._runtime_dir = node.runtime_dir(config)
        self._device = node.device(config)
        self._num_instances = node.num_instances(config, self._device)
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._progress_said: dict[int | None, float] = {}

    async def run(self) -> int:
        """Serve until told to stop; the exit code. Raises LoongError when it cannot start."""
        self._listen_for_signals()
        try:
            await self._serve_until_stopped()
        finally:
            # Python gives signals that it catches their default action back when it ends: they
            # would then set the exit code. Ignored ones stay ignored.
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_IGN)
        _log.info("stopped")
        return 0

    async def _serve_until_stopped(self) -> None:
        lock = node.claim(self._runtime_dir)
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(os.close, lock)
            node.check_address(self._config.host, self._config.port)
            self._check_files()
            model = await open_checkpoint(self._config, partial(self._on_progress, None))
            speed = Speed(
                self._config,
                model_facts(model.name, model.spec, model.dtype),
                device=self._device,
                num_instances=self._num_instances,
                dtype=model.dtype,
            )
            manager, context = self._build(model, speed)
            stack.push_async_callback(manager.stop)
            await self._serve(stack, context, manager)
            starts = self._starts(model)
            if not await self._unless_stopped(manager.start(starts, self._on_progress)):
                return
            worker = manager.a_worker
            speed.use_best(worker.device_name, worker.attention_backend)
            self._say_ready(manager)
            engine = asyncio.create_task(manager.run(starts, self._on_progress), name="manager")
            chores = asyncio.create_task(self._chores(manager), name="chores")
            stack.push_async_callback(_cancel, chores)
            stack.push_async_callback(_cancel, engine)
            await _first(engine, asyncio.create_task(self._stop.wait()))
            if engine.done():
                engine.result()
            await self._drain(manager)

    # ---- start ---------------------------------------------------------------------------------

    def _check_files(self) -> None:
        """Raise ConfigError for a file that an option names and that is read only later on, before
        a model is converted. A pipe can be read once, and is read then."""
        keys, profile = (
            name if name is not None and not Path(name).is_fifo() else None
            for name in (self._config.api_key_file, self._config.profile)
        )
        if keys is not None:
            load_keys(self._config)
        if profile is not None:
            store.load(Path(profile))

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)

    def _on_signal(self, name: str) -> None:
        if self._stop.is_set():
            _log.info("%s again: stopping at once", name)
            self._hurry.set()
        else:
            _log.info("%s: draining", name)
        self._stop.set()

    def _build(self, model: Checkpoint, speed: Speed) -> tuple[GlobalManager, RestContext]:
        config = self._config
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            prefill_tokens_per_instance=config.prefill_tokens_per_instance,
            max_step_tokens=self._step_tokens(model),
            max_num_queued_reqs=config.max_num_queued_reqs,
            max_prefill_wait_s=config.max_prefill_wait,
            max_passes=config.max_passes,
            decode_share=config.decode_share,
            # Only the first worker of an instance knows the tokens that it draws.
            queue_ahead=config.queue_ahead and config.tensor_parallel_size == 1,
            num_layers=model.spec.num_layers,
        )
        metrics = Metrics(model.name)
        manager = GlobalManager(
            Scheduler(make_policy(config.policy, speed.sib), limits, sib=speed.sib),
            WorkerPool(
                runtime_dir=self._runtime_dir,
                startup_timeout_s=config.startup_timeout,
                vigil=Vigil(silence_s=config.worker_timeout, stall_s=config.step_timeout),
                log_level=config.log_level,
            ),
            metrics,
            model_limit_tokens=config.max_model_len or model.spec.max_context_tokens,
            node=self._node_facts(model),
            log_requests=config.enable_log_requests,
        )
        context = RestContext(
            engine=manager,
            tokenizer=model.tokenizer,
            config=config,
            model_name=model.name,
            vocab_size=model.spec.vocab_size,
            metrics=metrics,
            started_at=int(time.time()),
            default_sampling=model.default_sampling,
            profiler=Profiler(manager, speed.sib, lambda: speed.subject(manager.max_model_len)),
            is_ending=self._stop.is_set,
        )
        return manager, context

    def _node_facts(self, model: Checkpoint) -> dict[str, Any]:
        return {
            "name": os.uname().nodename,
            "version": __version__,
            "pid": os.getpid(),
            "model": model.name,
            "device": self._device,
            "dtype": model.dtype,
            "deterministic": self._config.deterministic,
            "policy": self._config.policy,
            "num_instances": self._num_instances,
            "tensor_parallel_size": self._config.tensor_parallel_size,
        }

    async def _serve(
        self, stack: contextlib.AsyncExitStack, context: RestContext, manager: GlobalManager
    ) -> None:
        """Open the API's port and the admin socket."""
        config = self._config
        runner = web.AppRunner(make_app(context), handler_cancellation=True, access_log=None)
        admin = web.AppRunner(make_admin_app(context), access_log=None)
        for each in (runner, admin):
            await each.setup()
            stack.push_async_callback(each.cleanup)
        site = web.TCPSite(runner, config.host, config.port, shutdown_timeout=1.0)
        try:
            await site.start()
        except OSError as error:
            where = f"{config.host}:{config.port}"
            # at boot, addresses and names may come later
            passing = isinstance(error, socket.gaierror) or error.errno in _PASSING_ERRNOS
            kind = BusyError if passing else ConfigError
            raise kind(f"cannot listen on {where}: {error.strerror or error}") from None
        host, port = runner.addresses[0][:2]
        manager.node["api"] = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        socket_path = self._runtime_dir / "admin.sock"
        socket_path.unlink(missing_ok=True)
        await web.UnixSite(admin, str(socket_path), shutdown_timeout=1.0).start()
        stack.callback(socket_path.unlink, missing_ok=True)
        socket_path.chmod(0o600)
        _log.info("API on %s, not ready yet; admin socket %s", manager.node["api"], socket_path)

    def _step_tokens(self, model: Checkpoint) -> int:
        """Most new tokens of an instance in a step, for which workers keep memory."""
        config = self._config
        longest = config.max_model_len or model.spec.max_context_tokens
        return min(config.max_step_tokens, max(config.max_num_batched_tokens, longest))

    def _starts(self, model: Checkpoint) -> Starts:
        config = self._config
        num_workers = self._num_instances * config.tensor_parallel_size
        shares = node.share_cores(sorted(os.sched_getaffinity(0)), num_workers, device=self._device)

        def starts(epoch: int) -> list[Start]:
            return [
                Start(
                    rank=rank,
                    world_size=num_workers,
                    epoch=epoch,
                    rendezvous=str(self._runtime_dir / f"rendezvous-{epoch}"),
                    model_dir=str(model.directory),
                    load_format="dummy" if config.load_format == "dummy" else "auto",
                    dtype=model.dtype,
                    device=self._device,
                    cores=shares[rank].cores,
                    num_threads=shares[rank].num_threads,
                    kv_pool_tokens=config.kv_pool_tokens,
                    gpu_memory_utilization=config.gpu_memory_utilization,
                    max_step_tokens=self._step_tokens(model),
                    seed=config.seed,
                    tensor_parallel_size=config.tensor_parallel_size,
                    deterministic=config.deterministic,
                )
                for rank in range(num_workers)
            ]

        return starts

    def _on_progress(self, instance: int | None, stage: str, fraction: float) -> None:
        """Say when an instance starts, is ready, and in between about once a second."""
        now = time.monotonic()
        last_s = self._progress_said.get(instance, now - _PROGRESS_INTERVAL_S)
        if stage not in ("started", "ready") and now - last_s < _PROGRESS_INTERVAL_S:
            return
        self._progress_said[instance] = now
        who = "model" if instance is None else f"instance {instance}"
        share = f" {fraction:.0%}" if 0 < fraction < 1 else ""
        _log.info("%s: %s%s", who, stage, share)
        systemd.extend_start(os.environ, _START_EXTENSION_S)
        systemd.notify(os.environ, f"STATUS={who}: {stage}{share}")

    def _say_ready(self, manager: GlobalManager) -> None:
        status = manager.status()
        slots = status["pool"]["total"]
        wanted = self._config.max_model_len
        if wanted is not None and wanted > slots:
            _log.warning("max_model_len %d is more than the pool's %d slots", wanted, slots)
        where = plural(self._num_instances, f"{self._device} instance")
        text = (
            f"ready: {status['node']['model']} on {where}, "
            f"{slots:,} KV slots, requests up to {manager.max_model_len:,} tokens"
        )
        _log.info("%s", text)
        systemd.notify(os.environ, "READY=1", f"STATUS={text}")

    # ---- while running -------------------------------------------------------------------------

    async def _chores(self, manager: GlobalManager) -> None:
        """Feed the watchdog and audit the pool; a loop that hangs stops doing so."""
        interval = systemd.watchdog_interval_s(os.environ, os.getpid()) or _AUDIT_INTERVAL_S
        while True:
            systemd.notify(os.environ, "WATCHDOG=1")
            manager.audit()
            await asyncio.sleep(min(interval, _AUDIT_INTERVAL_S))

    async def _drain(self, manager: GlobalManager) -> None:
        manager.drain()
        deadline = time.monotonic() + self._config.shutdown_timeout
        systemd.notify(os.environ, "STOPPING=1", f"STATUS=draining {manager.num_live} requests")
        while manager.num_live and time.monotonic() < deadline and not self._hurry.is_set():
            systemd.extend_start(os.environ, _START_EXTENSION_S)
            await asyncio.sleep(_DRAIN_POLL_S)
        if manager.num_live:
            _log.warning("stopping with %d requests unfinished", manager.num_live)
            manager.give_up()
            await asyncio.sleep(_LAST_WORDS_S)  # for the answers that say so

    async def _unless_stopped(self, work: Awaitable[None]) -> bool:
        """Wait for `work`; False (and cancelled) when a signal came first."""
        task = asyncio.ensure_future(work)
        await _first(task, asyncio.create_task(self._stop.wait()))
        if task.done():
            task.result()
            return True
        await _cancel(task)
        return False


async def _first(*tasks: asyncio.Future[Any]) -> None:
    """Wait for the first; the last one is ours and is cancelled if it is not that."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if not tasks[-1].done():
        tasks[-1].cancel()


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, WorkerError):
        await task
