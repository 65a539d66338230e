"""Loading: what is accepted, what is refused by name, and that a mapped file is shared."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from loongd.errors import ModelError
from loongd.model.llama import Llama
from loongd.model.spec import ModelSpec
from loongd.model.weights import Projection, hf_tensors, load_weights, tensor_shapes

CPU = torch.device("cpu")


def read(model_dir: Path, *, load_format: str = "auto", seed: int = 0, dtype=torch.float32):
    spec = ModelSpec.from_dir(model_dir)
    stages: list[tuple[str, float]] = []
    weights = load_weights(
        model_dir,
        spec,
        load_format=load_format,
        dtype=dtype,
        device=CPU,
        seed=seed,
        progress=lambda stage, fraction: stages.append((stage, fraction)),
    )
    return spec, weights, stages


def edit(model_dir: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite the single file with tensors replaced, added or (None) left out."""
    path = model_dir / "model.safetensors"
    tensors = load_file(path) | {name.replace("__", "."): t for name, t in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_arrives_under_its_name(kind, tied, save_model):
    model_dir, reference = save_model(kind, tie_word_embeddings=tied)
    spec, weights, stages = read(model_dir)
    expected = reference.state_dict()
    if tied:
        del expected["lm_head.weight"]
        assert weights.lm_head_VD is weights.embed_VD
    tensors = hf_tensors(weights, spec)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == tensor_shapes(spec)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    assert weights.num_bytes() == sum(tensor.nbytes for tensor in expected.values())
    fractions = [fraction for _, fraction in stages]
    assert fractions == sorted(fractions)
    assert stages[-1] == ("weights", 1.0)


def test_sharded_equals_single(save_model, load, dense_attention):
    model_dir, reference = save_model("qwen2", max_shard_size="30KB")
    assert len(list(model_dir.glob("*.safetensors"))) > 3
    spec, weights, _ = read(model_dir)
    expected = reference.state_dict()
    assert all(torch.equal(t, expected[name]) for name, t in hf_tensors(weights, spec).items())


def test_missing_shard_is_named(save_model):
    model_dir, _ = save_model("llama", max_shard_size="30KB")
    shard = sorted(model_dir.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} does not exist"):
        read(model_dir)


def test_converts_to_the_asked_type(save_model):
    model_dir, reference = save_model("llama")
    spec, weights, _ = read(model_dir, dtype=torch.bfloat16)
    for name, tensor in hf_tensors(weights, spec).items():
        assert torch.equal(tensor, reference.state_dict()[name].bfloat16())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__norm__weight": None}, r"tensor model\.norm\.weight is missing"),
        (
            {"model__layers__1__mlp__up_proj__weight": torch.zeros(80, 47)},
            r"model\.layers\.1\.mlp\.up_proj\.weight has shape \[80, 47\].*\[80, 48\]",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": torch.zeros(48)},
            r"model\.layers\.0\.self_attn\.q_proj\.bias is not part of this architecture",
        ),
        (
            {"model__norm__weight": torch.zeros(48, dtype=torch.int8)},
            r"model\.norm\.weight has type torch\.int8; quantized",
        ),
    ],
)
def test_refuses_tensors_by_name(changes, words, save_model):
    model_dir, _ = save_model("llama")
    edit(model_dir, **changes)
    with pytest.raises(ModelError, match=words):
        read(model_dir)


def test_ignores_old_buffers_and_a_tied_head(save_model):
    model_dir, reference = save_model("llama", tie_word_embeddings=True)
    extra = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.zeros(6)}
    edit(model_dir, lm_head__weight=torch.zeros(97, 48), **extra)
    _, weights, _ = read(model_dir)
    assert torch.equal(weights.lm_head_VD, reference.state_dict()["lm_head.weight"])


def test_refuses_pickle_by_name(save_model):
    model_dir, _ = save_model("llama")
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is pickle, which loongd never loads"):
        read(model_dir)


