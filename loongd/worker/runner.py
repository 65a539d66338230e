"""One instance's model, pool and place in the world: runs its part of a step.

Knows: how to build all of that from `Start`, and how a `RunStep` becomes sampled tokens.
Does not know: sockets, scheduling, what other steps there are.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from loongd.errors import ModelError, WorkerError
from loongd.model.llama import Llama
from loongd.model.sampler import sample, sample_once
from loongd.model.shard import Shard
from loongd.model.spec import ModelSpec
from loongd.model.weights import load_weights
from loongd.wire import Audit, Ready, RunMigrate, RunStep, Sampled, Start
from loongd.worker.attention import EspAttention
from loongd.worker.captured import NO_GRAPHS, graph_pool
from loongd.worker.comm import DistTransport, LoopbackWorld, TensorParallel, Transport
from loongd.worker.decoder import Decoder, can_capture
from loongd.worker.flight import Flight, Landed, report
from loongd.worker.follow import LastDraw
from loongd.worker.geometry import lay_out
from loongd.worker.heart import Pulse
from loongd.worker.layout import RowBytes, StepLayout
from loongd.worker.memory import StepBytes, device_name, make_pool, pool_tokens
from loongd.worker.migrate import migrate
from loongd.worker.numerics import Numerics
from loongd.worker.parts import Parts
from loongd.worker.paused import LayerRun, PausedSteps
from loongd.worker.prefill_graphs import PrefillParts
from loongd.worker.prefiller import Prefiller
from loongd.worker.rehearsal import rehearse
from loongd.worker.room import Room, new_tokens
from loongd.worker.slot_table import SlotTable
from loongd.worker.warm import SEGMENTS, warm_steps

_log = logging.getLogger(__name__)


class Runner:
    """Runs steps; one at a time, each to its end."""

    def __init__(
        self,
        parts: Parts,
        instance: int,
        pulse: Pulse,
        *,
        decoder: Decoder | None = None,
        prefiller: Prefiller | None = None,
    ) -> None:
        """`decoder` and `prefiller` run the steps that they can; `capture` makes them for GPUs."""
        self.parts = parts
        self._instance = instance
        self._pulse = pulse
        self._last = LastDraw()
        self._paused = PausedSteps()
        self._decoder = decoder
        self._prefiller = prefiller
        self._room = Room(parts.step_bytes, parts.transport, parts.tensor_parallel, parts.device)
        spec = parts.spec
        self._row_bytes = RowBytes.of(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, parts.kv.k_LSKH.element_size()
        )
        self._windows = tuple(spec.window(layer) for layer in range(spec.num_layers))

    @classmethod
    def start(cls, start: Start, progress: Callable[[str, float], None], pulse: Pulse) -> Runner:
        """Pin, join the world, load weights, take the pool, warm up.

        Raises ModelError or WorkerError with one readable line.
        """
        device = _take_device(start)
        whole = ModelSpec.from_dir(Path(start.model_dir))
        shard = Shard(start.tp_rank, start.tensor_parallel_size)
        spec = shard.spec(whole)
        dtype = _torch_dtype(start.dtype)
        progress("rehearsal", 0.0)
        kernels = rehearse(start, whole, device, dtype, partial(cls, pulse=Pulse()))
        progress("connect", 0.0)
        transport, tensor_parallel = _join_world(start, device)
        weights = load_weights(
            Path(start.model_dir),
            whole,
            load_format=start.load_format,
            dtype=dtype,
            device=device,
            seed=start.seed,
            progress=progress,
            shard=shard,
        )
        kernels.finish(progress)
        numerics = Numerics.choose(device, dtype, spec.head_dim, deterministic=start.deterministic)
        model = Llama(
            spec,
            weights,
            device,
            dtype,
            tensor_parallel=tensor_parallel,
            arithmetic=numerics.arithmetic,
        )
        progress("kv pool", 0.0)
        step_bytes = StepBytes.measure(start.max_step_tokens, model, numerics.partials, device)
        num_slots = start.kv_pool_tokens or pool_tokens(start, spec, step_bytes, device, dtype)
        if tensor_parallel is not None:
            num_slots = tensor_parallel.smallest(num_slots, device)
        kv = make_pool(spec, num_slots, dtype, device)
        parts = Parts(
            spec,
            device,
            dtype,
            weights.num_bytes(),
            model,
            transport,
            numerics.backend,
            kv,
            tensor_parallel,
            numerics.partials,
            step_bytes,
        )
        runner = cls(parts, start.instance, pulse)
        with kernels.watched():
            runner.warm_up(start.world_size // start.tensor_parallel_size, progress)
            runner.capture(start.world_size, progress)
        # what start-up has made stays for good: a collection that looks at it takes 0.1 s and more
        gc.collect()
        gc.freeze()
        return runner

    @property
    def alone(self) -> bool:
        """Whether this worker is all of its instance."""
        return self.parts.tensor_parallel is None

    def ready(self) -> Ready:
        """The facts that the daemon wants of a started worker."""
        parts = self.parts
        return Ready(
            instance=self._instance,
            pool_tokens=parts.kv.total,
            kv_bytes_per_token=parts.kv.k_LSKH[:, :1].nbytes * 2,
            weights_bytes=parts.weights_bytes,
            device_name=device_name(parts.device),
            attention_backend=parts.backend.name,
            padded_sizes={} if self._prefiller is None else self._prefiller.padded_sizes(),
        )

    def audit(self) -> Audit:
        """Slots by this worker's own account."""
        kv = self.parts.kv
        return Audit(
            instance=self._instance,
            total=kv.total,
            used=kv.num_used,
            free=kv.num_free,
            num_segments=kv.num_segments,
        )

    def free(self, segments: list[int]) -> None:
        """Forget segments, and paused steps that write any of them."""
        self._paused.forget(segments)
        self.parts.kv.free(segments)
        if self._decoder is not None:
            self._decoder.forget(segments)

    def keep(self, segments: list[int]) -> None:
        """Forget all segments but these, and paused steps that write others."""
        self._paused.keep(segments)
        self.parts.kv.keep(segments)

    @torch.inference_mode()
    def migrate(self, message: RunMigrate) -> None:
        """This worker's side of moving KV; collective over the two instances' workers.

        Raises PlanError, WorkerError, or RuntimeError from torch.
        """
        migrate(message, self._instance, self.parts.kv, self.parts.transport)
        self._finish()

    def run(self, step: RunStep) -> list[Sampled]:
        """This worker's part of a step; collective over all workers of its members.

        Tokens are drawn by the first worker of an instance; the others return none. A request
        for which none can be drawn is left out.
        Raises PlanError for a plan that contradicts the pool, StepRefusedError (all workers of all
        members do) for one without room in memory, WorkerError when memory runs out all the same
        or peers are lost, RuntimeError from torch; the pool is as before in all cases.
        """
        return self.launch(step).wait()

    @torch.inference_mode()
    def launch(self, step: RunStep) -> Flight:
        """Start a step, as `run`; one that is a graph may not be over when this returns.

        The next step can be launched before: the device does them in order.
        """
        resumed_tokens = self._paused.num_tokens(step.resumes)
        try:
            return self._launch(step)
        except torch.OutOfMemoryError as error:
            _log.warning("step %d: %s", step.step_id, str(error))
        raise self._room.ran_out(resumed_tokens or new_tokens(step, self._instance))

    def _launch(self, step: RunStep) -> Flight:
        if step.until_layer or step.resumes:
            return Landed(self._run_now(step))
        decoder, prefiller = self._decoder, self._prefiller
        if decoder is None or not decoder.has_drawn(step.follows):
            step = self._last.fill(step)
        if decoder is not None:
            batch = decoder.batch_of(step)
            if batch is not None:
                return decoder.launch(step, batch)
        if prefiller is not None:
            shape = prefiller.shape_of(step)
            if shape is not None:
                return prefiller.launch(step, shape)
        return Landed(self._run_now(step))

    def _run_now(self, step: RunStep) -> list[Sampled]:
        run = self._paused.take(step) if step.resumes else self._begin(step)
        with ExitStack() as undo:
            undo.callback(self.parts.kv.take_back, run.layout.grown)
            hidden_BD = run.advance(step.until_layer)
            sampled = [] if hidden_BD is None else self._draw(run.layout, hidden_BD)
            undo.pop_all()
        self._finish()
        if hidden_BD is None:
            self._paused.put(step.step_id, run)
        self._last.ran(step, sampled)
        return sampled

    def _finish(self) -> None:
        """Wait for the device: only then is the step over, and its time known."""
        if self.parts.device.type == "cuda":
            torch.cuda.synchronize(self.parts.device)

    @torch.inference_mode()
    def warm_up(self, num_instances: int, progress: Callable[[str, float], None]) -> None:
        """Do once what compiles, plans or allocates on first use; collective over all workers.

        Raises ModelError when the weights give no finite logits.
        """
        parts = self.parts
        progress("warm-up", 0.0)
        tokens = torch.zeros(16, dtype=torch.int64, device=parts.device)
        positions = torch.arange(16, device=parts.device)
        hidden = parts.model.forward(
            tokens, positions, torch.full_like(positions, 16), lambda _, q, __, ___: q
        )
        logits_1V = parts.model.logits(hidden[-1:])
        if not parts.rehearsing and not bool(torch.isfinite(logits_1V).all()):
            raise ModelError("the weights give no finite logits")
        sample_once(logits_1V)
        if parts.device.type != "cuda" and not parts.rehearsing:
            return
        spec = parts.spec
        if parts.backend.planned is not None:
            heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
            for fraction in parts.backend.planned.ahead(*heads):
                progress("warm-up", fraction)
        for step in warm_steps(self._instance, num_instances, parts.kv.total):
            self._run_now(step)
        self.free(list(SEGMENTS))

    @torch.inference_mode()
    def capture(self, world_size: int, progress: Callable[[str, float], None]) -> None:
        """Capture steps as graphs where device and model allow; collective over all."""
        parts = self.parts
        if parts.tensor_parallel is not None or not parts.partials.capturable:
            return
        if not can_capture(parts.spec, parts.device):
            return
        table = SlotTable(parts.kv)
        pool = NO_GRAPHS if parts.rehearsing else graph_pool(parts.device)
        small = PrefillParts(parts.model, parts.spec, parts.kv, table, parts.backend)
        self._prefiller = Prefiller.build(small, self._instance, world_size, pool)
        self._decoder = Decoder.build(
            parts.model,
            parts.spec,
            table,
            parts.kv,
            instance=self._instance,
            world_size=world_size,
            pool=pool,
        )
        # the largest steps first: the others' graphs fit into the memory of theirs
        for stage, graphs in (("prefill graphs", self._prefiller), ("graphs", self._decoder)):
            for fraction in graphs.capture():
                progress(stage, fraction)

    def _is_windowed(self, step: RunStep) -> bool:
        smallest = min((w for w in self._windows if w is not None), default=None)
        if smallest is None:
            return False
        return any(e.start + len(e.tokens) // 4 > smallest for e in step.batch)

    def _begin(self, step: RunStep) -> LayerRun:
        """Lay a step out and take its slots; nothing is computed yet."""
        self._room.agree(step)
        parts, windowed = self.parts, self._is_windowed(step)
        layout = lay_out(
            step, self._instance, parts.kv, row_bytes=self._row_bytes, windowed=windowed
        )
        with ExitStack() as undo:
            undo.callback(parts.kv.take_back, layout.grown)
            run = self._run_of(step, layout)
            undo.pop_all()
        return run

    def _run_of(self, step: RunStep, layout: StepLayout) -> LayerRun:
        parts, windowed = self.parts, layout.windowed
        planned = parts.backend.planned
        spare = 0 if planned is None else planned.spare(layout.alone_tokens)
        if spare:
            layout = layout.with_spare(spare)
        attention = EspAttention(
            layout,
            parts.kv,
            parts.transport,
            parts.backend,
            scale=parts.spec.head_dim**-0.5,
            windows=self._windows if windowed else (None,) * parts.spec.num_layers,
            pulse=self._pulse,
            partials=parts.partials,
            sampled_only=True,
        )
        layers = parts.model.layers(
            self._tensor(layout.tokens),
            self._tensor(layout.positions),
            self._tensor(layout.lengths),
            attention,
            rows_B=self._tensor(np.array(layout.sample_rows, np.int64)),
            spare=spare,
        )
        segments = frozenset(extend.segment for extend in step.batch)
        return LayerRun(layout, attention, layers, segments)

    def _draw(self, layout: StepLayout, hidden_BD: Tensor) -> list[Sampled]:
        parts = self.parts
        if not layout.sampled:
            return []
        logits_BV = parts.model.logits(hidden_BD)
        if parts.tensor_parallel is not None and parts.tensor_parallel.rank:
            return []
        params = [e.sampling for e in layout.sampled if e.sampling is not None]
        positions = [e.start + len(e.tokens) // 4 for e in layout.sampled]
        return report(layout.sampled, sample(logits_BV, params, positions))

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values).to(self.parts.device, non_blocking=True)


def _torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _take_device(start: Start) -> torch.device:
    if start.cores:
        os.sched_setaffinity(0, start.cores)
        torch.set_num_threads(start.num_threads or len(start.cores))
    if start.device == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if start.rank >= num_gpus:
        raise WorkerError(
            f"worker {start.rank} (instance {start.instance}, tp_rank {start.tp_rank}) has no GPU: "
            f"{num_gpus} visible"
        )
    device = torch.device("cuda", start.rank)
    torch.cuda.set_device(device)
    # Full float32 products where float32 was asked for; half-precision types are unaffected.
    torch.backends.cuda.matmul.allow_tf32 = False
    return device


def _join_world(start: Start, device: torch.device) -> tuple[Transport, TensorParallel | None]:
    if start.world_size == 1:
        return LoopbackWorld(1).transport(0), None
    transport = DistTransport(
        rank=start.rank,
        world_size=start.world_size,
        rendezvous=start.rendezvous,
        device=device,
        tensor_parallel_size=start.tensor_parallel_size,
    )
    return transport, transport.tensor_parallel
