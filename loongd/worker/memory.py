"""How large an instance's KV pool can be: what memory is left when everything else has its share.

Knows: what a forward pass takes, measured on the device itself. Does not know: the pool's use.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from loongd.errors import WorkerError
from loongd.kernels.partials import Partials
from loongd.model.llama import LINEAR_CHUNK_TOKENS, Llama
from loongd.model.spec import ModelSpec
from loongd.wire import Start
from loongd.worker.decode_layout import MAX_EXCHANGED_ROWS
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import most_round_tokens
from loongd.worker.peers import box_bytes, buffer_bytes, partial_length
from loongd.worker.striped_layout import MOST_PARTIAL_ROWS, MOST_SENT_ROWS, message_length

_CPU_POOL_TOKENS = 16384
"""Default slots of a CPU instance; pages of the pool are taken only when they are written."""
_CPU_POOL_SHARE = 0.25
"""Most of the available memory that the pools of all CPU instances may take by default."""
_PROFILED_TOKENS = 8 * LINEAR_CHUNK_TOKENS
"""Most tokens of the forward passes that measure the memory of activations."""
_GPU_RESERVE_BYTES = 2 << 30
"""Kept for NCCL, cuBLAS and the allocator's fragments."""
_STEP_MARGIN = 1.25
"""The pool leaves so many times the memory that a largest step was measured to take."""


def device_name(device: torch.device) -> str:
    """What people call the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def make_pool(spec: ModelSpec, num_slots: int, dtype: torch.dtype, device: torch.device) -> KvCache:
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
        error.__traceback__ = None  # it holds a part of the pool, which is to count as free
        token_bytes = _token_bytes(spec, dtype)
        most = max(_free_bytes(device), 0) // token_bytes
        raise WorkerError(
            f"a KV pool of {num_slots:,} tokens needs {num_slots * token_bytes / 2**30:,.1f} GiB, "
            f"which {device_name(device)} cannot give; lower kv_pool_tokens (at most {most:,} fit)"
        ) from error


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Memory of a step's work by its new tokens: a line through two measured forward passes.

    `most_bytes` were taken by a pass of `tokens`, `token_bytes` by each more. The linear layers
    work in chunks, so from `knee_tokens` on only what attention needs grows with the step; below,
    all of it does. `rounds_bytes` are taken beside by older tokens' keys from other instances.
    """

    tokens: int
    most_bytes: int
    token_bytes: float
    knee_tokens: int
    rounds_bytes: int = 0

    @classmethod
    def measure(
        cls, max_step_tokens: int, model: Llama, partials: Partials, device: torch.device
    ) -> StepBytes | None:
        """By passes of up to `max_step_tokens`; None on a CPU, whose memory is not counted."""
        if device.type != "cuda":
            return None
        more = min(max_step_tokens, _PROFILED_TOKENS)
        less = max(more // 2, 1)
        (most, key_bytes), (half, _) = (
            _peak_bytes(model, partials, tokens, device) for tokens in (more, less)
        )
        slope = (most - half) / max(more - less, 1)
        # a round that is in use, and the next one
        rounds_bytes = 2 * most_round_tokens(key_bytes) * key_bytes
        return cls(more, most, slope, min(less, LINEAR_CHUNK_TOKENS), rounds_bytes)

    def of(self, tokens: int, *, keys_travel: bool = False) -> int:
        """Bytes that a step of so many new tokens takes at its peak; with `keys_travel` those of
        one in which keys may come from or go to other instances."""
        on_line = max(tokens, self.knee_tokens)
        line_bytes = self.most_bytes + self.token_bytes * (on_line - self.tokens)
        return int(line_bytes * tokens / on_line) + keys_travel * self.rounds_bytes


def pool_tokens(
    start: Start,
    spec: ModelSpec,
    step_bytes: StepBytes | None,
    device: torch.device,
    dtype: torch.dtype,
) -> int:
    """How many slots this worker's memory allows. Raises WorkerError when none."""
    token_bytes = _token_bytes(spec, dtype)
    if step_bytes is None:
        allowed = int(_available_bytes() * _CPU_POOL_SHARE) // start.world_size
        tokens = min(_CPU_POOL_TOKENS, allowed // token_bytes)
    else:
        total = torch.cuda.get_device_properties(device).total_memory
        left = int(total * start.gpu_memory_utilization) - _GPU_RESERVE_BYTES
        left -= torch.cuda.memory_allocated(device)
        several = start.world_size > start.tensor_parallel_size
        most_bytes = step_bytes.of(start.max_step_tokens, keys_travel=several)
        left -= int(_STEP_MARGIN * most_bytes)
        if start.tensor_parallel_size == 1:
            left -= exchange_bytes(spec, dtype, start.world_size)
        tokens = left // token_bytes
    if tokens < 1:
        raise WorkerError(
            f"no memory is left for the KV pool on {device_name(device)} "
            f"({token_bytes} bytes a token); lower max_model_len or raise gpu_memory_utilization"
        )
    return tokens


def exchange_bytes(spec: ModelSpec, dtype: torch.dtype, num_instances: int) -> int:
    """What a worker maps for the others to write into: queries and answers of decode, K, V and
    queries of small prefills, and their partial results. 0.2 GB for each instance with 32 heads of
    128."""
    if num_instances == 1:
        return 0
    heads, head_dim = spec.num_heads, spec.head_dim
    message = message_length(spec, MOST_SENT_ROWS)
    partial = partial_length(MOST_PARTIAL_ROWS, heads, head_dim)
    return (
        buffer_bytes(num_instances, MAX_EXCHANGED_ROWS, heads, head_dim, dtype)
        + box_bytes(num_instances, message, dtype)
        + box_bytes(num_instances, partial, torch.float32)
    )


def _peak_bytes(
    model: Llama, partials: Partials, tokens: int, device: torch.device
) -> tuple[int, int]:
    """Most memory that a forward pass takes on top of what is taken; and a token's K and V in one
    layer."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
    key_bytes = 0

    def attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal key_bytes
        key_bytes = k[0].nbytes + v[0].nbytes
        # Its running result, a part to merge, and about as much again for the ring's two blocks.
        state, part, blocks = (partials.empty(q) for _ in range(3))
        partials.merge_(*state, *part)
        del part, blocks
        return partials.result(*state, q.dtype)

    model.forward(zeros, zeros, zeros + 1, attention)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    return peak, key_bytes


def _token_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """A token's K and V in all layers."""
    element = torch.empty(0, dtype=dtype).element_size()
    return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * element


def _free_bytes(device: torch.device) -> int:
    """What a pool could still take now, leaving on a GPU what is kept for others."""
    if device.type != "cuda":
        return _available_bytes()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached - _GPU_RESERVE_BYTES


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise WorkerError("/proc/meminfo has no MemAvailable")