@pytest.mark.parametrize("content", [b"", b"\x00" * 100])
def test_refuses_a_broken_file(content, save_model):
    model_dir, _ = save_model("llama")
    (model_dir / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
        read(model_dir)


def test_refuses_a_broken_index(save_model):
    model_dir, _ = save_model("llama")
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": [1]}))
    with pytest.raises(ModelError, match=r"index\.json cannot be read"):
        read(model_dir)


def test_dummy_depends_on_seed_and_name_alone(save_model, dense_attention):
    model_dir, _ = save_model("qwen3", attention_bias=True)
    (model_dir / "model.safetensors").unlink()
    spec, weights, _ = read(model_dir, load_format="dummy", seed=3)
    first = hf_tensors(weights, spec)
    again = hf_tensors(read(model_dir, load_format="dummy", seed=3)[1], spec)
    other = hf_tensors(read(model_dir, load_format="dummy", seed=4)[1], spec)
    drawn = {name for name in first if not name.endswith("norm.weight")}
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if name in drawn:
            assert not torch.equal(tensor, other[name])
        else:
            assert torch.equal(tensor, torch.ones_like(tensor))
    values = torch.cat([first[name].flatten() for name in sorted(drawn)])
    assert abs(float(values.std()) - 0.02) < 0.0005
    assert abs(float(values.mean())) < 0.0005
    assert len({float(first[name].flatten()[0]) for name in drawn}) == len(drawn)
    one_layer = ModelSpec.from_config(
        json.loads((model_dir / "config.json").read_text())
        | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    )
    small = load_weights(
        model_dir,
        one_layer,
        load_format="dummy",
        dtype=torch.float32,
        device=CPU,
        seed=3,
        progress=lambda stage, fraction: None,
    )
    for name, tensor in hf_tensors(small, one_layer).items():
        assert torch.equal(tensor, first[name]), name


@pytest.mark.parametrize("biased", [False, True])
def test_fused_projection_equals_separate(biased):
    torch.manual_seed(0)
    sizes = (8, 4, 4)
    weights = [torch.randn(size, 6) for size in sizes]
    biases = [torch.randn(size) if biased else None for size in sizes]
    separate = Projection(tuple(weights), tuple(biases), sizes)
    whole = torch.cat([bias for bias in biases if bias is not None]) if biased else None
    fused = Projection((torch.cat(weights),), (whole,), sizes)
    for num_tokens in (0, 1, 5):
        x_TD = torch.randn(num_tokens, 6)
        for one, other in zip(separate(x_TD), fused(x_TD), strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(separate.parts(), fused.parts(), strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1] is other[1] is None or torch.equal(one[1], other[1])


MEMORY = """
import sys
import time
from pathlib import Path
import torch
from loongd.model.spec import ModelSpec
from loongd.model.weights import hf_tensors, load_weights

def memory(key):
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024

model_dir = Path(sys.argv[1])
spec = ModelSpec.from_dir(model_dir)
before = memory("Anonymous:"), memory("Rss:")
weights = load_weights(model_dir, spec, load_format="auto", dtype=torch.bfloat16,
    device=torch.device("cpu"), seed=0, progress=lambda stage, fraction: None)
total = sum(float(t.float().sum()) for t in hf_tensors(weights, spec).values())  # touch all
print(weights.num_bytes(), memory("Anonymous:") - before[0], memory("Rss:") - before[1])
"""


def test_weights_stay_in_the_page_cache(tmp_path):
    """Every byte is resident after use, yet next to nothing of it is the process's own."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "vocab_size": 4096,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = tensor_shapes(ModelSpec.from_dir(tmp_path))
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    num_bytes, private, resident = map(int, done.stdout.split())
    assert num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert num_bytes > 100e6
    assert resident > 0.9 * num_bytes
    assert private < 0.2 * num_bytes  # a float copy of the largest tensor, freed or not


def test_weights_outlive_the_loader(save_model, dense_attention):
    """Tensors stay valid when the file is closed, even deleted."""
    model_dir, reference = save_model("llama")
    spec, weights, _ = read(model_dir)
    (model_dir / "model.safetensors").unlink()
    tokens = torch.arange(9)
    model = Llama(spec, weights, CPU, torch.float32)
    hidden_TD = model.forward(tokens, tokens, torch.full_like(tokens, 9), dense_attention(spec))
    with torch.inference_mode():
        expected_TV = reference(tokens[None]).logits[0]
    torch.testing.assert_close(model.logits(hidden_TD), expected_TV, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_dummy_weights_of_an_8b_model_take_seconds():
    spec = ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 8192,
        }
    )
    torch.cuda.synchronize()
    started_s = time.monotonic()
    weights = load_weights(
        Path("unused"),
        spec,
        load_format="dummy",
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
        seed=0,
        progress=lambda stage, fraction: None,
    )
    torch.cuda.synchronize()
    assert time.monotonic() - started_s < 10
    assert weights.num_bytes() == 2 * sum(map(math.prod, tensor_shapes(spec).values()))
