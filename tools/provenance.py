"""Where a recorded figure comes from: commit, date, machine; and whether others can check it out.

Knows: git and the machine. Does not know: what is measured.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Provenance:
    """Of figures measured now, for JSON.

    Args:
        commit: full id, or "unknown" outside a git checkout.
        dirty: files that decide the figures differ from that commit, so nobody can reproduce them.
        date: ISO date, UTC.
        machine: processor, cores that may be used, Python.
    """

    commit: str
    dirty: bool
    date: str
    machine: str


def provenance(root: Path, paths: Sequence[str]) -> Provenance:
    """Of a checkout at `root` of which `paths`, files or folders in it, decide the figures.

    Files that git does not know, but would not ignore, count as changes.
    """
    commit = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", *paths)
    return Provenance(
        commit=commit or "unknown",
        dirty=not commit or bool(changes),
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{_processor()}, {len(os.sched_getaffinity(0))} cores, "
        f"Python {platform.python_version()}",
    )


def _git(root: Path, *arguments: str) -> str:
    found = subprocess.run(
        ["git", "-C", root, *arguments], capture_output=True, text=True, check=False
    )
    return found.stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
