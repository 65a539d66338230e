"""The benchmark of elasticity, all of it once and small; and how a run ends when a rank fails."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from bench_kit import TOOLS, save_tiny_shape

WORDS = "the error of rank 1"


@pytest.fixture
def kit(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    return import_module("engine_kit")


@pytest.mark.slow
def test_all_cases_run_on_the_cpu(tmp_path: Path) -> None:
    save_tiny_shape(tmp_path)
    command = [sys.executable, TOOLS / "bench_esp.py", "--shape", tmp_path, "--device", "cpu"]
    command += ["--dtype", "float32", "--pool-tokens", "400", "--repeats", "1"]
    command += ["--cases", "retention,ring,timeline,decode,prefill,chunk", "--retention", "30x2"]
    command += ["--ring", "20", "--timeline-tokens", "20", "--decode", "40x3,150x3"]
    command += ["--decode-steps", "3", "--prefill", "50", "--chunk", "90x20,9x20"]
    command += ["--out", tmp_path / "out.json"]
    subprocess.run(command, check=True)
    cases = {}
    for case in json.loads((tmp_path / "out.json").read_text())["cases"]:
        cases.setdefault(case["case"], []).append(case)
    assert list(cases) == ["retention", "ring", "timeline", "decode", "prefill", "chunk"]
    layouts = ("one_instance_s", "two_masters_s", "two_holders_s", "one_master_two_holders_s")
    small, large = cases["decode"]
    assert all(small[name] > 0 for name in layouts)
    # 450 tokens of KV: too many for one instance of 400, and 300 for one that has two of three
    assert [large[name] is None for name in layouts] == [True, False, False, False]
    assert cases["retention"][0]["reactive_migration_s"] > 0
    # K and V of 20 tokens, 2 heads of 8 floats, 1 layer
    assert cases["timeline"][0]["sent_bytes"] >= cases["timeline"][0]["least_bytes"] == 2560
    assert cases["prefill"][0]["prompt_tokens"] == 50
    # 10 queries of 4 heads are fewer bytes than 90 keys, and 9 keys than 10 queries; and the ring
    asked, passed = (case["sent_bytes_instance_0"] for case in cases["chunk"])
    assert asked["one_sided_s"] == asked["passing_queries_s"] == 10 * 128 + 10 * 4 * 9 * 4
    assert passed["one_sided_s"] == (10 + 9) * 128
    assert asked["half_alone_s"] == 0 < asked["spread_s"]
    assert all(case["spread_of_half_alone"] > 0 for case in cases["chunk"])


def _fail_or_wait(rank: int, words: str) -> None:
    if rank == 1:
        raise ValueError(words)
    time.sleep(600)


@pytest.mark.timeout(60)
def test_when_a_rank_fails_the_others_are_killed(kit: Any, capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="rank 1 failed: exit code 1"):
        kit.on_all_ranks(2, _fail_or_wait, WORDS)
    assert f"ValueError: {WORDS}" in capfd.readouterr().err
