"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) over packed tokens.

Knows: the order of layers. Does not know: KV, requests, other instances; the `attention` callable
does everything about those.

Letters: T packed tokens, B selected tokens, D model dim, N query heads, K kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from loongd.kernels.elementwise import apply_rotary, rms_norm, silu_mul
from loongd.model.rope import Rotary
from loongd.model.spec import ModelSpec
from loongd.model.weights import LayerWeights, Weights

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_TNH, k_TKH, v_TKH) -> out_TNH; q and k are rotated, v may be a view with gaps."""


class Llama:
    """A decoder with its weights; stateless between calls."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._weights = weights
        self._dtype = dtype
        self._rotary = Rotary(spec, device)

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
            q_TNH, k_TKH, v_TKH = self._qkv(layer, hidden_TD)
            q_TNH, k_TKH = apply_rotary(q_TNH, k_TKH, cos_TH, sin_TH)
            out_TNH = attention(index, q_TNH, k_TKH, v_TKH)
            (out_TD,) = layer.out(out_TNH.to(self._dtype).flatten(1))
            hidden_TD = hidden_TD + out_TD
            hidden_TD = hidden_TD + self._mlp(layer, hidden_TD)
        return hidden_TD

    @torch.inference_mode()
    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits (B, V), fp32, of rows that the caller has selected from `forward`."""
        normed_BD = rms_norm(hidden_BD, self._weights.final_norm_D, self._spec.rms_norm_eps)
        return linear(normed_BD, self._weights.lm_head_VD).float()

    def _qkv(self, layer: LayerWeights, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens, H, eps = len(hidden_TD), self._spec.head_dim, self._spec.rms_norm_eps
        q, k, v = layer.qkv(rms_norm(hidden_TD, layer.input_norm_D, eps))
        q_TNH = q.view(num_tokens, self._spec.num_heads, H)
        k_TKH = k.view(num_tokens, self._spec.num_kv_heads, H)
        v_TKH = v.view(num_tokens, self._spec.num_kv_heads, H)
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            q_TNH = rms_norm(q_TNH, layer.q_norm_H, eps)
            k_TKH = rms_norm(k_TKH, layer.k_norm_H, eps)
        return q_TNH, k_TKH, v_TKH

    def _mlp(self, layer: LayerWeights, hidden_TD: Tensor) -> Tensor:
        normed_TD = rms_norm(hidden_TD, layer.post_norm_D, self._spec.rms_norm_eps)
        gate_TF, up_TF = layer.gate_up(normed_TD)
        (out_TD,) = layer.down(silu_mul(gate_TF, up_TF))
        return out_TD
