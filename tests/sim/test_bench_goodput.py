"""What a recorded search says of itself, and that earlier ones give way to newer ones."""

import subprocess
from importlib import import_module
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(TOOLS)
    return import_module


def git(folder, *arguments):
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def test_a_checkout_with_changes_is_dirty(tool, tmp_path):
    provenance = tool("provenance").provenance
    git(tmp_path, "init", "--quiet")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    (tmp_path / "elsewhere.txt").write_text("does not matter")
    clean = provenance(tmp_path, ["code"])
    assert (clean.commit, clean.dirty) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "code" / "new.py").write_text("2")
    assert provenance(tmp_path, ["code"]).dirty
    (tmp_path / "code" / "new.py").unlink()
    (tmp_path / "code" / "a.py").write_text("3")
    assert provenance(tmp_path, ["code"]).dirty


def test_outside_git_nothing_can_be_reproduced(tool, tmp_path):
    found = tool("provenance").provenance(tmp_path, ["."])
    assert (found.commit, found.dirty) == ("unknown", True)


def test_a_search_done_again_replaces_the_earlier_one(tool):
    def row(system, limit, rate_rps, **more):
        return {"system": system, "zipf": "1.0", "max_batched_tokens": limit} | {
            "goodput_rps": rate_rps,
            **more,
        }

    earlier = [row("TP8", 512, 9.0), row("TP8", 4096, 1.0), row("fcfs", 512, 2.0, commit="c1")]
    joined = tool("bench_goodput").join(earlier, [row("TP8", 512, 3.0, commit="c2")])
    assert joined == [
        row("TP8", 4096, 1.0, commit="unknown"),
        row("fcfs", 512, 2.0, commit="c1"),
        row("TP8", 512, 3.0, commit="c2"),
    ]
    assert tool("bench_goodput").conclude(joined)["1.0"]["goodput_rps"] == {"TP8": 3.0, "fcfs": 2.0}
