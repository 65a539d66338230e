"""Every kernel compiles for A100 and for H100 and H200 and fits their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

# compiling is minutes of work where cores are few
pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parent.parent.parent
SHARED_BYTES = {80: 166_912, 90: 232_448}
"""Most shared memory of one program."""
CASES = (
    ("bfloat16:128:32:8", "float16@80", "bfloat16"),
    ("float16:80:8:8@80", "float32:128:8:2@80", "bfloat16:256:8:4@80", "float32@80"),
)
KERNELS = {
    "attend_shares",
    "merge_shares",
    "norm_rows",
    "silu_mul_rows",
    "rotate_and_store",
    "scatter_rows",
    "push_block",
    "add_to_flag",
    "wait_for_flag",
    "merge_rows",
    "best_of_part",
    "best_of_row",
    "guess_bound",
    "weigh_part",
    "draw_unfiltered",
    "draw_filtered",
    "product_of_few",
    "angles_of_rows",
    "tokens_of_rows",
}


def _compile(cases: tuple[str, ...], cache: Path) -> list[dict[str, Any]]:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_all.py"), *cases],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache = tmp_path_factory.mktemp("triton")
    with ThreadPoolExecutor(len(CASES)) as pool:
        parts = pool.map(lambda cases: _compile(cases, cache), CASES)
        return [binary for part in parts for binary in part]


def test_every_kernel_for_every_architecture(binaries: list[dict[str, Any]]) -> None:
    for arch in SHARED_BYTES:
        assert {b["kernel"] for b in binaries if b["arch"] == arch} == KERNELS


def test_shared_memory_fits(binaries: list[dict[str, Any]]) -> None:
    for binary in binaries:
        assert binary["shared"] <= SHARED_BYTES[binary["arch"]], binary


EARLY = {
    "attend_shares",
    "best_of_part",
    "best_of_row",
    "merge_shares",
    "norm_rows",
    "product_of_few",
    "rotate_and_store",
    "silu_mul_rows",
}
"""Kernels that are launched while the one ahead of them ends."""


def test_early_kernels_wait_before_all_else(binaries: list[dict[str, Any]]) -> None:
    for binary in binaries:
        early = binary["kernel"] in EARLY and binary["arch"] == 90
        assert binary["waits"] == early, binary
        if early:
            assert not binary["ahead_of_wait"], binary


def test_keys_are_loaded_ahead(binaries: list[dict[str, Any]]) -> None:
    """Half-precision attention keeps asynchronous copies in flight; large tiles use wgmma."""
    attention = [b for b in binaries if b["kernel"] == "attend_shares" and b["types"][0] != "*fp32"]
    assert len(attention) >= 12
    for binary in attention:
        assert binary["async_copies"] > 0, binary
        if binary["arch"] == 90 and binary["constants"]["BLOCK_M"] == 128:
            assert binary["wgmma"], binary
