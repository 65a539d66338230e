"""Compile kernels ahead for an H200, without one, where something is wrong.

`main` tells what, and what is written. In a process of its own: the interpreter must be off.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from loongd.errors import WorkerError
from loongd.kernels.gpu import elementwise, signal
from loongd.kernels.gpu.ahead import Compiling, Recording, Watch


@triton.jit
def broken(x_ptr, BLOCK: tl.constexpr):
    """Adds blocks of two sizes."""
    tl.store(x_ptr, tl.arange(0, BLOCK) + tl.arange(0, 2 * BLOCK))


def _launch_good() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    signal.raise_flag(flag)
    signal.await_flag(flag, 5)
    elementwise.silu_mul(torch.zeros(3, 16), torch.zeros(3, 16))


def main(mode: str) -> None:
    """`good`: three kernels; `broken`: one of four cannot be compiled.

    Writes whether Triton's directory is still the one that was asked for, what was compiled late,
    the error, and whether there was a wait, before the first launch and after.
    """
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda _: 0,
            get_current_target=lambda: GPUTarget("cuda", 90, 32),
            launcher_cls=lambda *_: lambda *_: None,
            utils=SimpleNamespace(
                get_device_properties=lambda _: {"max_shared_mem": 232_448},
                load_binary=lambda *_: (1, 1, 0, 0, 1024),
            ),
        )
    )
    wanted = os.environ["TRITON_CACHE_DIR"]
    with Recording() as recording:
        _launch_good()
        if mode == "broken":
            broken[(1,)](torch.zeros(16), BLOCK=16)
    error = ""
    try:
        Compiling.start(recording.variants).finish(lambda _: None)
    except WorkerError as failed:
        error = str(failed)
    waited = [signal.has_waited()]
    with Watch() as watch:
        _launch_good()
    waited.append(signal.has_waited())
    kept = knobs.cache.dir == wanted
    report = {"kept": kept, "late": watch.names, "error": error, "waited": waited}
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
