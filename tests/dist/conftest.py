"""A tiny model for all tests of this directory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GQA with 6 query heads over 2: no number of instances above 3 divides them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=199,
        initializer_range=0.2,
        max_position_embeddings=1024,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path
