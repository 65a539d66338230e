"""Choosing between a Triton kernel and its torch twin, by the device of the tensors.

Knows: that triton may be missing. Imports it only when a CUDA tensor is first seen.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from loongd.kernels import reference, reference_skinny

_TWINS = {"skinny": reference_skinny}
"""Modules with twins in files of their own."""


@cache
def has_triton() -> bool:
    """Whether triton can be imported; without it CUDA tensors take the torch twins."""
    return find_spec("triton") is not None


@cache
def _gpu(module: str) -> Any:
    return import_module(f"loongd.kernels.gpu.{module}")


def pick(module: str, device: torch.device) -> Any:
    """The module with the kernels for tensors on `device`: `kernels.gpu.<module>` or the twins."""
    if device.type == "cuda" and has_triton():
        return _gpu(module)
    return _TWINS.get(module, reference)
