"""Cosines and sines against transformers, each type, short and long."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from loongd.kernels.elementwise import rotary_angles
from loongd.model.arithmetic import Exact
from loongd.model.rope import Rotary
from loongd.model.spec import ModelSpec

CPU = torch.device("cpu")
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 1024},
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn attention_factor": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 1024,
        "attention_factor": 1.7,
    },
}
MAX_POSITIONS = 8192


def both(name: str, *, head_dim: int = 64, theta: float = 10000.0, angles=rotary_angles):
    """Our Rotary and transformers' for one configuration."""
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=4 * head_dim,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=ROPES[name] | {"rope_theta": theta},
        architectures=["LlamaForCausalLM"],
    )
    spec = ModelSpec.from_config(config.to_dict())
    return Rotary(spec, CPU, angles=angles), LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize(("head_dim", "theta"), [(64, 10000.0), (128, 1e6)])
@pytest.mark.parametrize("start", [0, 8000, 40_000, 1_000_000])
def test_equals_transformers(name, head_dim, theta, start):
    rotary, reference = both(name, head_dim=head_dim, theta=theta)
    positions_T = torch.arange(start, start + 300)
    cos, sin = reference(torch.empty(0), positions_T[None])
    cos_TH, sin_TH = rotary.cos_sin(positions_T, torch.full_like(positions_T, start + 300))
    assert cos_TH.dtype == sin_TH.dtype == torch.float32
    torch.testing.assert_close(cos_TH, cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin_TH, sin[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ROPES)
def test_the_exact_angles_too(name):
    rotary, reference = both(name, angles=Exact().rotary_angles)
    positions_T = torch.tensor([0, 1, 999, 8191, 40_000])
    cos, sin = reference(torch.empty(0), positions_T[None])
    cos_TH, sin_TH = rotary.cos_sin(positions_T, torch.full_like(positions_T, 40_001))
    torch.testing.assert_close(cos_TH, cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(sin_TH, sin[0], atol=1e-6, rtol=0)


def test_types_differ():
    """The comparison above would pass if every type were the default: it is not so."""
    positions_T = torch.arange(9000, 9100)
    tables = [
        both(name)[0].cos_sin(positions_T, torch.full_like(positions_T, 9100))[0] for name in ROPES
    ]
    for i, first in enumerate(tables):
        for second in tables[i + 1 :]:
            assert (first - second).abs().max() > 1e-2


def test_dynamic_uses_each_tokens_own_length():
    """A batch of requests, short and long, equals each of them alone."""
    rotary, _ = both("dynamic")
    lengths = [10, MAX_POSITIONS, MAX_POSITIONS + 1, 20_000, 30_000]
    positions_T = torch.tensor([length - 1 for length in lengths])
    cos_TH, sin_TH = rotary.cos_sin(positions_T, torch.tensor(lengths))
    for i, length in enumerate(lengths):
        _, reference = both("dynamic")  # fresh: the reference remembers the longest length
        cos, sin = reference(torch.empty(0), torch.arange(length)[None])
        torch.testing.assert_close(cos_TH[i], cos[0, -1], atol=1e-6, rtol=0)
        torch.testing.assert_close(sin_TH[i], sin[0, -1], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ROPES)
def test_no_tokens(name):
    empty = torch.empty(0, dtype=torch.int64)
    cos_TH, sin_TH = both(name)[0].cos_sin(empty, empty)
    assert cos_TH.shape == sin_TH.shape == (0, 64)
