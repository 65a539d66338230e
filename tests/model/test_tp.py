"""Slices of a model, the model of several ranks together, and linear layers in chunks."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import loongd.model.weights
from loongd.errors import ModelError
from loongd.model.arithmetic import Fast
from loongd.model.llama import Llama
from loongd.model.shard import WHOLE, Shard
from loongd.model.spec import ModelSpec
from loongd.model.weights import Weights, hf_tensors, load_weights

CPU = torch.device("cpu")
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "vocab_size": 96}
BIASED = {"attention_bias": True, "mlp_bias": True}


class ThreadRanks:
    """Ranks in threads that sum in rank order; each thread asks for its own end."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.parts: list[Tensor] = [torch.empty(0)] * size
        self.calls = 0

    def end(self, rank: int) -> ThreadRank:
        return ThreadRank(self, rank)


class ThreadRank:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._ranks.parts[self._rank] = x.clone()
        self._ranks.barrier.wait()
        parts = list(self._ranks.parts)
        self._ranks.barrier.wait()
        return parts

    def all_reduce(self, x_TD: Tensor) -> None:
        assert x_TD.is_contiguous()
        x_TD.copy_(torch.stack(self._exchange(x_TD)).sum(0))
        self._ranks.calls += self._rank == 0

    def all_gather(self, x_BV: Tensor) -> Tensor:
        return torch.cat(self._exchange(x_BV), dim=1)


def load_shard(
    model_dir: Path,
    shard: Shard,
    *,
    load_format: str = "auto",
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> tuple[ModelSpec, Weights]:
    spec = ModelSpec.from_dir(model_dir)
    weights = load_weights(
        model_dir,
        spec,
        load_format=load_format,
        dtype=dtype,
        device=device,
        seed=5,
        progress=lambda stage, fraction: None,
        shard=shard,
    )
    return spec, weights


def expected_slice(name: str, whole: Tensor, rank: int, size: int) -> Tensor | None:
    """The rank's part, by the Megatron rule written anew; None where another rank has it."""
    parts = name.split(".")
    if parts[-2] in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        return whole.chunk(size)[rank]
    if parts[-2] in ("o_proj", "down_proj"):
        if parts[-1] == "bias":
            return whole if rank == 0 else None
        return whole.chunk(size, dim=1)[rank]
    if parts[-2] == "lm_head" and len(whole) % size == 0:
        return whole.chunk(size)[rank]
    return whole


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("vocab_size", [96, 97])
def test_slices_are_those_of_the_whole(
    size, kind, load_format, vocab_size, save_model: Callable
) -> None:
    biases = BIASED if kind == "llama" else {}
    model_dir, _ = save_model(kind, **(WIDE | biases | {"vocab_size": vocab_size}))
    spec, whole = load_shard(model_dir, WHOLE, load_format=load_format)
    if load_format == "auto":
        tensors = load_file(model_dir / "model.safetensors")
    else:
        tensors = hf_tensors(whole, spec)
    total = 0
    for rank in range(size):
        _, weights = load_shard(model_dir, Shard(rank, size), load_format=load_format)
        found = hf_tensors(weights, spec)
        expected = {n: expected_slice(n, t, rank, size) for n, t in tensors.items()}
        assert found.keys() == {name for name, part in expected.items() if part is not None}
        for name, tensor in found.items():
            assert torch.equal(tensor, expected[name]), name
        total += weights.num_bytes()
    assert total < size * whole.num_bytes()


def test_a_tied_head_is_rows_of_the_embedding(save_model: Callable) -> None:
    model_dir, reference = save_model("llama", **WIDE, tie_word_embeddings=True)
    _, weights = load_shard(model_dir, Shard(1, 2))
    assert torch.equal(weights.lm_head_VD, reference.state_dict()["lm_head.weight"][48:])
    assert weights.lm_head_VD.data_ptr() == weights.embed_VD[48:].data_ptr()
    separate = sum(t.nbytes for t in hf_tensors(weights, ModelSpec.from_dir(model_dir)).values())
    assert weights.num_bytes() == separate


def test_slices_on_the_cpu_are_views_of_the_mapped_file(save_model: Callable) -> None:
    model_dir, _ = save_model("llama", **WIDE)
    _, weights = load_shard(model_dir, Shard(1, 2))
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith("model.safetensors")]
    mapped = [(int(first, 16), int(last, 16)) for first, last in ranges]
    layer = weights.layers[0]
    for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
        for weight in projection.weights_OD:
            assert any(first <= weight.data_ptr() < last for first, last in mapped)


