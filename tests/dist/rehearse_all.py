"""Rehearse a worker's start for an H200 without a GPU, compile, and then start for real.

All tensors are on the CPU, and a driver that does nothing takes the launches; what is compiled, and
found again, is what a GPU would get. One JSON document on stdout: see `main`.
Run in a process of its own: the interpreter must be off.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rehearse_kit import NUM_INSTANCES, start_message
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from loongd.kernels import cudnn, dispatch
from loongd.kernels.gpu import (
    attend,
    draw,
    elementwise,
    merge,
    plan,
    pool,
    sampling,
    signal,
    skinny,
)
from loongd.kernels.gpu.ahead import Compiling, Recording, Watch
from loongd.kernels.partials import FloatPartials
from loongd.kernels.libraries import Cudnn
from loongd.kernels.triton_backend import TritonBackend
from loongd.model import weights
from loongd.model.arithmetic import Fast
from loongd.model.llama import Llama
from loongd.model.spec import ModelSpec
from loongd.worker import rehearsal, runner
from loongd.worker.comm import LoopbackWorld
from loongd.worker.heart import Pulse
from loongd.worker.memory import make_pool
from loongd.worker.parts import Parts
from loongd.worker.runner import Runner

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SPEC = ModelSpec.from_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 5000,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    },
    origin="test",
)


class _Driver:
    """An H200 that forgets what it is told."""

    def __init__(self) -> None:
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 232_448},
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
        )
        self.launches = 0

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        del source, metadata
        return self._launch

    def _launch(self, *_: object) -> None:
        self.launches += 1


def _fused(fetch: Any, names: list[str], *, has_bias: bool) -> weights.Projection:
    """As on a GPU."""
    assert not has_bias
    parts = [fetch(f"{name}.weight") for name in names]
    return weights.Projection((torch.cat(parts),), (None,), tuple(map(len, parts)))


def _attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool) -> Any:
    """As cuDNN leaves its results: log-sum-exps by head."""
    del k, v, scale, causal
    return torch.zeros_like(q), torch.zeros(q.shape[1], len(q)).T


def _pretend(fake: _Driver) -> None:
    """The CPU is an H200: kernels for it, of its sizes; no library computes anything."""
    driver.set_active(fake)
    kernels = SimpleNamespace()
    for module in (attend, draw, elementwise, merge, pool, sampling, signal, skinny):
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") == module.__name__:
                setattr(kernels, name, value)
            if isinstance(value, JITFunction):
                # known before threads launch: see `ahead._Source`
                assert value.cache_key
    dispatch.reference = kernels
    dispatch._TWINS = {}
    plan._multiprocessors = lambda _: 132
    skinny._is_measured = lambda _: True
    skinny._threshold = lambda *_, gated: 64 if gated else 32
    cudnn.attention = _attention
    cudnn.plan_ahead = lambda *_, **__: ()
    weights._projection = _fused
    torch.cuda.synchronize = lambda *_: None
    torch.nn.functional.linear = lambda x, w, _=None: x.new_zeros(*x.shape[:-1], len(w))
    runner.can_capture = lambda *_: True
    rehearsal.Numerics.choose = lambda *_, **__: SimpleNamespace(
        arithmetic=_fast(), backend=_backend(), partials=FloatPartials()
    )


def _fast() -> Fast:
    return Fast(skinny.new_tickets(CPU))


def _backend() -> TritonBackend:
    library = Cudnn(SPEC.head_dim**-0.5)
    return TritonBackend(library.scale, library, library)


def _runners() -> list[Runner]:
    """All layers, a pool of another size; made as `Runner.start` makes its parts."""
    loaded = weights.load_weights(
        Path(),
        SPEC,
        load_format="dummy",
        dtype=BF16,
        device=CPU,
        seed=0,
        progress=lambda *_: None,
    )
    model = Llama(SPEC, loaded, CPU, BF16, arithmetic=_fast())
    world = LoopbackWorld(NUM_INSTANCES)
    parts = [
        Parts(SPEC, CPU, BF16, 0, model, world.transport(i), _backend(), kv, None)
        for i in range(NUM_INSTANCES)
        for kv in [make_pool(SPEC, 40_001, BF16, CPU)]
    ]
    # nothing is computed, so that it must not be looked at
    return [Runner(replace(one, rehearsing=True), i, Pulse()) for i, one in enumerate(parts)]


def _start(runners: list[Runner]) -> None:
    def warm_up(one: Runner) -> None:
        one.warm_up(NUM_INSTANCES, lambda *_: None)

    with ThreadPoolExecutor(NUM_INSTANCES) as threads:
        list(threads.map(warm_up, runners))
    for one in runners:
        one.capture(NUM_INSTANCES, lambda *_: None)


def main(mode: str) -> None:
    """`ahead`: rehearse, compile, start. `direct`: start alone.

    Writes the kernels that were rehearsed, once for each variant; what was compiled and what was
    found on disk (by Triton's hash); the order of compilation; what was compiled late; fractions
    of progress; launches.
    """
    compiled: list[str] = []
    found: list[str] = []
    order: list[str] = []

    def listen(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (found if cache_hit else compiled).append(metadata["hash"])
        if not cache_hit:
            order.append(src.name)

    knobs.compilation.listener = listen
    fake = _Driver()
    _pretend(fake)
    rehearsed: list[str] = []
    fractions: list[float] = []
    launched_early = 0
    if mode == "ahead":
        with Recording() as recording:
            rehearsal.Rehearsal(start_message(), SPEC, CPU, BF16).run(
                lambda p, i: Runner(p, i, Pulse())
            )
        launched_early = fake.launches
        rehearsed = [variant.name for variant in recording.variants]
        compiling = Compiling.start(recording.variants, share=(1, 2))
        compiling.finish(fractions.append)
    with Watch() as watch:
        _start(_runners())
    json.dump(
        {
            "rehearsed": rehearsed,
            "compiled": compiled,
            "order": order,
            "found": found,
            "late": watch.names,
            "fractions": fractions,
            "launches": fake.launches,
            "launched_early": launched_early,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main(sys.argv[1])
