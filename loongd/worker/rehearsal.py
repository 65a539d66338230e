"""Which kernels a worker will launch before it is ready, found out while nothing is there yet.

Knows: a model of the same shapes with two layers goes through all that the real one will go through
(`Runner.warm_up`, `Runner.capture`), on this device, with others that are threads; launches are
noted and not done, and what was noted is compiled on all cores while the worker connects and
loads its weights. What the rehearsal has not foreseen is compiled when it is launched.
Does not know: kernels, steps.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from loongd.kernels.dispatch import has_triton, pick
from loongd.model.llama import Llama
from loongd.model.shard import Shard
from loongd.model.spec import ModelSpec
from loongd.model.weights import load_weights
from loongd.wire import Start
from loongd.worker.comm import LoopbackWorld
from loongd.worker.memory import StepBytes, make_pool
from loongd.worker.numerics import Numerics
from loongd.worker.parts import Parts
from loongd.worker.peers import REHEARSED_WORKERS

if TYPE_CHECKING:
    from loongd.kernels.gpu.ahead import Compiling

_log = logging.getLogger(__name__)
Progress = Callable[[str, float], None]
_NUM_LAYERS = 2
"""The last layer has a way of its own; all others launch the same."""
_NUM_SLOTS = 32768
"""Enough for the warm-up's steps at their full lengths; with fewer they are shorter."""
_NUM_MEASURED_TOKENS = 64


class Rehearsed(Protocol):
    """What is rehearsed: a `Runner`."""

    def warm_up(self, num_instances: int, progress: Progress) -> None:
        """As `Runner.warm_up`."""

    def capture(self, world_size: int, progress: Progress) -> None:
        """As `Runner.capture`."""


class Kernels:
    """Kernels that are compiled ahead, if any are."""

    def __init__(self, compiling: Compiling | None = None) -> None:
        self._compiling = compiling

    def finish(self, progress: Progress) -> None:
        """Wait until all can be launched. Raises WorkerError for one that cannot be compiled."""
        if self._compiling is not None:
            self._compiling.finish(lambda fraction: progress("kernels", fraction))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is compiled inside was not foreseen: it costs time, and is logged."""
        if self._compiling is None:
            yield
            return
        with import_module("loongd.kernels.gpu.ahead").Watch() as watch:
            yield
        if watch.names:
            _log.info("%d kernels compiled late: %s", len(watch.names), ", ".join(watch.names))


def rehearse(
    start: Start,
    whole: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    build: Callable[[Parts, int], Rehearsed],
) -> Kernels:
    """Find out the kernels and begin to compile them, before the world is joined.

    `build` makes the runner of an instance. Not in deterministic mode, whose steps are long and
    launch few of them; and once a process: with others that do not act, nobody must wait for them.
    """
    if device.type != "cuda" or not has_triton() or start.deterministic:
        return Kernels()
    if pick("signal", device).has_waited():
        return Kernels()
    ahead = import_module("loongd.kernels.gpu.ahead")
    with ahead.Recording() as recording:
        Rehearsal(start, whole, device, dtype).run(build)
    gc.collect()  # memory of what refers to itself would count as taken
    torch.cuda.empty_cache()
    _log.info("%d kernels to find or compile", len(recording.variants))
    share = (start.rank, start.world_size)
    return Kernels(ahead.Compiling.start(recording.variants, share=share))


class Rehearsal:
    """One start, played through on two layers with others that are threads."""

    def __init__(
        self, start: Start, whole: ModelSpec, device: torch.device, dtype: torch.dtype
    ) -> None:
        layers = min(whole.num_layers, _NUM_LAYERS)
        sliding = whole.sliding_layers[:layers]
        self._whole = replace(whole, num_layers=layers, sliding_layers=sliding)
        self._shard = Shard(start.tp_rank, start.tensor_parallel_size)
        self._device = device
        self._dtype = dtype
        several = start.world_size > start.tensor_parallel_size
        self._num_instances = REHEARSED_WORKERS if several else 1
        self._num_slots = min(start.kv_pool_tokens or _NUM_SLOTS, _NUM_SLOTS)

    def run(self, build: Callable[[Parts, int], Rehearsed]) -> None:
        """Launch all that `Runner.start` will launch; `build` makes the runner of an instance."""
        first, *others = self._parts()
        StepBytes.measure(_NUM_MEASURED_TOKENS, first.model, first.partials, self._device)
        with ThreadPoolExecutor(max(len(others), 1), "rehearsal") as pool:
            turns = [
                pool.submit(self._warm_up, build(parts, number + 1))
                for number, parts in enumerate(others)
            ]
            runner = build(first, 0)
            self._warm_up(runner)
            for turn in turns:
                turn.result()
        if self._shard.size == 1:
            runner.capture(self._num_instances, _silent)

    def _warm_up(self, runner: Rehearsed) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own
        runner.warm_up(self._num_instances, _silent)

    def _parts(self) -> list[Parts]:
        """Of each instance; they have the same model."""
        shard, device, dtype = self._shard, self._device, self._dtype
        spec = shard.spec(self._whole)
        numerics = Numerics.choose(device, dtype, spec.head_dim, deterministic=False)
        weights = load_weights(
            Path(),
            self._whole,
            load_format="dummy",
            dtype=dtype,
            device=device,
            seed=0,
            progress=_silent,
            shard=shard,
        )
        ranks = _AloneOf(shard.size) if shard.size > 1 else None
        model = Llama(
            spec, weights, device, dtype, tensor_parallel=ranks, arithmetic=numerics.arithmetic
        )
        backend: Any = numerics.backend
        world = LoopbackWorld(self._num_instances)
        return [
            Parts(
                spec,
                device,
                dtype,
                0,
                model,
                world.transport(instance),
                backend.rehearsing() if hasattr(backend, "rehearsing") else backend,
                make_pool(spec, self._num_slots, dtype, device),
                None,
                numerics.partials,
                rehearsing=True,
            )
            for instance in range(self._num_instances)
        ]


class _AloneOf:
    """One rank of several that does not wait for the others (`model.arithmetic.TensorParallel`)."""

    def __init__(self, size: int) -> None:
        self._size = size

    def all_reduce(self, x_TD: Tensor) -> None:
        """Its own part, left as it is."""

    def all_gather(self, x_BV: Tensor) -> Tensor:
        return torch.cat([x_BV] * self._size, dim=1)


def _silent(stage: str, fraction: float) -> None:
    """The rehearsal is one step of the start."""
