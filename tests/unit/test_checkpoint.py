"""What is said of a model before it is converted, and what workers find in their environment."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from loongd.checkpoint import open_checkpoint
from loongd.config import Config
from loongd.errors import ConfigError, LoongError, ModelError
from loongd.model import convert
from loongd.pool import _environment


async def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    model, file = tmp_path / "model.gguf", tmp_path / "file"
    model.touch()
    file.touch()
    config = Config(model=str(model), cache_dir=str(file / "cache"))
    with pytest.raises(ConfigError, match=r"cache_dir .*file/cache cannot be made: "):
        await open_checkpoint(config, lambda *_: None)


async def test_a_name_instead_of_a_path_is_told_that_nothing_is_downloaded() -> None:
    words = "--model some/name: no such directory, and not a .gguf file; loongd does not download"
    with pytest.raises(ModelError, match=re.escape(words)):
        await open_checkpoint(Config(model="some/name"), lambda *_: None)


async def test_a_file_that_is_no_gguf_is_told_apart_from_one_that_is_missing(
    tmp_path: Path,
) -> None:
    path = tmp_path / "README.md"
    path.touch()
    words = f"--model {path}: it is a file, but no .gguf file"
    with pytest.raises(ModelError, match=re.escape(words)):
        await open_checkpoint(Config(model=str(path)), lambda *_: None)


def _write_gguf(path: Path) -> None:
    """The header of a small llama, and one tensor: no tokenizer, so that it cannot be converted."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((300, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_model_len": 129}, ConfigError, "max_model_len is 129, but the model allows 128"),
        ({"tensor_parallel_size": 3}, ConfigError, "tensor_parallel_size = 3 does not divide"),
        ({"chat_template": "/no/such"}, ConfigError, "chat_template: the chat template /no/such"),
        ({"chat_template": "{% if %}"}, ConfigError, "is not valid Jinja"),
        ({"max_model_len": 128}, ModelError, "tokenizer.ggml"),
    ],
)
async def test_options_that_the_model_contradicts_are_told_before_it_is_converted(
    options: dict[str, Any], error: type[LoongError], words: str, tmp_path: Path
) -> None:
    """The last case shows what conversion itself says of this file."""
    path, cache = tmp_path / "model.gguf", tmp_path / "cache"
    _write_gguf(path)
    config = Config(model=str(path), cache_dir=str(cache), **options)
    with pytest.raises(error, match=re.escape(words)):
        await open_checkpoint(config, lambda *_: None)
    left = list(cache.iterdir()) if cache.is_dir() else []
    assert all(file.suffix == ".lock" for file in left), "what was begun is gone"


def test_who_asks_before_converting_and_has_no_answer_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out_dir = tmp_path / "model.gguf", tmp_path / "cache" / "model"
    _write_gguf(path)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match="not wanted"):
        convert.main([str(path), str(out_dir), "--ask"])
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["config"]["hidden_size"] == 64
    assert [file.name for file in out_dir.parent.iterdir()] == [".model.lock"]


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
