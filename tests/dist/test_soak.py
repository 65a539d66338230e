"""Random plans over real processes, for seconds: nothing hangs, and attention is exact.

`tools/soak_plans.py` is the same for as long as one likes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).resolve().parents[2] / "tools" / "soak_plans.py"

pytestmark = [pytest.mark.dist, pytest.mark.timeout(110)]


def _soak(out: Path, *arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, SOAK, "--minutes", "0.15", "--hang-s", "20", "--out", out, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_random_plans_over_sockets(tmp_path: Path) -> None:
    """Groups of four processes, at once and crossing; each row against float64 attention."""
    found = _soak(tmp_path / "soak.json", "--instances", "4", "--seed", "7")
    assert found["hangs"] == 0
    assert found["worst_error"] <= found["tolerance"]
    assert found["steps"] > 20
    assert found["migrations"] > 5
    assert found["most_groups_at_once"] >= 2


@pytest.mark.gpu
def test_random_plans_over_nccl(tmp_path: Path) -> None:
    """The same in bfloat16 on two GPUs."""
    cuda = ("--device", "cuda", "--dtype", "bfloat16", "--instances", "2", "--head-dim", "128")
    found = _soak(tmp_path / "soak.json", *cuda)
    assert found["transport"] == "nccl"
    assert found["hangs"] == 0
    assert found["worst_error"] <= found["tolerance"]
    assert found["steps"] > 20
