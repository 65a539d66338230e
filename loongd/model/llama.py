"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) over packed tokens.

Knows: the order of layers, and where the ranks of a tensor-parallel instance must sum. Does not
know: KV, requests, other instances; the `attention` callable does everything about those.

Everything but attention works row by row, so long inputs pass through the linear layers in chunks:
beside the hidden states, only q, k, v and the output of attention are ever as long as the input.

Letters: T packed tokens, B selected tokens, D model dim, N query heads, K kv heads, H head dim,
V vocabulary, R tensor-parallel ranks. N, K and V's slices are what this rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from loongd.kernels.elementwise import apply_rotary, rms_norm, silu_mul
from loongd.model.rope import Rotary
from loongd.model.spec import ModelSpec
from loongd.model.weights import LayerWeights, Weights

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_TNH, k_TKH, v_TKH) -> out_TNH; q and k are rotated, v may be a view with gaps."""

LINEAR_CHUNK_TOKENS = 16384
"""Tokens that pass through the linear layers at once: plenty to fill a GPU, and for an MLP of
14,336 columns in bf16 under 1.5 GB of intermediates, however long the input."""


class TensorParallel(Protocol):
    """The workers of one instance, as the model needs them; all call the same, in order."""

    def all_reduce(self, x_TD: Tensor) -> None:
        """Replace `x_TD` by its sum over the ranks, the same bits on all."""

    def all_gather(self, x_BV: Tensor) -> Tensor:
        """The ranks' equally shaped tensors side by side: (B, R V), by rank."""


class Llama:
    """A decoder with its weights; stateless between calls."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        *,
        tensor_parallel: TensorParallel | None = None,
        chunk_tokens: int = LINEAR_CHUNK_TOKENS,
    ) -> None:
        """`spec` and `weights` are this rank's (`Shard.spec`, `load_weights(shard=...)`);
        `tensor_parallel` is None for an instance of one worker."""
        self._spec = spec
        self._weights = weights
        self._dtype = dtype
        self._rotary = Rotary(spec, device)
        self._tensor_parallel = tensor_parallel
        self._chunk_tokens = chunk_tokens

    @torch.inference_mode()
    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, lengths_T: Tensor, attention: Attention
    ) -> Tensor:
        """Hidden states (T, D) after the last layer, before the final norm.

        Args:
            tokens_T: token ids; T may be 0, and `attention` is still called for each layer.
            positions_T: position of each token in its request.
            lengths_T: tokens of each token's request at this step (see `Rotary.cos_sin`).
            attention: attends and stores KV; its output may be of any float type.
        """
        hidden_TD = embedding(tokens_T, self._weights.embed_VD)
        cos_TH, sin_TH = self._rotary.cos_sin(positions_T, lengths_T)
        cos_TH, sin_TH = cos_TH.to(self._dtype), sin_TH.to(self._dtype)
        for index, layer in enumerate(self._weights.layers):
            q_TNH, k_TKH, v_TKH = self._qkv(layer, hidden_TD, cos_TH, sin_TH)
            out_TNH = attention(index, q_TNH, k_TKH, v_TKH)
            del q_TNH, k_TKH, v_TKH
            for rows in self._chunks(len(hidden_TD)):
                # in place: the residual stream is this function's own
                part_TD = hidden_TD[rows]
                (out_TD,) = layer.out(out_TNH[rows].to(self._dtype).flatten(1))
                part_TD += self._summed(out_TD)
                part_TD += self._mlp(layer, part_TD)
        return hidden_TD

    @torch.inference_mode()
    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits (B, V) over the whole vocabulary, fp32, of selected rows of `forward`."""
        normed_BD = rms_norm(hidden_BD, self._weights.final_norm_D, self._spec.rms_norm_eps)
        logits_BV = linear(normed_BD, self._weights.lm_head_VD)
        if self._tensor_parallel is not None and logits_BV.shape[1] < self._spec.vocab_size:
            logits_BV = self._tensor_parallel.all_gather(logits_BV)
        return logits_BV.float()

    def _chunks(self, num_tokens: int) -> Iterator[slice]:
        """All rows in order, `chunk_tokens` at a time; one empty chunk when there is none."""
        for start in range(0, max(num_tokens, 1), self._chunk_tokens):
            yield slice(start, min(start + self._chunk_tokens, num_tokens))

    def _summed(self, x_TD: Tensor) -> Tensor:
        """The sum over the ranks of a projection that was cut by inputs."""
        if self._tensor_parallel is not None and len(x_TD):
            self._tensor_parallel.all_reduce(x_TD)
        return x_TD

    def _qkv(
        self, layer: LayerWeights, hidden_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys (both rotated) and values of all tokens."""
        num_tokens, spec = len(hidden_TD), self._spec
        if num_tokens <= self._chunk_tokens:
            return self._qkv_chunk(layer, hidden_TD, cos_TH, sin_TH)
        q_TNH = hidden_TD.new_empty((num_tokens, spec.num_heads, spec.head_dim))
        k_TKH = hidden_TD.new_empty((num_tokens, spec.num_kv_heads, spec.head_dim))
        v_TKH = torch.empty_like(k_TKH)
        for rows in self._chunks(num_tokens):
            chunk = self._qkv_chunk(layer, hidden_TD[rows], cos_TH[rows], sin_TH[rows])
            for whole, part in zip((q_TNH, k_TKH, v_TKH), chunk, strict=True):
                whole[rows] = part
        return q_TNH, k_TKH, v_TKH

    def _qkv_chunk(
        self, layer: LayerWeights, hidden_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, H, eps = len(hidden_TD), self._spec.head_dim, self._spec.rms_norm_eps
        q, k, v = layer.qkv(rms_norm(hidden_TD, layer.input_norm_D, eps))
        q_TNH = q.view(num_tokens, self._spec.num_heads, H)
        k_TKH = k.view(num_tokens, self._spec.num_kv_heads, H)
        v_TKH = v.view(num_tokens, self._spec.num_kv_heads, H)
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            q_TNH = rms_norm(q_TNH, layer.q_norm_H, eps)
            k_TKH = rms_norm(k_TKH, layer.k_norm_H, eps)
        return *apply_rotary(q_TNH, k_TKH, cos_TH, sin_TH), v_TKH

    def _mlp(self, layer: LayerWeights, hidden_TD: Tensor) -> Tensor:
        normed_TD = rms_norm(hidden_TD, layer.post_norm_D, self._spec.rms_norm_eps)
        gate_TF, up_TF = layer.gate_up(normed_TD)
        (out_TD,) = layer.down(silu_mul(gate_TF, up_TF))
        return self._summed(out_TD)
