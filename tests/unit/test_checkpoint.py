"""A GGUF file whose conversion has nowhere to go, and what workers find in their environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from loongd.checkpoint import open_checkpoint
from loongd.config import Config
from loongd.errors import ConfigError
from loongd.pool import _environment


async def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    model, file = tmp_path / "model.gguf", tmp_path / "file"
    model.touch()
    file.touch()
    config = Config(model=str(model), cache_dir=str(file / "cache"))
    with pytest.raises(ConfigError, match=r"cache_dir .*file/cache cannot be made: "):
        await open_checkpoint(config, lambda *_: None)


@pytest.mark.parametrize(
    ("own", "spins"),
    [
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "5"}, "5"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_threads_of_workers_do_not_spin_for_long(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], spins: str | None
) -> None:
    """Unless who starts the daemon says otherwise."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert _environment().get("GOMP_SPINCOUNT") == spins
