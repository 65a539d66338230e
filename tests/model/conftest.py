"""Tiny random models, saved by transformers, and a dense attention to run ours with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from loongd.model.llama import Llama
from loongd.model.spec import ModelSpec
from loongd.model.weights import load_weights

CPU = torch.device("cpu")
CONFIGS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
TINY = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # large enough that a wrong operation shows in the logits
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
    # a fresh dict for each: transformers writes into it
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class DenseAttention:
    """Causal attention over everything seen so far, in float32; one request, one instance."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self.layers: list[int] = []

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        self.layers.append(layer)
        k_SKH = torch.cat((self._keys.get(layer, k_TKH[:0]), k_TKH))
        v_SKH = torch.cat((self._values.get(layer, v_TKH[:0]), v_TKH))
        self._keys[layer], self._values[layer] = k_SKH, v_SKH
        repeats = q_TNH.shape[1] // k_SKH.shape[1]
        k_SNH = k_SKH.repeat_interleave(repeats, dim=1).float()
        v_SNH = v_SKH.repeat_interleave(repeats, dim=1).float()
        scores = torch.einsum("tnh,snh->nts", q_TNH.float(), k_SNH) / q_TNH.shape[2] ** 0.5
        num_keys, num_queries = len(k_SKH), len(q_TNH)
        distance = (
            torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)[None]
        )
        hidden = distance < 0
        window = self._spec.window(layer)
        if window is not None:
            hidden |= distance >= window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("nts,snh->tnh", weights, v_SNH)


@pytest.fixture
def save_model(tmp_path: Path) -> Callable[..., tuple[Path, PreTrainedModel]]:
    """`save_model(kind, **overrides)`: a directory and the reference model with its weights."""

    def save(
        kind: str, *, max_shard_size: str = "5GB", **overrides: Any
    ) -> tuple[Path, PreTrainedModel]:
        torch.manual_seed(0)
        config = CONFIGS[kind](**(TINY | overrides))
        model = AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(tmp_path / "model", max_shard_size=max_shard_size)
        return tmp_path / "model", model

    return save


def load(model_dir: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSpec, Llama]:
    """Our model from a directory, on the CPU."""
    spec = ModelSpec.from_dir(model_dir)
    weights = load_weights(
        model_dir,
        spec,
        load_format="auto",
        dtype=dtype,
        device=CPU,
        seed=0,
        progress=lambda stage, fraction: None,
    )
    return spec, Llama(spec, weights, CPU, dtype)


@pytest.fixture(name="load")
def load_fixture() -> Callable[..., tuple[ModelSpec, Llama]]:
    return load


@pytest.fixture
def dense_attention() -> type[DenseAttention]:
    return DenseAttention
