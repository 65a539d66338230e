"""The SIB's benchmark on workers with a formula of their own: its result, and fitting it anew."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from profile_kit import SHORT, FakeWorkers, make_profiler

from loongd.profiling import grid
from loongd.profiling.profiler import ProfileRequest
from loongd.profiling.store import load

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_sib.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_sib", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "QUICK", SHORT)


async def measured(workers: FakeWorkers) -> dict[str, Any]:
    """What the tool would have from a daemon with these workers."""
    profiler, _ = make_profiler(workers)
    last = []
    for request in (ProfileRequest(quick=True, save=False), ProfileRequest(quick=True, check=True)):
        words = [word async for word in profiler.run(request)]
        last.append(json.loads(json.dumps(words[-1])))
    return {
        "commit": "abc",
        "machine": {"platform": "Linux"},
        "check": last[1]["check"],
        "profile": last[0]["profile"],
        "profiled": last[0]["points"],
    }


async def test_a_result_can_be_fitted_anew_and_shipped(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await measured(FakeWorkers(2))
    result, again, shipped = (tmp_path / name for name in ("result", "again", "shipped"))
    bench.write(found, result)
    assert json.loads(result.read_text()).keys() == found.keys()
    command = ["--refit", str(result), "--out", str(again), "--profile-out", str(shipped)]
    monkeypatch.setattr(sys, "argv", ["bench_sib.py", *command])
    assert bench.main() == 0
    after = json.loads(again.read_text())
    assert after["profile"] == found["profile"]
    assert after["all"]["worst"] == pytest.approx(found["check"]["worst"], abs=1e-4)
    assert after["all"]["points"] == found["check"]["num_points"] >= 40
    assert {"prefill dop 2", "decode dop 1", "decode dop 2 masters 2"} <= set(after["by_group"])
    profile = load(shipped)
    assert profile.measured
    assert f"2 x {profile.device}, Linux, loongd abc; " in profile.source
    assert "unseen batches: mean error" in profile.source


async def test_a_bad_fit_is_told(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await measured(FakeWorkers(1))
    for step in found["profiled"]:
        step["seconds"] *= 1.2
    result = tmp_path / "result"
    bench.write(found, result)
    monkeypatch.setattr(sys, "argv", ["x", "--refit", str(result), "--out", str(tmp_path / "o")])
    assert bench.main() == 1


def test_a_summary_has_mean_ninth_decile_worst_and_bias(bench: ModuleType) -> None:
    """Five predictions are too high and fifteen too low."""
    points = [
        {"predicted_s": 2 + i / 50 * (1 if i < 5 else -1), "measured_s": 2.0, "error": i / 100}
        for i in range(20)
    ]
    found = bench.summary(points)
    assert found.pop("bias") == pytest.approx(-0.095)
    assert found == {"mean": 0.095, "p90": 0.18, "worst": 0.19, "points": 20}
