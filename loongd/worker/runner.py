"""One instance's model, pool and place in the world: runs its part of a step.

Knows: how to build all of that from `Start`, and how a `RunStep` becomes sampled tokens.
Does not know: sockets, scheduling, what other steps there are.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loongd.errors import ModelError, WorkerError
from loongd.kernels.attention import AttentionBackend, select_backend
from loongd.model.llama import LINEAR_CHUNK_TOKENS, Llama
from loongd.model.sampler import Drawn, sample
from loongd.model.shard import Shard
from loongd.model.spec import ModelSpec
from loongd.model.weights import load_weights
from loongd.wire import Audit, Ready, RunMigrate, RunStep, Sampled, Start
from loongd.worker.attention import EspAttention
from loongd.worker.comm import DistTensorParallel, DistTransport, LoopbackWorld, Transport
from loongd.worker.geometry import lay_out
from loongd.worker.heart import Pulse
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import RowBytes, StepLayout
from loongd.worker.migrate import migrate

_CPU_POOL_TOKENS = 16384
"""Default slots of a CPU instance; pages of the pool are taken only when they are written."""
_CPU_POOL_SHARE = 0.25
"""Most of the available memory that the pools of all CPU instances may take by default."""
_PROFILED_TOKENS = 4 * LINEAR_CHUNK_TOKENS
"""Most tokens of the forward passes that measure the memory of activations."""
_GPU_RESERVE_BYTES = 2 << 30
"""Kept for NCCL, cuBLAS and the allocator's fragments."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a runner works with; `spec` is this worker's share of the model."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    weights_bytes: int
    model: Llama
    transport: Transport
    backend: AttentionBackend
    kv: KvCache
    tensor_parallel: DistTensorParallel | None


