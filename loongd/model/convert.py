"""A Hugging Face checkpoint directory from a GGUF file.

Knows: GGUF's names for the fields and tensors of llama-family models, llama.cpp's order of the
rows of q and k, and the safetensors file format. Runs as a process of its own:
`python -m loongd.model.convert GGUF OUT_DIR --dtype bfloat16`, with the model's configuration and
progress as JSON lines; with `--ask` it goes on after the configuration when it reads a line.
Does not know: torch, the daemon, the rest of the model code.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor, dequantize
from numpy.typing import NDArray

from loongd.errors import ModelError
from loongd.model.cache import SOURCE_FILE, converted_from, source_identity
from loongd.text.gguf_tokenizer import build_tokenizer, build_tokenizer_config, eos_ids

Progress = Callable[[str, float], None]
Fields = Mapping[str, Any]

CHUNK_BYTES = 64 << 20
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
# llama.cpp stores the rows of q and k of these architectures with rotary pairs side by side.
INTERLEAVED_ROPE = frozenset({"llama", "mistral"})
TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(
    gguf_path: Path,
    out_dir: Path,
    dtype: str,
    progress: Progress,
    on_config: Callable[[Fields], None] = lambda _: None,
) -> None:
    """Write `out_dir` as a Hugging Face checkpoint of the model in `gguf_path`.

    `out_dir` appears whole or not at all. Of two converters to one directory the second waits
    and finds the work done.

    Args:
        gguf_path: the file; not a part of a split one.
        out_dir: must not exist, be empty, or hold the same conversion (then nothing is done).
        dtype: float32, bfloat16 or float16; all weights get it.
        progress: told the stage and how much of it is done, 0 to 1.
        on_config: told the model's config.json before what takes long.

    Raises:
        ModelError: the file is unreadable or its model unsupported, or `out_dir` is taken.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if not gguf_path.is_file():
        raise ModelError(f"{gguf_path} is not a file")
    identity = source_identity(gguf_path, dtype)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with out_dir.with_name(f".{out_dir.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if converted_from(out_dir) == identity:
            return
        if out_dir.exists() and any(out_dir.iterdir()):
            raise ModelError(f"{out_dir} is not empty and not a conversion of {gguf_path}")
        partial = out_dir.with_name(f".{out_dir.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _convert_into(partial, gguf_path, dtype, progress, on_config)
            _write_json(partial / SOURCE_FILE, identity)
            partial.replace(out_dir)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _convert_into(
    directory: Path,
    gguf_path: Path,
    dtype: str,
    progress: Progress,
    on_config: Callable[[Fields], None],
) -> None:
    progress("reading the GGUF file", 0.0)
    fields, tensors = _read(gguf_path)
    progress("reading the GGUF file", 1.0)
    config = build_config(fields, tensors, dtype)
    on_config(config)
    _write_json(directory / "config.json", config)
    stop_ids = eos_ids(fields)
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    if len(stop_ids) > 1:
        generation["eos_token_id"] = stop_ids
    _write_json(directory / "generation_config.json", generation)
    build_tokenizer(fields).save(str(directory / "tokenizer.json"), pretty=False)
    _write_json(directory / "tokenizer_config.json", build_tokenizer_config(fields))
    _write_weights(directory / "model.safetensors", config, tensors, dtype, progress)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- reading ----------------------------------------------------------------------------------


def _read(gguf_path: Path) -> tuple[dict[str, Any], dict[str, ReaderTensor]]:
    try:
        reader = GGUFReader(gguf_path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        what = "is not a readable GGUF file: truncated, damaged or of another kind"
        raise ModelError(f"{gguf_path} {what} ({error})") from error
    if fields.get("split.count", 1) > 1:
        raise ModelError(
            f"{gguf_path} is one of {fields['split.count']} parts; merge them first "
            "(llama-gguf-split --merge)"
        )
    return fields, {tensor.name: tensor for tensor in reader.tensors}


class _Hyperparameters:
    """The `<architecture>.*` fields, with errors that name the field."""

    def __init__(self, fields: Fields) -> None:
        self.fields = fields
        self.architecture = str(fields.get("general.architecture"))
        if self.architecture not in MODEL_TYPES:
            raise ModelError(
                f"general.architecture is {self.architecture!r}; supported in GGUF files: "
                f"{', '.join(MODEL_TYPES)}"
            )

    def get(self, key: str, default: Any = None) -> Any:
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelError(f"{self.architecture}.{key} differs between layers: {value}")
            value = value[0]
        # GGUF holds float32; 1e-05 must not become 9.999999747378752e-06.
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"the GGUF file has no {self.architecture}.{key}")
        return value


def build_config(fields: Fields, tensors: Mapping[str, ReaderTensor], dtype: str) -> dict[str, Any]:
    """The config.json of the model, with transformers' names.

    Raises ModelError when the architecture, or something it uses, is not supported.
    """
    hparams = _Hyperparameters(fields)
    if hparams.get("expert_count", 0):
        raise ModelError("the GGUF file holds a mixture of experts, which is not supported")
    if "token_embd.weight" not in tensors:
        raise ModelError("the GGUF file has no tensor token_embd.weight")
    model_type, class_name = MODEL_TYPES[hparams.architecture]
    num_heads = hparams.need("attention.head_count")
    hidden_size = hparams.need("embedding_length")
    head_dim = hparams.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if hparams.get(key, head_dim) != head_dim:
            raise ModelError(
                f"{hparams.architecture}.{key} is {hparams.get(key)} and the head size "
                f"{head_dim}; models where they differ are not supported"
            )
    stop_ids = eos_ids(fields)
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": hidden_size,
        "intermediate_size": hparams.need("feed_forward_length"),
        "num_hidden_layers": hparams.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": hparams.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": hparams.need("context_length"),
        "rms_norm_eps": hparams.need("attention.layer_norm_rms_epsilon"),
        "rope_theta": hparams.get("rope.freq_base", 10000.0),
        "rope_scaling": None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": stop_ids[0] if stop_ids else None,
    }
    if model_type in ("llama", "qwen3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if model_type == "mistral":
        config["sliding_window"] = hparams.get("attention.sliding_window")
    config["rope_scaling"] = _rope_scaling(hparams, config, tensors.get("rope_freqs.weight"))
    return config


def _rope_scaling(
    hparams: _Hyperparameters, config: Fields, freqs: ReaderTensor | None
) -> dict[str, Any] | None:
    if freqs is not None:
        return _llama3_scaling(config, dequantize(freqs.data, freqs.tensor_type))
    factor = hparams.get("rope.scaling.factor", 1.0)
    match hparams.get("rope.scaling.type", "none"):
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": factor}
        case "yarn":
            original = hparams.get("rope.scaling.original_context_length")
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": original or config["max_position_embeddings"],
            }
        case other:
            raise ModelError(
                f"{hparams.architecture}.rope.scaling.type is {other!r}; "
                "supported in GGUF files: none, linear, yarn"
            )


def _llama3_scaling(config: Fields, factors: NDArray[np.float32]) -> dict[str, Any]:
    """Llama 3 scaling from the divisors that llama.cpp stores for each frequency.

    GGUF keeps only the result of the formula (transformers: `_compute_llama3_parameters`); all
    published models share its constants but for `factor`, the largest divisor.
    """
    factor = float(factors.max())
    low, high, original = 1.0, 4.0, 8192
    half = int(config["head_dim"]) // 2
    wavelengths = 2 * np.pi * float(config["rope_theta"]) ** (np.arange(half) / half)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != (half,) or not np.allclose(factors, expected, rtol=1e-3):
        raise ModelError("rope_freqs.weight does not follow the formula of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


# ---- weights ----------------------------------------------------------------------------------


def hf_name(name: str) -> str:
    """The transformers name of a GGUF tensor; raises ModelError when there is none."""
    stem, _, suffix = name.rpartition(".")
    if suffix in ("weight", "bias"):
        if stem in TENSOR_NAMES:
            return f"{TENSOR_NAMES[stem]}.{suffix}"
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer and layer[2] in LAYER_TENSOR_NAMES:
            return f"model.layers.{layer[1]}.{LAYER_TENSOR_NAMES[layer[2]]}.{suffix}"
    raise ModelError(f"the GGUF file has an unknown tensor {name}")


def _write_weights(
    path: Path,
    config: Fields,
    tensors: Mapping[str, ReaderTensor],
    dtype: str,
    progress: Progress,
) -> None:
    """Stream all tensors into one safetensors file: header length, JSON header, raw bytes."""
    items = {hf_name(n): t for n, t in tensors.items() if n != "rope_freqs.weight"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in items.items():
        start, end = end, end + int(tensor.n_elements) * DTYPE_BYTES[dtype]
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    interleaved = config["model_type"] in INTERLEAVED_ROPE
    num_heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for name, tensor in items.items():
            projection = re.search(r"\.([qk])_proj\.", name)
            groups = num_heads[projection[1]] if projection and interleaved else None
            for weights in _dequantized(tensor, groups):
                file.write(to_bytes(weights, dtype, name))
            progress("converting weights", header[name]["data_offsets"][1] / end)
        file.flush()
        os.fsync(file.fileno())


def _dequantized(tensor: ReaderTensor, num_heads: int | None) -> Iterator[NDArray[np.float32]]:
    """The tensor's rows in order, a chunk at a time; whole when q/k rows must be reordered."""
    if num_heads is not None:
        yield deinterleave(dequantize(tensor.data, tensor.tensor_type), num_heads)
        return
    row_bytes = max(4 * int(tensor.n_elements) // len(tensor.data), 1)
    step = max(CHUNK_BYTES // row_bytes, 1)
    for start in range(0, len(tensor.data), step):
        yield dequantize(tensor.data[start : start + step], tensor.tensor_type)


def deinterleave(weights: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of q/k rows: pairs (i, i + H/2) side by side within each head.

    `weights` is [num_heads * H, ...]; so is the result.
    """
    half = len(weights) // num_heads // 2
    pairs = weights.reshape(num_heads, half, 2, *weights.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def to_bytes(weights: NDArray[np.float32], dtype: str, name: str) -> bytes:
    """Little-endian bytes of `weights` as `dtype`, rounded to nearest, ties to even.

    Raises ModelError when float16 cannot hold a finite value.
    """
    if dtype == "float32":
        return weights.astype("<f4").tobytes()
    if dtype == "float16":
        limit = float(np.finfo(np.float16).max)
        if np.abs(weights).max(initial=0.0) > limit:
            raise ModelError(f"{name} has values beyond {limit:g}; use --dtype bfloat16")
        return weights.astype("<f2").tobytes()
    bits = np.ascontiguousarray(weights, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(weights), 0x7FC0, rounded).astype("<u2").tobytes()


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert as the command line says; progress as JSON lines on stdout. Returns exit status."""
    parser = argparse.ArgumentParser(prog="python -m loongd.model.convert", description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--ask", action="store_true")
    options = parser.parse_args(arguments)

    def say(**word: Any) -> None:
        sys.stdout.write(json.dumps(word) + "\n")
        sys.stdout.flush()

    def tell(config: Fields) -> None:
        say(config=config)
        if options.ask and not sys.stdin.readline():
            sys.exit("not wanted")

    try:
        convert_gguf(
            *(options.gguf, options.out_dir, options.dtype),
            lambda stage, fraction: say(stage=stage, fraction=round(fraction, 4)),
            tell,
        )
    except ModelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except OSError as error:
        sys.stderr.write(f"{options.gguf} to {options.out_dir} (in cache_dir): {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
