"""What a model is: shapes and conventions, read from a Hugging Face `config.json`.

Knows: the four supported architectures and what each key of their configuration means. A key that
would change the arithmetic and is not implemented is refused by name, never ignored.
Does not know: torch, weights, tokenizers. The daemon imports this file.

Letters: D hidden size, N query heads, K key/value heads, H head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from loongd.errors import ModelError
from loongd.model.rope_spec import RopeSpec, parse_rope

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_Count = Annotated[int, Meta(ge=1)]
_Positive = Annotated[float, Meta(gt=0)]
_TokenIds = int | list[int] | None
RawT = TypeVar("RawT")


class _RawConfig(msgspec.Struct, frozen=True):
    """The keys of `config.json` that matter, with Hugging Face's defaults."""

    hidden_size: _Count
    num_hidden_layers: _Count
    num_attention_heads: _Count
    intermediate_size: _Count
    vocab_size: _Count
    max_position_embeddings: _Count
    architectures: list[str] | None = None
    num_key_value_heads: _Count | None = None
    head_dim: _Count | None = None
    hidden_act: str = "silu"
    rms_norm_eps: _Positive = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: _Positive | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    original_max_position_embeddings: _Count | None = None
    partial_rotary_factor: float | None = None
    sliding_window: _Count | msgspec.UnsetType | None = msgspec.UNSET
    use_sliding_window: bool = False
    max_window_layers: int = 28
    layer_types: list[str] | None = None
    pretraining_tp: int | None = 1
    quantization_config: dict[str, Any] | None = None
    compression_config: dict[str, Any] | None = None
    dual_chunk_attention_config: dict[str, Any] | None = None
    use_mrope: bool = False
    torch_dtype: str | None = None
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: _TokenIds = None


class _RawGeneration(msgspec.Struct, frozen=True):
    """The one key of `generation_config.json` that matters here."""

    eos_token_id: _TokenIds = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A supported model. `sliding_layers` tells for each layer whether it attends only to the
    last `sliding_window` tokens (its own position included)."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None
    sliding_layers: tuple[bool, ...]
    torch_dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dir(cls, path: Path) -> ModelSpec:
        """Read `config.json`, and more end-of-sequence ids from `generation_config.json`.

        Raises:
            ModelError: a file is missing or broken, or the model is not supported.
        """
        spec = cls.from_config(_read_json(path / "config.json"), origin=str(path / "config.json"))
        generation_file = path / "generation_config.json"
        if not generation_file.is_file():
            return spec
        generation = _convert(_read_json(generation_file), _RawGeneration, str(generation_file))
        more = _token_ids(generation.eos_token_id)
        return replace(spec, eos_token_ids=_union(spec.eos_token_ids, more))

    @classmethod
    def from_config(cls, config: dict[str, Any], *, origin: str = "config.json") -> ModelSpec:
        """Build from a decoded `config.json`; `origin` names it in errors.

        Raises:
            ModelError: a key is missing, of the wrong type, contradictory or not supported.
        """
        raw = _convert(config, _RawConfig, origin)
        try:
            return _build(raw)
        except ModelError as error:
            raise ModelError(f"{origin}: {error}") from None

    @property
    def max_context_tokens(self) -> int:
        """Most positions of a request, rope scaling included.

        `llama3` states the extended length in `max_position_embeddings`; `yarn` extends its
        original length by `factor`; `linear` and `dynamic` extend `max_position_embeddings`.
        """
        return self.rope.max_context_tokens(self.max_position_embeddings)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of K and V of one token over all layers; `dtype` such as `bfloat16`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def window(self, layer: int) -> int | None:
        """Tokens that `layer` attends to, the newest included; None is all."""
        return self.sliding_window if self.sliding_layers[layer] else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        wanted = "a model is a Hugging Face checkpoint or a .gguf file"
        raise ModelError(f"{path} does not exist ({wanted})") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None


def _convert(data: dict[str, Any], kind: type[RawT], origin: str) -> RawT:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ModelError(f"{origin}: {error}") from None


def _build(raw: _RawConfig) -> ModelSpec:
    architecture = _architecture(raw)
    _refuse_unsupported(raw, architecture)
    head_dim, num_kv_heads = _heads(raw, architecture)
    sliding_layers, window = _sliding(raw, architecture)
    return ModelSpec(
        architecture=architecture,
        num_layers=raw.num_hidden_layers,
        hidden_size=raw.hidden_size,
        num_heads=raw.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=raw.intermediate_size,
        vocab_size=raw.vocab_size,
        rms_norm_eps=raw.rms_norm_eps,
        rope=parse_rope(
            raw.rope_scaling,
            raw.rope_parameters,
            theta=raw.rope_theta,
            original=raw.original_max_position_embeddings,
            max_positions=raw.max_position_embeddings,
        ),
        max_position_embeddings=raw.max_position_embeddings,
        tie_word_embeddings=raw.tie_word_embeddings,
        qkv_bias=raw.attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=raw.attention_bias,
        mlp_bias=raw.mlp_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=window,
        sliding_layers=sliding_layers,
        torch_dtype=_dtype(raw),
        bos_token_id=raw.bos_token_id,
        eos_token_ids=_token_ids(raw.eos_token_id),
    )


