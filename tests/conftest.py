"""Fixtures for all tests: the small real model, as a GGUF file and converted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loongd.model.cache import converted_dir

# Without a GPU, kernels run in Triton's interpreter. Triton reads this when it is imported, which
# any test module may cause, so it is set before the first of them.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF: $LOONGD_TEST_GGUF, or fetched into the user's cache."""
    if given := os.environ.get("LOONGD_TEST_GGUF"):
        return Path(given)
    fetched = subprocess.run(
        [sys.executable, ROOT / "tools" / "fetch_model"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return Path(fetched.stdout.strip())


@pytest.fixture(scope="session")
def smollm2_dir(smollm2_gguf: Path) -> Path:
    """The model converted to float32, in the user's cache; a few seconds the first time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loongd"
    directory = converted_dir(smollm2_gguf, "float32", cache / "converted")
    # A process of its own, as in the daemon; it returns at once when the work is done.
    convert = [sys.executable, "-m", "loongd.model.convert", "--dtype", "float32"]
    subprocess.run(
        [*convert, smollm2_gguf, directory],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    return directory
