"""config.json in, ModelSpec or a readable refusal out."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from loongd.errors import ModelError
from loongd.model.rope_spec import RopeSpec
from loongd.model.spec import ModelSpec

# shapes as published with Llama-3.1-8B
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "hidden_act": "silu",
    "pretraining_tp": 1,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}
QWEN = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "rope_scaling": None,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}


def yarn(factor: float, original: int | None, max_positions: int) -> dict[str, object]:
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return QWEN | {"rope_scaling": scaling, "max_position_embeddings": max_positions}


def test_llama_3_1_8b():
    spec = ModelSpec.from_config(LLAMA)
    assert (spec.num_layers, spec.hidden_size, spec.num_heads) == (32, 4096, 32)
    assert (spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 128, 128256)
    assert spec.rope == RopeSpec(
        theta=500000.0, type="llama3", factor=8.0, original_max_position_embeddings=8192
    )
    assert spec.max_context_tokens == 131072
    assert spec.kv_bytes_per_token("bfloat16") == 131072  # 2 x 32 x 8 x 128 x 2
    assert spec.kv_bytes_per_token("float32") == 262144
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.torch_dtype == "bfloat16"
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 4
    assert spec.sliding_window is None


def test_both_spellings_of_rope_are_one_spec():
    new = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    scaling = dict(LLAMA["rope_scaling"])
    new |= {"rope_parameters": scaling | {"rope_theta": 500000.0}, "dtype": "bfloat16"}
    del new["torch_dtype"]
    oldest = LLAMA | {"rope_scaling": {"type": scaling.pop("rope_type")} | scaling}
    assert ModelSpec.from_config(new) == ModelSpec.from_config(LLAMA)
    assert ModelSpec.from_config(oldest) == ModelSpec.from_config(LLAMA)


def test_architectures_differ_in_biases_and_norms():
    qwen2 = ModelSpec.from_config(QWEN)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = ModelSpec.from_config(
        QWEN | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "attention_bias": True}
    )
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 64)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (yarn(4.0, 32768, 131072), 131072),  # the extended length is stated
        (yarn(4.0, 32768, 32768), 131072),  # the original length is stated (Qwen2.5)
        (yarn(4.0, 32768, 40960), 131072),  # the original plus room for answers (Qwen3)
        (yarn(4.0, None, 32768), 131072),
        (yarn(40, 4096, 163840), 163840),
        (QWEN | {"rope_scaling": {"type": "linear", "factor": 8.0}}, 262144),
        (QWEN | {"rope_scaling": {"type": "dynamic", "factor": 2.5}}, 81920),
        (QWEN, 32768),
    ],
)
def test_max_context_includes_scaling(config, expected):
    assert ModelSpec.from_config(config).max_context_tokens == expected


@pytest.mark.parametrize(
    ("config", "window", "layers"),
    [
        (QWEN, None, []),
        (QWEN | {"use_sliding_window": True}, 4096, [28, 29, 30, 31]),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 32}, None, []),
        (
            QWEN
            | {
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] + ["full_attention"] * 31,
            },
            4096,
            [0],
        ),
        (QWEN | {"architectures": ["MistralForCausalLM"]}, 4096, list(range(32))),
        (QWEN | {"architectures": ["MistralForCausalLM"], "sliding_window": None}, None, []),
    ],
)
def test_sliding_window(config, window, layers):
    spec = ModelSpec.from_config(config)
    assert spec.sliding_window == window
    assert [layer for layer in range(32) if spec.window(layer) is not None] == layers
    assert all(spec.window(layer) == window for layer in layers)


def scaled(**values: object) -> dict[str, object]:
    return LLAMA | {"rope_scaling": LLAMA["rope_scaling"] | values}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LLAMA | {"architectures": ["GemmaForCausalLM"]}, "architectures is .*GemmaForCausalLM"),
        (LLAMA | {"architectures": None}, "architectures is None"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        (LLAMA | {"pretraining_tp": 2}, "pretraining_tp = 2"),
        (LLAMA | {"sliding_window": 512}, "sliding_window = 512"),
        (QWEN | {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
        (QWEN | {"mlp_bias": True}, "mlp_bias = True"),
        (QWEN | {"layer_types": ["sliding_attention"] * 32}, "layer_types has 32 sliding"),
        (QWEN | {"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        (QWEN | {"layer_types": ["linear_attention"] * 32}, "'linear_attention'"),
        (LLAMA | {"num_key_value_heads": 5}, "num_attention_heads = 32 .* = 5"),
        (LLAMA | {"head_dim": 63}, "head_dim = 63"),
        (LLAMA | {"hidden_size": 4095}, "hidden_size = 4095"),
        (LLAMA | {"torch_dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
        (LLAMA | {"hidden_size": "4096"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size"),
        (scaled(rope_type="longrope"), "rope_type = 'longrope'"),
        (scaled(mrope_section=[16, 24]), r"mrope_section = \[16, 24\]"),
        (scaled(type="yarn"), "rope_type = 'llama3' contradicts type = 'yarn'"),
        (scaled(factor=0.5), "factor"),
        (scaled(factor=None), "factor is missing"),
        (scaled(low_freq_factor=None), "low_freq_factor is missing"),
        (scaled(partial_rotary_factor=0.25), "partial_rotary_factor = 0.25"),
        (scaled(rope_theta=10.0), "rope_theta = 500000.0 contradicts"),
        (scaled(original_max_position_embeddings=200000), "200000 .*contradicts.* 131072"),
        (yarn(2.0, 32768, 131072), "32768 with factor 2.0 .*65536.* contradicts .*131072"),
        (yarn(4.0, 65536, 32768), "65536 .*contradicts .*32768"),
        (
            yarn(4.0, 32768, 32768) | {"original_max_position_embeddings": 16384},
            "16384 contradicts .*32768",
        ),
        (
            QWEN
            | {
                "rope_scaling": {
                    "type": "linear",
                    "factor": 2.0,
                    "original_max_position_embeddings": 4096,
                }
            },
            "4096 contradicts max_position_embeddings = 32768",
        ),
    ],
)
def test_refuses_by_name_and_value(config, words):
    with pytest.raises(ModelError, match=words) as caught:
        ModelSpec.from_config(config, origin="/m/config.json")
    assert str(caught.value).startswith("/m/config.json: ")


def test_from_dir_adds_generation_eos(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"eos_token_id": 7}))
    assert ModelSpec.from_dir(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 7]}))
    assert ModelSpec.from_dir(tmp_path).eos_token_ids == (7, 9)


def test_from_dir_names_the_broken_file(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        ModelSpec.from_dir(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json is not valid JSON"):
        ModelSpec.from_dir(tmp_path)


def test_importing_it_does_not_import_torch():
    code = "import sys, loongd.model.spec; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
