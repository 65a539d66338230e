from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loongd.errors import ModelError
from loongd.model import convert
from loongd.model.cache import converted_dir, is_converted
from loongd.model.convert import convert_gguf, to_bytes
from loongd.text.tokenizer import Tokenizer

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def ignore(stage: str, fraction: float) -> None:
    pass


def reference(kind: str, **overrides: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](**(SIZES | overrides))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"


def permuted(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """The order that llama.cpp gives the rows of q and k (`permute`, its llama converter)."""
    half = weights.shape[0] // num_heads // 2
    split = weights.reshape(num_heads, 2, half, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def new_writer(path: Path, architecture: str, model: PreTrainedModel) -> gguf.GGUFWriter:
    """A writer with the fields of `model` and a byte-level tokenizer with no merges but one."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim if architecture == "qwen3" else 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(5000.0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet, "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2" if architecture.startswith("qwen") else "llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    return writer


def add_weights(writer: gguf.GGUFWriter, model: PreTrainedModel, *, quantize: bool = False) -> None:
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weights = tensor.numpy()
        if writer.arch == "llama" and ".q_proj." in name:
            weights = permuted(weights, config.num_attention_heads)
        if writer.arch == "llama" and ".k_proj." in name:
            weights = permuted(weights, config.num_key_value_heads)
        if quantize and weights.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(weights, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name(name), weights)


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(path: Path, architecture: str, model: PreTrainedModel, **kwargs: Any) -> Path:
    writer = new_writer(path, architecture, model)
    add_weights(writer, model, **kwargs)
    close(writer)
    return path


@pytest.fixture
def llama_gguf(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "llama.gguf", "llama", reference("llama"))


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(20)[None] * 11 % 260).logits


@pytest.mark.parametrize("chunk_bytes", [1000, convert.CHUNK_BYTES])
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 24}),
    ],
)
def test_converted_model_is_the_original(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    overrides: dict[str, Any],
    chunk_bytes: int,
) -> None:
    monkeypatch.setattr(convert, "CHUNK_BYTES", chunk_bytes)
    original = reference(kind, **overrides)
    source = write_gguf(tmp_path / "m.gguf", kind, original)
    stages: list[tuple[str, float]] = []
    convert_gguf(source, tmp_path / "out", "float32", lambda *report: stages.append(report))
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(copy) is type(original)
    assert copy.config.tie_word_embeddings == original.config.tie_word_embeddings
    assert copy.config.rms_norm_eps == 1e-5
    weights = copy.state_dict()
    assert weights.keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    assert torch.equal(logits(copy), logits(original))
    assert stages[-1] == ("converting weights", 1.0)
    assert all(0 <= fraction <= 1 for _, fraction in stages)


def test_quantised_weights_come_close(tmp_path: Path) -> None:
    original = reference("llama")
    source = write_gguf(tmp_path / "m.gguf", "llama", original, quantize=True)
    convert_gguf(source, tmp_path / "out", "bfloat16", ignore)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in original.state_dict().items():
        assert weights[name].dtype == torch.bfloat16
        torch.testing.assert_close(weights[name].float(), tensor, atol=0.02, rtol=0.02)


def test_bfloat16_rounds_as_torch_does() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = np.arange(0x3F800000, 0x3F880000, 0x8000, dtype=np.uint32)
    values = np.concatenate((bits, ties, np.uint32([0x7F800000, 0xFF800000]))).view(np.float32)
    values = values[~np.isnan(values)]
    want = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    assert to_bytes(values, "bfloat16", "x") == want.tobytes()
    nan = np.frombuffer(to_bytes(np.float32([np.nan]), "bfloat16", "x"), np.uint16)
    assert np.isnan(nan.astype(np.uint32) << 16).sum() == 0
    assert np.isnan((nan.astype(np.uint32) << 16).view(np.float32)).all()


def test_float16_overflow_is_refused() -> None:
    assert to_bytes(np.float32([1.5]), "float16", "x") == np.float16([1.5]).tobytes()
    with pytest.raises(ModelError, match=r"lm_head.weight has values beyond 65504"):
        to_bytes(np.float32([7e4]), "float16", "lm_head.weight")


# ---- config -----------------------------------------------------------------------------------


def converted_config(tmp_path: Path, writer: gguf.GGUFWriter, model: PreTrainedModel) -> Any:
    add_weights(writer, model)
    close(writer)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", "float32", ignore)
    return json.loads((tmp_path / "out" / "config.json").read_text())


def test_yarn_and_linear_scaling(tmp_path: Path) -> None:
    model = reference("llama")
    for kind in (gguf.RopeScalingType.YARN, gguf.RopeScalingType.LINEAR):
        directory = tmp_path / kind.value
        directory.mkdir()
        writer = new_writer(directory / "m.gguf", "llama", model)
        writer.add_rope_scaling_type(kind)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)
        scaling = converted_config(directory, writer, model)["rope_scaling"]
        want = {"rope_type": kind.value, "factor": 4.0}
        if kind is gguf.RopeScalingType.YARN:
            want["original_max_position_embeddings"] = 32
        assert scaling == want
        assert AutoModelForCausalLM.from_pretrained(directory / "out") is not None


def llama3_config(factor: float) -> LlamaConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    sizes = {key: value for key, value in SIZES.items() if key != "rope_theta"}
    return LlamaConfig(**(sizes | {"max_position_embeddings": 1 << 17}), rope_parameters=rope)


def test_llama3_scaling_is_recovered(tmp_path: Path) -> None:
    config = llama3_config(32.0)
    model = AutoModelForCausalLM.from_config(config).eval()
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5000.0 ** -(torch.arange(8) / 8)
    writer = new_writer(tmp_path / "m.gguf", "llama", model)
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    written = converted_config(tmp_path, writer, model)
    assert written["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    copy = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(copy), logits(model))


def test_other_rope_factors_are_refused(tmp_path: Path) -> None:
    model = reference("llama")
    writer = new_writer(tmp_path / "m.gguf", "llama", model)
    writer.add_tensor("rope_freqs.weight", np.linspace(1, 9, 8, dtype=np.float32))
    with pytest.raises(ModelError, match=r"rope_freqs.weight does not follow"):
        converted_config(tmp_path, writer, model)


# ---- refusals and the directory ---------------------------------------------------------------


def refusal(path: Path, out_dir: Path) -> str:
    with pytest.raises(ModelError) as caught:
        convert_gguf(path, out_dir, "float32", ignore)
    assert not out_dir.exists()
    assert not list(out_dir.parent.glob("*.partial"))
    return str(caught.value)


def test_unsupported_files_are_refused_by_name(tmp_path: Path) -> None:
    model, path, out_dir = reference("llama"), tmp_path / "m.gguf", tmp_path / "out"
    write_gguf(path, "gemma3", model)
    assert "general.architecture is 'gemma3'" in refusal(path, out_dir)

    writer = new_writer(path, "llama", model)
    writer.add_expert_count(8)
    add_weights(writer, model)
    close(writer)
    assert "mixture of experts" in refusal(path, out_dir)

    writer = new_writer(path, "llama", model)
    writer.add_tensor("blk.0.ssm_a.weight", np.zeros(4, np.float32))
    add_weights(writer, model)
    close(writer)
    assert "unknown tensor blk.0.ssm_a.weight" in refusal(path, out_dir)

    close(new_writer(path, "llama", model))
    assert "no tensor token_embd.weight" in refusal(path, out_dir)

    writer = new_writer(path, "llama", model)
    writer.add_rope_dimension_count(8)
    add_weights(writer, model)
    close(writer)
    assert "llama.rope.dimension_count is 8 and the head size 16" in refusal(path, out_dir)


def test_broken_files_are_refused(tmp_path: Path, llama_gguf: Path) -> None:
    path, out_dir = tmp_path / "m.gguf", tmp_path / "out"
    assert "is not a file" in refusal(path, out_dir)
    path.write_bytes(b"not a gguf file at all" * 10)
    assert "not a readable GGUF file" in refusal(path, out_dir)
    data = llama_gguf.read_bytes()
    for size in (0, 20, len(data) // 8, len(data) - 1000):
        path.write_bytes(data[:size])
        assert "not a readable GGUF file: truncated, damaged or" in refusal(path, out_dir)


def test_directory_of_something_else_is_left_alone(tmp_path: Path, llama_gguf: Path) -> None:
    out_dir = tmp_path / "out"
    out_dir.mkdir()
    (out_dir / "thesis.txt").write_text("x")
    with pytest.raises(ModelError, match="not empty and not a conversion"):
        convert_gguf(llama_gguf, out_dir, "float32", ignore)
    assert [path.name for path in out_dir.iterdir()] == ["thesis.txt"]


def test_second_conversion_does_nothing_and_another_model_is_refused(
    tmp_path: Path, llama_gguf: Path
) -> None:
    out_dir = converted_dir(llama_gguf, "float32", tmp_path / "cache")
    assert not is_converted(out_dir)
    convert_gguf(llama_gguf, out_dir, "float32", ignore)
    assert is_converted(out_dir)
    stages: list[str] = []
    convert_gguf(llama_gguf, out_dir, "float32", lambda stage, _: stages.append(stage))
    assert stages == []
    with pytest.raises(ModelError, match="not a conversion of"):
        convert_gguf(llama_gguf, out_dir, "bfloat16", ignore)
    llama_gguf.write_bytes(llama_gguf.read_bytes() + b"\0")
    assert converted_dir(llama_gguf, "float32", tmp_path / "cache") != out_dir


def test_two_processes_at_once(tmp_path: Path, llama_gguf: Path) -> None:
    command = [sys.executable, "-m", "loongd.model.convert", llama_gguf, tmp_path / "out"]
    processes = [
        subprocess.Popen([*command, "--dtype", "float32"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    # One did the work, the other waited for it.
    assert sorted(bool(output) for output in outputs) == [False, True]
    lines = [json.loads(line) for line in "".join(outputs).splitlines()]
    assert lines[-1] == {"stage": "converting weights", "fraction": 1.0}
    assert is_converted(tmp_path / "out")


def test_module_reports_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert.main([str(tmp_path / "no.gguf"), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == f"{tmp_path}/no.gguf is not a file\n"


# ---- the real model ---------------------------------------------------------------------------


def test_real_model_knows_the_capital_of_france(smollm2_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"


async def test_real_tokenizer_agrees_with_transformers(
    smollm2_gguf: Path, smollm2_dir: Path
) -> None:
    # An oracle of its own: transformers' reading of the GGUF file. It ignores the name of the
    # pre-tokenizer, so it gets the one that the model was published with.
    oracle = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    ours = Tokenizer.from_dir(smollm2_dir)
    samples = [
        "Hello \t world\n\n  12345 1 22 333 4444",
        "don't I'LL we'Ve \u00bd x\u00b2 \u00a0 漢字 🌶🌶 e\u0301 \u00e9 привет",
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
        "def f(x):\n\treturn x ** 2  # \r\n" * 3000,
    ]
    for text in samples:
        ids = (await ours.encode(text)).tolist()
        assert ids == oracle(text).input_ids
        assert ours.decode(ids, skip_special_tokens=False) == oracle.decode(ids)
    assert (ours.vocab_size, ours.eos_token_ids, ours.bos_token_id) == (49152, {2}, 1)


def test_real_chat_template_agrees_with_transformers(smollm2_dir: Path) -> None:
    oracle = AutoTokenizer.from_pretrained(smollm2_dir)
    ours = Tokenizer.from_dir(smollm2_dir)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    for messages in (chat, [{"role": "system", "content": "be brief"}, *chat]):
        for prompt in (False, True):
            assert ours.render_chat(messages, add_generation_prompt=prompt) == (
                oracle.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            )
