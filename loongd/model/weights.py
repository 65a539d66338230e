"""Weights: from a checkpoint or from a seed, as tensors named after what they do.

Knows: Hugging Face tensor names and shapes, safetensors files (single and sharded), and that on a
CPU several processes share one copy: tensors stay views of the mapped file when no conversion is
needed, so nothing is fused or touched there. On a GPU q, k, v and gate, up are fused. Of a model
that several workers share, only this rank's slices are read (`model.shard` says which).
Does not know: the forward pass. Pickled checkpoints are refused: loading one runs its code.

Letters: D hidden size, F intermediate size, V vocabulary, O outputs of a projection.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from loongd.errors import ModelError
from loongd.model.shard import WHOLE, Cut, Shard
from loongd.model.spec import ModelSpec

INDEX_NAME = "model.safetensors.index.json"
Fetch = Callable[[str], Tensor]
"""The rank's part of a tensor, by the tensor's name."""
Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x_TD, weight_OD, bias_O) -> x W^T + b."""


@dataclass(frozen=True, slots=True)
class Projection:
    """One or several linear maps of the same input: y_i = x W_i^T + b_i.

    `weights_OD` holds either one matrix for each of `sizes`, or one fused matrix with
    sum(sizes) rows; `biases_O` likewise, None where there is none.
    """

    weights_OD: tuple[Tensor, ...]
    biases_O: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]

    def __call__(self, x_TD: Tensor, product: Product | None = None) -> tuple[Tensor, ...]:
        """Outputs (T, size) in the order of `sizes`; views of one tensor when fused. `product`
        stands in for torch's `linear`."""
        inputs_TD = (x_TD,) * len(self.weights_OD)
        outs = tuple(map(product or linear, inputs_TD, self.weights_OD, self.biases_O))
        if len(outs) == len(self.sizes):
            return outs
        return torch.split_with_sizes(outs[0], self.sizes, dim=-1)

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        """Weight and bias of each output, fused or not."""
        if len(self.weights_OD) == len(self.sizes):
            return list(zip(self.weights_OD, self.biases_O, strict=True))
        weight, bias = self.weights_OD[0], self.biases_O[0]
        biases = (
            (None,) * len(self.sizes) if bias is None else torch.split_with_sizes(bias, self.sizes)
        )
        return list(zip(torch.split_with_sizes(weight, self.sizes), biases, strict=True))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; the per-head norms are None for models without them."""

    input_norm_D: Tensor
    qkv: Projection
    q_norm_H: Tensor | None
    k_norm_H: Tensor | None
    out: Projection
    post_norm_D: Tensor
    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a rank; `lm_head_VD` is `embed_VD` itself, or rows of it, when tied."""

    embed_VD: Tensor
    layers: list[LayerWeights]
    final_norm_D: Tensor
    lm_head_VD: Tensor

    def num_bytes(self) -> int:
        """Bytes of all weights, a tied matrix counted once."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.embed_VD, self.final_norm_D)
        first = self.embed_VD.data_ptr()
        if not first <= self.lm_head_VD.data_ptr() < first + self.embed_VD.nbytes:
            yield self.lm_head_VD
        for layer in self.layers:
            yield from (layer.input_norm_D, layer.post_norm_D)
            yield from (norm for norm in (layer.q_norm_H, layer.k_norm_H) if norm is not None)
            for projection in (layer.qkv, layer.out, layer.gate_up, layer.down):
                yield from projection.weights_OD
                yield from (bias for bias in projection.biases_O if bias is not None)


def load_weights(
    model_dir: Path,
    spec: ModelSpec,
    *,
    load_format: str,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    progress: Callable[[str, float], None],
    shard: Shard = WHOLE,
) -> Weights:
    """All weights of one rank as `dtype` on `device`.

    Args:
        model_dir: directory of a Hugging Face checkpoint; not read when `load_format` is `dummy`.
        load_format: `auto` and `safetensors` read safetensors; `dummy` draws normal(0, 0.02)
            matrices, and norms of 1, from `seed` and each tensor's name.
        progress: called with ("weights", fraction) after each layer.
        shard: the rank whose slices are wanted; `spec` is the whole model's. The slices of all
            ranks make up the tensors of a single one, dummy weights included.

    Raises:
        ModelError: a file or tensor is missing, unknown, unreadable or of another shape.
    """
    shapes = tensor_shapes(spec)
    shard.spec(spec)

    def cut(name: str) -> Cut | None:
        return shard.cut(name, shapes[name], spec)

    if load_format == "dummy":

        def fetch_dummy(name: str) -> Tensor:
            return _sliced(_dummy(name, shapes[name], seed, dtype, device), cut(name))

        return _assemble(spec, shard, fetch_dummy, progress)
    with ExitStack() as stack:
        checkpoint = _Checkpoint(model_dir, stack)
        checkpoint.check(shapes, tied=spec.tie_word_embeddings)

        def fetch(name: str) -> Tensor:
            return checkpoint.fetch(name, cut(name)).to(device, dtype)

        return _assemble(spec, shard, fetch, progress)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors by Hugging Face name; without `lm_head.weight` when tied."""
    D, F, H = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q_size, kv_size = spec.num_heads * H, spec.num_kv_heads * H
    matrices: list[tuple[str, int, int, bool]] = [
        ("self_attn.q_proj", q_size, D, spec.qkv_bias),
        ("self_attn.k_proj", kv_size, D, spec.qkv_bias),
        ("self_attn.v_proj", kv_size, D, spec.qkv_bias),
        ("self_attn.o_proj", D, q_size, spec.o_bias),
        ("mlp.gate_proj", F, D, spec.mlp_bias),
        ("mlp.up_proj", F, D, spec.mlp_bias),
        ("mlp.down_proj", D, F, spec.mlp_bias),
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, D),
        "model.norm.weight": (D,),
    }
    if not spec.tie_word_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, D)
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (D,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (D,)
        if spec.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (H,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (H,)
        for name, rows, columns, has_bias in matrices:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


def hf_tensors(weights: Weights, spec: ModelSpec) -> dict[str, Tensor]:
    """The weights by Hugging Face name (views, unfused), to build the same model elsewhere."""
    tensors = {
        "model.embed_tokens.weight": weights.embed_VD,
        "model.norm.weight": weights.final_norm_D,
    }
    if not spec.tie_word_embeddings:
        tensors["lm_head.weight"] = weights.lm_head_VD
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        tensors[f"{prefix}.input_layernorm.weight"] = layer.input_norm_D
        tensors[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm_D
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            tensors[f"{prefix}.self_attn.q_norm.weight"] = layer.q_norm_H
            tensors[f"{prefix}.self_attn.k_norm.weight"] = layer.k_norm_H
        for block, names, projection in _projections(layer):
            for name, (weight, bias) in zip(names, projection.parts(), strict=True):
                tensors[f"{prefix}.{block}.{name}.weight"] = weight
                if bias is not None:
                    tensors[f"{prefix}.{block}.{name}.bias"] = bias
    return tensors


def _projections(layer: LayerWeights) -> list[tuple[str, tuple[str, ...], Projection]]:
    return [
        ("self_attn", ("q_proj", "k_proj", "v_proj"), layer.qkv),
        ("self_attn", ("o_proj",), layer.out),
        ("mlp", ("gate_proj", "up_proj"), layer.gate_up),
        ("mlp", ("down_proj",), layer.down),
    ]


def _assemble(
    spec: ModelSpec, shard: Shard, fetch: Fetch, progress: Callable[[str, float], None]
) -> Weights:
    embed_VD = fetch("model.embed_tokens.weight")
    layers = []
    for index in range(spec.num_layers):
        layers.append(_layer(spec, shard, fetch, f"model.layers.{index}"))
        progress("weights", (index + 1) / (spec.num_layers + 1))
    final_norm_D = fetch("model.norm.weight")
    lm_head_VD = (
        _tied_head(spec, shard, embed_VD) if spec.tie_word_embeddings else fetch("lm_head.weight")
    )
    progress("weights", 1.0)
    return Weights(embed_VD, layers, final_norm_D, lm_head_VD)


def _tied_head(spec: ModelSpec, shard: Shard, embed_VD: Tensor) -> Tensor:
    cut = shard.cut("lm_head.weight", tuple(embed_VD.shape), spec)
    return embed_VD if cut is None else embed_VD[cut.start : cut.stop]


def _layer(spec: ModelSpec, shard: Shard, fetch: Fetch, prefix: str) -> LayerWeights:
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    # After a projection cut by inputs the ranks' outputs are summed: one of them adds the bias.
    first = shard.rank == 0
    qkv_names = [f"{attn}.q_proj", f"{attn}.k_proj", f"{attn}.v_proj"]
    return LayerWeights(
        input_norm_D=fetch(f"{prefix}.input_layernorm.weight"),
        qkv=_projection(fetch, qkv_names, has_bias=spec.qkv_bias),
        q_norm_H=fetch(f"{attn}.q_norm.weight") if spec.qk_norm else None,
        k_norm_H=fetch(f"{attn}.k_norm.weight") if spec.qk_norm else None,
        out=_projection(fetch, [f"{attn}.o_proj"], has_bias=spec.o_bias and first),
        post_norm_D=fetch(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=_projection(fetch, [f"{mlp}.gate_proj", f"{mlp}.up_proj"], has_bias=spec.mlp_bias),
        down=_projection(fetch, [f"{mlp}.down_proj"], has_bias=spec.mlp_bias and first),
    )


def _projection(fetch: Fetch, names: list[str], *, has_bias: bool) -> Projection:
    weights = [fetch(f"{name}.weight") for name in names]
    biases = [fetch(f"{name}.bias") for name in names] if has_bias else []
    sizes = tuple(len(weight) for weight in weights)
    # fusing copies, which would unshare a mapped file on the CPU
    if weights[0].is_cuda and len(weights) > 1:
        weights = [torch.cat(weights)]
        biases = [torch.cat(biases)] if biases else []
    return Projection(tuple(weights), tuple(biases) or (None,) * len(weights), sizes)


def _dummy(
    name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=dtype, device=device)
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, 0.02, generator=generator)


def _sliced(tensor: Tensor, cut: Cut | None) -> Tensor:
    """A part on its own memory, so that the whole can go."""
    return (
        tensor if cut is None else tensor.narrow(cut.dim, cut.start, cut.stop - cut.start).clone()
    )


class _Checkpoint:
    """The safetensors files of one directory, opened by mapping and closed by `stack`."""

    def __init__(self, model_dir: Path, stack: ExitStack) -> None:
        self._dir = model_dir
        self._files: dict[str, Any] = {}  # safe_open is not typed
        paths = _files(model_dir)
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from None
            self._files.update(dict.fromkeys(file.keys(), file))

    def check(self, shapes: dict[str, tuple[int, ...]], *, tied: bool) -> None:
        """Raise ModelError unless the files hold exactly these tensors."""
        for name, expected in shapes.items():
            if name not in self._files:
                raise ModelError(f"{self._dir}: tensor {name} is missing")
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found != expected:
                raise ModelError(
                    f"{self._dir}: tensor {name} has shape {list(found)}, "
                    f"config.json implies {list(expected)}"
                )
        for name in self._files:
            ignored = name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")
            if name not in shapes and not ignored:
                raise ModelError(f"{self._dir}: tensor {name} is not part of this architecture")

    def fetch(self, name: str, cut: Cut | None) -> Tensor:
        """A tensor or a part of it: on the CPU a view of the mapped file, read when used."""
        part = slice(None) if cut is None else slice(cut.start, cut.stop)
        index = (slice(None), part) if cut is not None and cut.dim == 1 else (part,)
        tensor: Tensor = self._files[name].get_slice(name)[index]
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise ModelError(
                f"{self._dir}: tensor {name} has type {tensor.dtype}; quantized weights "
                "are not supported"
            )
        return tensor


def _files(model_dir: Path) -> list[Path]:
    """The checkpoint's safetensors files."""
    index = model_dir / INDEX_NAME
    paths = _indexed_files(index) if index.is_file() else [model_dir / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            pickled = sorted(model_dir.glob("pytorch_model*.bin"))
            hint = f"; {pickled[0].name} is pickle, which loongd never loads" if pickled else ""
            raise ModelError(f"{path} does not exist{hint}")
    return paths


def _indexed_files(index: Path) -> list[Path]:
    try:
        data = msgspec.json.decode(index.read_bytes(), type=_Index)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{index} cannot be read: {error}") from None
    return [index.parent / name for name in sorted(set(data.weight_map.values()))]


class _Index(msgspec.Struct):
    """The part of a shard index that matters: tensor name to file name."""

    weight_map: dict[str, str]
