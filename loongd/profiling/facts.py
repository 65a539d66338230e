"""What a profile must match to be used: the model's shape, the device, the libraries.

Knows: how to name them. Does not know: profiles, workers.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from pathlib import Path

from loongd import __version__
from loongd.model.spec import DTYPE_BYTES, ModelSpec
from loongd.sched.sib_default import ModelFacts


def model_facts(name: str, spec: ModelSpec, dtype: str) -> ModelFacts:
    """The shape of a model that is served in `dtype`."""
    windows = {spec.window(layer) for layer in range(spec.num_layers)} - {None}
    return ModelFacts(
        name=name,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        vocab_size=spec.vocab_size,
        element_bytes=DTYPE_BYTES[dtype],
        window=min((w for w in windows if w is not None), default=None),
    )


def device_key(device_name: str, *, num_cores: int, num_workers: int) -> str:
    """The device as profiles name it. A CPU is a processor and each worker's share of it."""
    if device_name != "cpu":
        return device_name
    share = f"{num_cores} cores for {num_workers} workers"
    if num_cores >= num_workers:
        share = f"{num_cores // num_workers} cores a worker"
    return f"cpu {_processor()}, {share}"


def device_words(key: str) -> str:
    """The key for people; profiles are found by the key, which stays as files have it."""
    return key.replace(", 1 cores ", ", 1 core ")


def versions() -> dict[str, str]:
    """What else a step's duration depends on."""
    found = {"loongd": __version__, "torch": importlib.metadata.version("torch")}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["triton"] = importlib.metadata.version("triton")
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return "unknown"
