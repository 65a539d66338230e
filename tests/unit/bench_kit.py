"""A tiny model without weights, for benchmarks that are run on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def save_tiny_shape(directory: Path) -> Path:
    """The configuration of a model of one layer, 2 KV heads and 1,000 ids."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1000,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