def test_dummy_slices_do_not_hold_the_whole(save_model: Callable) -> None:
    model_dir, _ = save_model("llama", **WIDE)
    _, weights = load_shard(model_dir, Shard(1, 2), load_format="dummy")
    for tensor in hf_tensors(weights, ModelSpec.from_dir(model_dir)).values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (3, "tensor_parallel_size = 3 does not divide num_attention_heads = 8"),
        (8, "tensor_parallel_size = 8 does not divide num_key_value_heads = 4"),
        (4, "tensor_parallel_size = 4 does not divide intermediate_size = 90"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size, words, save_model: Callable) -> None:
    model_dir, _ = save_model("llama", **WIDE, intermediate_size=90)
    with pytest.raises(ModelError, match=f"{words}; sizes that work: 1, 2$"):
        load_shard(model_dir, Shard(0, size))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("chunk_tokens", [7, 100])
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", BIASED),
        ("llama", {"vocab_size": 97, "num_key_value_heads": 8}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_ranks_together_equal_transformers(
    size, chunk_tokens, kind, overrides, save_model: Callable, dense_attention
) -> None:
    """Logits of all ranks, with linear layers in chunks that do and do not divide the input."""
    model_dir, reference = save_model(kind, **(WIDE | overrides))
    tokens_T = torch.arange(3, 33)
    with torch.inference_mode():
        expected_TV = reference(tokens_T[None]).logits[0]
    ranks = ThreadRanks(size)
    logits: dict[int, Tensor] = {}

    def run(rank: int) -> None:
        shard = Shard(rank, size)
        spec, weights = load_shard(model_dir, shard)
        part = shard.spec(spec)
        end = ranks.end(rank) if size > 1 else None
        model = Llama(
            part, weights, CPU, torch.float32, tensor_parallel=end, chunk_tokens=chunk_tokens
        )
        positions_T = torch.arange(30)
        lengths_T = torch.full_like(positions_T, 30)
        hidden_TD = model.forward(tokens_T, positions_T, lengths_T, dense_attention(part))
        logits[rank] = model.logits(hidden_TD)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(logits) == list(range(size))
    for logits_TV in logits.values():
        torch.testing.assert_close(logits_TV, expected_TV, atol=2e-4, rtol=2e-4)
        assert torch.equal(logits_TV, logits[0])
    num_chunks = -(-30 // chunk_tokens)
    assert ranks.calls == (2 * 3 * num_chunks if size > 1 else 0)


def forward(model: Llama, num_tokens: int, attention: Callable[..., Tensor]) -> Tensor:
    positions_T = torch.arange(num_tokens)
    return model.forward(
        positions_T % 90, positions_T, torch.full_like(positions_T, num_tokens), attention
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_intermediates_are_bounded_by_the_chunk(
    dtype, save_model: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, _ = save_model("llama", **WIDE)
    spec, weights = load_shard(model_dir, WHOLE, dtype=dtype)
    seen: list[tuple[int, ...]] = []

    def spy(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*inputs: Tensor, **options: object) -> Tensor:
            seen.extend(tuple(x.shape) for x in inputs if isinstance(x, Tensor))
            result = function(*inputs, **options)
            seen.append(tuple(result.shape))
            return result

        return call

    for name in ("silu_mul", "rms_norm", "add_rms_norm"):
        monkeypatch.setattr(Fast, name, staticmethod(spy(getattr(Fast, name))))
    monkeypatch.setattr(loongd.model.weights, "linear", spy(torch.nn.functional.linear))
    attended: list[int] = []

    def attention(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        attended.append(len(q_TNH))
        assert len(q_TNH) == len(k_TKH) == len(v_TKH)
        return q_TNH * v_TKH.mean()

    whole_TD = forward(Llama(spec, weights, CPU, dtype), 101, attention)
    assert max(shape[0] for shape in seen) == 101
    seen.clear()
    chunked = Llama(spec, weights, CPU, dtype, chunk_tokens=16)
    chunked_TD = forward(chunked, 101, attention)
    weight_rows = {len(t) for t in hf_tensors(weights, spec).values()}
    assert {shape[0] for shape in seen} - weight_rows == {16, 101 % 16}
    assert attended == [101] * 6
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(chunked_TD, whole_TD, atol=tolerance, rtol=tolerance)


def test_an_input_of_one_chunk_is_not_copied(save_model: Callable) -> None:
    model_dir, _ = save_model("llama", **WIDE)
    spec, weights = load_shard(model_dir, WHOLE)
    values: list[Tensor] = []

    def attention(layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        values.append(v_TKH)
        return q_TNH

    one = forward(Llama(spec, weights, CPU, torch.float32, chunk_tokens=40), 40, attention)
    unlimited = forward(Llama(spec, weights, CPU, torch.float32), 40, attention)
    assert torch.equal(one, unlimited)
    assert all(torch.equal(a, b) for a, b in zip(values[:3], values[3:], strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_slices_on_a_gpu_are_fused_and_own_their_memory(load_format, save_model: Callable) -> None:
    model_dir, _ = save_model("qwen2", **WIDE)
    cuda = torch.device("cuda")
    spec, whole = load_shard(model_dir, WHOLE, load_format=load_format, device=cuda)
    tensors = hf_tensors(whole, spec)
    for rank in range(4):
        _, weights = load_shard(model_dir, Shard(rank, 4), load_format=load_format, device=cuda)
        assert len(weights.layers[0].qkv.weights_OD) == 1
        for name, tensor in hf_tensors(weights, spec).items():
            assert torch.equal(tensor, expected_slice(name, tensors[name], rank, 4)), name
        for projection in (weights.layers[0].out, weights.layers[0].down):
            (weight,) = projection.weights_OD
            assert weight.is_contiguous()
            assert weight.untyped_storage().nbytes() == weight.nbytes


def test_the_spec_of_a_rank(save_model: Callable) -> None:
    model_dir, _ = save_model("llama", **WIDE)
    config = json.loads((model_dir / "config.json").read_text())
    part = Shard(3, 4).spec(ModelSpec.from_config(config))
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 20)
    assert (part.head_dim, part.hidden_size, part.vocab_size) == (6, 48, 96)


@pytest.mark.gpu
def test_a_long_input_of_the_8b_shape_needs_little_beside_attention() -> None:
    """262,144 tokens through one layer: unchunked, gate and up alone would be 15 GB."""
    spec = ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 1,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 1000,
            "max_position_embeddings": 1 << 20,
        }
    )
    cuda, num_tokens = torch.device("cuda"), 1 << 18
    weights = load_weights(
        Path("unused"),
        spec,
        load_format="dummy",
        dtype=torch.bfloat16,
        device=cuda,
        seed=0,
        progress=lambda stage, fraction: None,
    )
    model = Llama(spec, weights, cuda, torch.bfloat16)
    positions_T = torch.arange(num_tokens, device=cuda)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model.forward(positions_T % 1000, positions_T, positions_T, lambda _, q, k, v: q)
    peak = torch.cuda.max_memory_allocated() - before
    hidden_and_qkv = num_tokens * (4096 + 4096 + 2 * 1024) * 2
    angles = num_tokens * 128 * 4 * 6
    assert peak < hidden_and_qkv + angles + 2.5e9