def _architecture(raw: _RawConfig) -> str:
    for name in raw.architectures or ():
        if name in ARCHITECTURES:
            return name
    raise ModelError(
        f"architectures is {raw.architectures}; supported are {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: _RawConfig, architecture: str) -> None:
    """Raise for the first key whose value asks for arithmetic that does not exist here."""
    bias_ok = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    refused = {
        "hidden_act": (raw.hidden_act, raw.hidden_act != "silu"),
        "partial_rotary_factor": (
            raw.partial_rotary_factor,
            raw.partial_rotary_factor not in (None, 1.0),
        ),
        "quantization_config": (raw.quantization_config, raw.quantization_config is not None),
        "compression_config": (raw.compression_config, raw.compression_config is not None),
        "dual_chunk_attention_config": (
            raw.dual_chunk_attention_config,
            raw.dual_chunk_attention_config is not None,
        ),
        "pretraining_tp": (raw.pretraining_tp, (raw.pretraining_tp or 1) > 1),
        "use_mrope": (raw.use_mrope, raw.use_mrope),
        "attention_bias": (raw.attention_bias, raw.attention_bias and not bias_ok),
        "mlp_bias": (raw.mlp_bias, raw.mlp_bias and architecture != "LlamaForCausalLM"),
    }
    for key, (value, wrong) in refused.items():
        if wrong:
            raise ModelError(f"{key} = {value!r} is not supported for {architecture}")


def _heads(raw: _RawConfig, architecture: str) -> tuple[int, int]:
    """Head dim and number of key/value heads, both checked."""
    num_heads = raw.num_attention_heads
    if raw.num_key_value_heads is None and architecture != "LlamaForCausalLM":
        raise ModelError(f"num_key_value_heads is missing; {architecture} does not derive it")
    num_kv_heads = raw.num_key_value_heads or num_heads
    if num_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    if raw.head_dim is None and architecture == "Qwen3ForCausalLM":
        raise ModelError("head_dim is missing; Qwen3ForCausalLM does not derive it")
    if raw.head_dim is None and raw.hidden_size % num_heads:
        raise ModelError(
            f"head_dim is missing and hidden_size = {raw.hidden_size} is not a multiple of "
            f"num_attention_heads = {num_heads}"
        )
    head_dim = raw.head_dim or raw.hidden_size // num_heads
    if head_dim % 2:
        raise ModelError(f"head_dim = {head_dim} is odd; rotary embedding needs pairs")
    return head_dim, num_kv_heads


def _sliding(raw: _RawConfig, architecture: str) -> tuple[tuple[bool, ...], int | None]:
    """Which layers use a sliding window, and its tokens (None when no layer does)."""
    window = _window(raw, architecture)
    listed = _listed_sliding(raw)
    if architecture.startswith("Qwen"):
        flags = listed or tuple(
            window is not None and layer >= raw.max_window_layers
            for layer in range(raw.num_hidden_layers)
        )
    else:
        flags = (window is not None,) * raw.num_hidden_layers
    if (listed is not None and listed != flags) or (window is None and any(flags)):
        raise ModelError(
            f"layer_types has {sum(listed or ())} sliding layers of {raw.num_hidden_layers}, "
            f"which contradicts {architecture} with a sliding window of {window}"
        )
    return flags, window if any(flags) else None


def _window(raw: _RawConfig, architecture: str) -> int | None:
    """The sliding window that the configuration turns on."""
    window = 4096 if isinstance(raw.sliding_window, msgspec.UnsetType) else raw.sliding_window
    if architecture == "MistralForCausalLM":
        return window
    if architecture.startswith("Qwen"):
        return window if raw.use_sliding_window else None
    if raw.sliding_window:
        raise ModelError(f"sliding_window = {window} is not supported for {architecture}")
    return None


def _listed_sliding(raw: _RawConfig) -> tuple[bool, ...] | None:
    if raw.layer_types is None:
        return None
    for kind in raw.layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelError(f"layer_types has {kind!r}, which is not supported")
    if len(raw.layer_types) != raw.num_hidden_layers:
        raise ModelError(
            f"layer_types has {len(raw.layer_types)} entries, "
            f"num_hidden_layers is {raw.num_hidden_layers}"
        )
    return tuple(kind == "sliding_attention" for kind in raw.layer_types)


def _dtype(raw: _RawConfig) -> str:
    name = (raw.dtype or raw.torch_dtype or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(f"dtype = {name!r} is not supported; supported: {', '.join(DTYPE_BYTES)}")
    return name


def _token_ids(value: _TokenIds) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _union(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(first + second))
