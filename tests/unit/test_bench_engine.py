"""The engine's benchmark: its cases, its table, its idle shares, and one small run of all of it."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from bench_kit import TOOLS, save_tiny_shape


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    return import_module("engine_table")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TOOLS)
    return import_module("bench_engine")


def test_names_of_cases_say_their_sizes(table: Any) -> None:
    case = table.Case.parse("decode-b32x4k")
    assert (case.kind, case.batch, case.tokens) == ("decode", 32, 4096)
    case = table.Case.parse("prefill-128k")
    assert (case.kind, case.batch, case.tokens) == ("prefill", 1, 131072)
    assert table.Case.parse("decode-b1024x64").tokens == 64
    with pytest.raises(ValueError, match="b32 is no case"):
        table.Case.parse("b32")


def test_every_figure_belongs_to_a_case_that_runs_by_default(table: Any) -> None:
    for shape, gpus, name in table.TABLE:
        assert name in table.CASES[shape, gpus].split(",")
    for names in table.CASES.values():
        assert all(table.Case.parse(name) for name in names.split(","))


def test_rows_are_judged_by_their_own_columns(table: Any) -> None:
    rows = [
        table.Row("decode-b32x4k", "one", 1, 21.0, [21.0]),
        table.Row("decode-b32x4k", "own", 2, 12.0, [12.0]),
        table.Row("decode-b1024x64", "one", 1, 34.0, [34.0]),
        table.Row("decode-b1024x64", "own", 2, 17.0, [17.0]),
        table.Row("decode-b7x3", "own", 2, 17.0, [17.0]),
    ]
    done = table.finished(rows, "llama-2-7b")
    assert [row["reached"] for row in done] == [False, True, None, True, None]
    assert [row["of_roofline"] for row in done[:2]] == [pytest.approx(1.0995), 1.25]
    assert [row["speedup_over_one"] for row in done] == [None, 1.75, None, 2.0, None]


def test_idle_shares(bench: Any) -> None:
    # busy 0 to 10, 11 to 20 (with another inside), 60 to 100: gaps of 1 and 40
    spans = [(60.0, 100.0), (0.0, 10.0), (11.0, 20.0), (12.0, 15.0)]
    assert bench.idle_shares(spans) == pytest.approx((0.41, 0.40))
    assert bench.idle_shares([]) == (None, None)


ONE = [("prefill-31", "all", 1), ("decode-b1x9", "one", 1), ("decode-b3x9", "one", 1)]
TWO = [
    ("prefill-31", "all", 2),
    ("decode-b1x9", "one", 1),
    ("decode-b1x9", "scaled", 2),
    ("decode-b3x9", "one", 1),
    ("decode-b3x9", "own", 2),
    ("decode-b3x9", "spread", 2),
    ("decode-b3x9", "scaled", 2),
]


@pytest.mark.parametrize(
    ("options", "expected"),
    [(["--instances", "1"], ONE), (["--instances", "2", "--queued"], TWO)],
    ids=["alone, one by one", "two, queued"],
)
def test_all_layouts_run_on_the_cpu(tmp_path: Path, options: list[str], expected: Any) -> None:
    save_tiny_shape(tmp_path)
    command = [sys.executable, TOOLS / "bench_engine.py", "--shape", tmp_path, "--device", "cpu"]
    command += ["--dtype", "float32", "--runs", "1", "--steps", "2", *options]
    command += ["--cases", "prefill-31,decode-b1x9,decode-b3x9", "--out", tmp_path / "out.json"]
    subprocess.run(command, check=True)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["case"], row["layout"], row["instances"]) for row in rows] == expected
    assert all(row["ms"] > 0 for row in rows)
