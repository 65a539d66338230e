"""The forward pass against transformers with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loongd.kernels.spare import with_spare
from loongd.model.llama import Llama, run_until
from loongd.model.weights import load_weights

LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama mha": ("llama", {"num_key_value_heads": 4}),
    "llama mqa": ("llama", {"num_key_value_heads": 1}),
    "llama head_dim is not D/N": ("llama", {"head_dim": 20}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama linear": ("llama", {"rope_parameters": LINEAR}),
    "llama dynamic, short": ("llama", {"rope_parameters": DYNAMIC}),
    "llama dynamic, long": (
        "llama",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    ),
    "llama llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral sliding": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen2 some layers slide": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}


def run(model, attention, tokens: list[int], start: int = 0, length: int | None = None):
    """Logits of every token, and hidden states."""
    positions_T = torch.arange(start, start + len(tokens))
    lengths_T = torch.full_like(positions_T, length or start + len(tokens))
    hidden_TD = model.forward(torch.tensor(tokens), positions_T, lengths_T, attention)
    return model.logits(hidden_TD)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case, save_model, load, dense_attention):
    kind, overrides = CASES[case]
    if "rope_parameters" in overrides:
        overrides = overrides | {"rope_parameters": dict(overrides["rope_parameters"])}
    model_dir, reference = save_model(kind, **overrides)
    spec, model = load(model_dir)
    tokens = torch.randint(0, 97, (41,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected_TV = reference(tokens[None]).logits[0]
    logits_TV = run(model, dense_attention(spec), tokens.tolist())
    assert logits_TV.dtype == torch.float32
    assert expected_TV.std() > 0.5  # else the tolerance below would prove nothing
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_tokens_equal_transformers(kind, save_model, load, dense_attention):
    model_dir, reference = save_model(kind)
    spec, model = load(model_dir)
    prompt = [5, 17, 3, 96, 40, 8]
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    attention = dense_attention(spec)
    tokens = list(prompt)
    logits_TV = run(model, attention, prompt)
    for _ in range(24):
        tokens.append(int(logits_TV[-1].argmax()))
        logits_TV = run(model, attention, tokens[-1:], start=len(tokens) - 1)
    assert tokens == expected[0].tolist()


def test_bfloat16_is_close_to_float32(save_model, load, dense_attention):
    model_dir, _ = save_model("qwen2", initializer_range=0.1)
    spec, exact = load(model_dir)
    _, model = load(model_dir, torch.bfloat16)
    tokens = list(range(20, 50))
    expected_TV = run(exact, dense_attention(spec), tokens)
    logits_TV = run(model, dense_attention(spec), tokens)
    assert (logits_TV - expected_TV).abs().max() < 0.05 * expected_TV.std()


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tokens_still_attends_in_every_layer(kind, dtype, save_model, load):
    model_dir, _ = save_model(kind)
    spec, model = load(model_dir, dtype)
    seen = []

    def attention(layer, q_TNH, k_TKH, v_TKH):
        seen.append((layer, tuple(q_TNH.shape), tuple(k_TKH.shape), tuple(v_TKH.shape)))
        return q_TNH.float()

    empty = torch.empty(0, dtype=torch.int64)
    hidden_TD = model.forward(empty, empty, empty, attention)
    assert hidden_TD.shape == (0, spec.hidden_size)
    assert model.logits(hidden_TD).shape == (0, spec.vocab_size)
    assert seen == [(layer, (0, 4, 12), (0, 2, 12), (0, 2, 12)) for layer in range(3)]


@pytest.mark.parametrize("wanted", [[], [29], [0, 4, 29]], ids=str)
def test_wanted_rows_are_those_of_the_whole(wanted, save_model, load, dense_attention):
    """... and attention still gets all rows in every layer, to store their KV."""
    model_dir, _ = save_model("llama")
    spec, model = load(model_dir)
    tokens, positions = torch.arange(20, 50), torch.arange(30)
    dense, attended = dense_attention(spec), []

    def attention(layer, q_TNH, k_TKH, v_TKH):
        attended.append(len(k_TKH))
        return dense(layer, q_TNH, k_TKH, v_TKH)

    whole_TD = model.forward(tokens, positions, positions + 1, dense_attention(spec))
    rows = torch.tensor(wanted, dtype=torch.int64)
    some_BD = model.forward(tokens, positions, positions + 1, attention, rows_B=rows)
    torch.testing.assert_close(some_BD, whole_TD[rows], atol=1e-5, rtol=1e-5)
    assert attended == [30] * spec.num_layers


@pytest.mark.parametrize("chunk_tokens", [100, 30, 16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_rows_behind_queries_keys_and_values(kind, chunk_tokens, save_model, load, dense_attention):
    """Zeros that nobody attends to: the same result."""
    model_dir, _ = save_model(kind)
    spec, model = load(model_dir)
    model._chunk_tokens = chunk_tokens
    inputs = (torch.arange(20, 50), torch.arange(30), torch.full((30,), 30))
    expected_TD = model.forward(*inputs, dense_attention(spec))
    dense, seen = dense_attention(spec), []

    def attention(layer, *heads):
        for x in heads:
            assert len(x) == 30
            assert not with_spare(x, 7)[30:].any()
        seen.append(layer)
        return dense(layer, *heads)

    with torch.inference_mode():
        hidden_TD = run_until(model.layers(*inputs, attention, spare=7))
    torch.testing.assert_close(hidden_TD, expected_TD, atol=1e-5, rtol=1e-5)
    assert seen == [0, 1, 2]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_fused_on_a_gpu_equals_the_cpu(kind, save_model, load, dense_attention):
    model_dir, _ = save_model(kind)
    spec, model = load(model_dir)
    tokens = list(range(30, 60))
    expected_TV = run(model, dense_attention(spec), tokens)
    cuda = torch.device("cuda")
    weights = load_weights(
        model_dir,
        spec,
        load_format="auto",
        dtype=torch.float32,
        device=cuda,
        seed=0,
        progress=lambda stage, fraction: None,
    )
    assert [len(weights.layers[0].qkv.weights_OD), len(weights.layers[0].gate_up.weights_OD)] == [
        1,
        1,
    ]
    dense = dense_attention(spec)

    def attention(layer, q_TNH, k_TKH, v_TKH):
        return dense(layer, q_TNH.cpu(), k_TKH.cpu(), v_TKH.cpu()).to(cuda)

    positions_T = torch.arange(30, device=cuda)
    on_gpu = Llama(spec, weights, cuda, torch.float32)
    hidden_TD = on_gpu.forward(
        torch.tensor(tokens, device=cuda),
        positions_T,
        torch.full_like(positions_T, 30),
        attention,
    )
    torch.testing.assert_close(on_gpu.logits(hidden_TD).cpu(), expected_TV, atol=1e-3, rtol=1e-3)