class Runner:
    """Runs steps; one at a time, each to its end."""

    def __init__(self, parts: Parts, instance: int, pulse: Pulse) -> None:
        self.parts = parts
        self._instance = instance
        self._pulse = pulse
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
        model = Llama(spec, weights, device, dtype, tensor_parallel=tensor_parallel)
        progress("kv pool", 0.0)
        num_slots = start.kv_pool_tokens or _pool_tokens(start, spec, model, device, dtype)
        if tensor_parallel is not None:
            num_slots = tensor_parallel.smallest(num_slots, device)
        kv = _make_pool(spec, num_slots, dtype, device)
        backend = select_backend(device, dtype, spec.head_dim, spec.head_dim**-0.5)
        parts = Parts(
            spec,
            device,
            dtype,
            weights.num_bytes(),
            model,
            transport,
            backend,
            kv,
            tensor_parallel,
        )
        runner = cls(parts, start.instance, pulse)
        progress("warm-up", 0.0)
        runner.warm_up()
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
            device_name=_device_name(parts.device),
            attention_backend=parts.backend.name,
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
        """Forget segments."""
        self.parts.kv.free(segments)

    def keep(self, segments: list[int]) -> None:
        """Forget all segments but these."""
        self.parts.kv.keep(segments)

    @torch.inference_mode()
    def migrate(self, message: RunMigrate) -> None:
        """This worker's side of moving KV; collective over the two instances' workers.

        Raises PlanError, WorkerError, or RuntimeError from torch.
        """
        migrate(message, self._instance, self.parts.kv, self.parts.transport)

    @torch.inference_mode()
    def run(self, step: RunStep) -> list[Sampled]:
        """This worker's part of a step; collective over all workers of its members.

        Tokens are drawn by the first worker of an instance; the others return none. A request
        for which none can be drawn is left out.
        Raises PlanError for a plan that contradicts the pool, WorkerError for lost peers or
        broken logits, RuntimeError from torch; the pool is as before in all cases.
        """
        kv = self.parts.kv
        windowed = self._is_windowed(step)
        layout = lay_out(step, self._instance, kv, row_bytes=self._row_bytes, windowed=windowed)
        with ExitStack() as undo:
            undo.callback(self._take_back, layout)
            sampled = self._forward(layout)
            undo.pop_all()
        return sampled

    def _take_back(self, layout: StepLayout) -> None:
        for segment, count in reversed(layout.grown):
            self.parts.kv.truncate(segment, count)

    def warm_up(self) -> None:
        """A small forward pass over every path that compiles or allocates on first use."""
        parts = self.parts
        tokens = torch.zeros(16, dtype=torch.int64, device=parts.device)
        positions = torch.arange(16, device=parts.device)
        hidden = parts.model.forward(
            tokens, positions, torch.full_like(positions, 16), lambda _, q, __, ___: q
        )
        if not bool(torch.isfinite(parts.model.logits(hidden[-1:])).all()):
            raise ModelError("the weights give no finite logits")

    def _is_windowed(self, step: RunStep) -> bool:
        smallest = min((w for w in self._windows if w is not None), default=None)
        if smallest is None:
            return False
        return any(e.start + len(e.tokens) // 4 > smallest for e in step.batch)

    def _forward(self, layout: StepLayout) -> list[Sampled]:
        parts = self.parts
        windowed = layout.windowed
        attention = EspAttention(
            layout,
            parts.kv,
            parts.transport,
            parts.backend,
            scale=parts.spec.head_dim**-0.5,
            windows=self._windows if windowed else (None,) * parts.spec.num_layers,
            pulse=self._pulse,
        )
        hidden_TD = parts.model.forward(
            self._tensor(layout.tokens),
            self._tensor(layout.positions),
            self._tensor(layout.lengths),
            attention,
        )
        if not layout.sampled:
            return []
        logits_BV = parts.model.logits(hidden_TD[list(layout.sample_rows)])
        if parts.tensor_parallel is not None and parts.tensor_parallel.rank:
            return []
        params = [e.sampling for e in layout.sampled if e.sampling is not None]
        positions = [e.start + len(e.tokens) // 4 for e in layout.sampled]
        drawn = sample(logits_BV, params, positions)
        return [
            _sampled(extend.request_id, token, one)
            for extend, one in zip(layout.sampled, drawn, strict=True)
            if (token := one.token) is not None
        ]

    def _tensor(self, values: object) -> Tensor:
        return torch.as_tensor(values).to(self.parts.device, non_blocking=True)


def _sampled(request_id: str, token: int, drawn: Drawn) -> Sampled:
    return Sampled(
        request_id=request_id,
        token=token,
        logprob=drawn.logprob,
        top_ids=array("i", [token for token, _ in drawn.top]).tobytes(),
        top_logprobs=array("f", [logprob for _, logprob in drawn.top]).tobytes(),
    )


def _torch_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _take_device(start: Start) -> torch.device:
    if start.cores:
        os.sched_setaffinity(0, start.cores)
        torch.set_num_threads(len(start.cores))
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


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _join_world(start: Start, device: torch.device) -> tuple[Transport, DistTensorParallel | None]:
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


def _make_pool(
    spec: ModelSpec, num_slots: int, dtype: torch.dtype, device: torch.device
) -> KvCache:
    """The pool. Raises WorkerError with the sizes when the device cannot hold it."""
    try:
        return KvCache(
            num_layers=spec.num_layers,
            num_slots=num_slots,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=device,
        )
    except RuntimeError as error:
        element = torch.empty(0, dtype=dtype).element_size()
        token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element
        raise WorkerError(
            f"a KV pool of {num_slots:,} tokens needs {num_slots * token_bytes / 2**30:,.1f} GiB, "
            f"which {_device_name(device)} cannot give; lower kv_pool_tokens"
        ) from error


def _pool_tokens(
    start: Start, spec: ModelSpec, model: Llama, device: torch.device, dtype: torch.dtype
) -> int:
    """How many slots memory allows. Raises WorkerError when none."""
    element = torch.empty(0, dtype=dtype).element_size()
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element
    if device.type == "cpu":
        allowed = int(_available_bytes() * _CPU_POOL_SHARE) // start.world_size
        tokens = min(_CPU_POOL_TOKENS, allowed // token_bytes)
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        left = int(total * start.gpu_memory_utilization) - _GPU_RESERVE_BYTES
        left -= torch.cuda.memory_allocated(device) + _activation_bytes(start, model, device)
        tokens = left // token_bytes
    if tokens < 1:
        raise WorkerError(
            f"no memory is left for the KV pool on {_device_name(device)} "
            f"({token_bytes} bytes a token); lower max_model_len or raise gpu_memory_utilization"
        )
    return tokens


def _activation_bytes(start: Start, model: Llama, device: torch.device) -> int:
    """Memory of a step of `max_step_tokens`: measured, or on a line through two smaller ones.

    The linear layers work in chunks, so only what attention needs grows with the step.
    """
    wanted = start.max_step_tokens
    more = min(wanted, _PROFILED_TOKENS)
    less = more // 2
    peak, half = (_peak_bytes(model, tokens, device) for tokens in (more, less))
    per_token = (peak - half) / max(more - less, 1)
    return int(1.25 * (peak + per_token * (wanted - more)))


def _peak_bytes(model: Llama, tokens: int, device: torch.device) -> int:
    """Most memory that a forward pass takes on top of what is taken."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    # Attention holds about as much again in float32: its output, and the ring's two blocks.
    model.forward(zeros, zeros, zeros + 1, lambda _, q, __, ___: (q.float() + q.float()).to(q))
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise WorkerError("/proc/meminfo has no MemAvailable")
