"""A tiny model for all tests of this directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GQA with 6 query heads over 2: no number of instances above 3 divides them."""
    return _model(tmp_path_factory.mktemp("llama"), num_kv_heads=2)


@pytest.fixture(scope="session")
def mha_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of its own for each query head."""
    return _model(tmp_path_factory.mktemp("mha"), num_kv_heads=6)


@pytest.fixture(scope="session")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 128, as libraries for GPUs like them."""
    path = tmp_path_factory.mktemp("wide")
    return _model(path, num_kv_heads=2, head_dim=128, max_position_embeddings=16_384)


def _model(path: Path, *, num_kv_heads: int, **overrides: int) -> Path:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": 199,
        "max_position_embeddings": 1024,
    }
    config = LlamaConfig(**(sizes | overrides), initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(path)
    return path
