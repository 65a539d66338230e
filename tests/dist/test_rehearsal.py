"""A start finds on disk all that its rehearsal has had compiled, and needs nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rehearse_kit import KERNELS, start_message

from loongd.model.spec import ModelSpec
from loongd.worker.rehearsal import rehearse

# compiling is minutes of work where cores are few
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
ROOT = Path(__file__).resolve().parent.parent.parent


def _start(mode: str, cache: Path) -> dict[str, Any]:
    environment = {
        **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("rehearse_all.py"), mode],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def ahead(cache: Path) -> dict[str, Any]:
    """A start with a rehearsal, on an empty disk."""
    return _start("ahead", cache)


@pytest.fixture(scope="module")
def direct(cache: Path, ahead: dict[str, Any]) -> dict[str, Any]:
    """A start without one, after the other: launches look for what they need themselves."""
    assert ahead
    return _start("direct", cache)


def test_a_rehearsal_launches_nothing(ahead: dict[str, Any]) -> None:
    assert ahead["launched_early"] == 0
    assert ahead["launches"] > 1000


def test_each_variant_is_compiled_once_and_before_the_start(ahead: dict[str, Any]) -> None:
    assert set(ahead["rehearsed"]) >= KERNELS
    in_both_types, with_and_without_filters = 2, 2
    assert ahead["rehearsed"].count("weigh_part") == in_both_types * with_and_without_filters
    assert len(ahead["compiled"]) == len(set(ahead["compiled"])) == len(ahead["rehearsed"])
    assert ahead["late"] == []


def test_progress_is_shown(ahead: dict[str, Any]) -> None:
    count = len(ahead["rehearsed"])
    assert ahead["fractions"] == [pytest.approx((i + 1) / count) for i in range(count)]


def test_workers_begin_with_different_kernels(ahead: dict[str, Any]) -> None:
    """This is the second of two: what comes first in the rehearsal is left to the first."""
    half = len(ahead["rehearsed"]) // 2
    assert "norm_rows" not in ahead["rehearsed"][half:]
    most_threads = 16
    assert ahead["order"].index("norm_rows") >= half - most_threads


def test_what_was_compiled_is_what_launches_look_for(
    ahead: dict[str, Any], direct: dict[str, Any]
) -> None:
    """Neither more, which would be time lost, nor less. Keys are Triton's, made by launches."""
    assert direct["compiled"] == []
    assert set(direct["found"]) == set(ahead["compiled"])


def test_without_a_gpu_nothing_is_rehearsed(llama_dir: Path) -> None:
    def build(*_: object) -> Any:
        raise AssertionError

    spec = ModelSpec.from_dir(llama_dir)
    kernels = rehearse(start_message(), spec, torch.device("cpu"), torch.float32, build)
    kernels.finish(build)
    with kernels.watched():
        pass
