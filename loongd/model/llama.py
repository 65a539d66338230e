"""The forward pass of the Llama family (Llama, Mistral, Qwen2, Qwen3) over packed tokens.

Knows: the order of layers, and where the ranks of a tensor-parallel instance must sum. Does not
know: KV, requests, other instances; the `attention` callable does everything about those.

Everything but attention works row by row, so long inputs pass through the linear layers in chunks,
from the output of one layer's attention to q, k, v of the next: beside the hidden states, only
those are ever as long as the input. Each addition to the residual stream goes with the norm that
follows it: the two are one pass over memory, or few rows have them done by the products beside.

Letters: T packed tokens, B selected tokens, D model dim, N query heads, K kv heads, H head dim,
V vocabulary, R tensor-parallel ranks. N, K and V's slices are what this rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from loongd.kernels.spare import new_rows
from loongd.model.arithmetic import Arithmetic, Fast, Joint, TensorParallel
from loongd.model.rope import Rotary
from loongd.model.spec import ModelSpec
from loongd.model.weights import LayerWeights, Weights

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_TNH, k_TKH, v_TKH) -> out_TNH; q and k are rotated, unless a `Store` leaves that to it;
v may be a view with gaps."""

Store = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""(layer, q_TNH, k_TKH, v_TKH, cos_TH, sin_TH), q and k not rotated yet; leaves what it does not do
of that to the layer's `Attention`."""

LINEAR_CHUNK_TOKENS = 8192
"""Tokens that pass through the linear layers at once: plenty to fill a GPU, and for an MLP of
14,336 columns in bf16 under 0.8 GB of intermediates, however long the input."""


def run_until(layers: Generator[int, None, Tensor], layer: int = 0) -> Tensor | None:
    """Drive `Llama.layers` up to that one: None; or, if it is 0 or not ahead, to what they return
    at the end."""
    try:
        while next(layers) != layer:
            pass
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    return None


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
        arithmetic: Arithmetic | None = None,
    ) -> None:
        """`spec` and `weights` are this rank's (`Shard.spec`, `load_weights(shard=...)`);
        `tensor_parallel` is None for an instance of one worker; `arithmetic` is `Fast` by
        default."""
        self._spec = spec
        self._weights = weights
        self._dtype = dtype
        self._tensor_parallel = tensor_parallel
        self._math = Fast.on(device) if arithmetic is None else arithmetic
        self._rotary = Rotary(spec, device, angles=self._math.rotary_angles)
        self._chunk_tokens = min(chunk_tokens, self._math.most_tokens)

    @torch.inference_mode()
    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths_T: Tensor | None,
        attention: Attention,
        *,
        rows_B: Tensor | None = None,
        store: Store | None = None,
    ) -> Tensor:
        """Hidden states (T, D) after the last layer, before the final norm; (B, D) of `rows_B`.

        Args:
            tokens_T: token ids; T may be 0, and `attention` is still called for each layer.
            positions_T: position of each token in its request.
            lengths_T: tokens of each token's request at this step (see `Rotary.cos_sin`), or None.
            attention: attends and stores KV; its output may be of any float type.
            rows_B: the rows (int64) that are wanted, in order; None for all. The last layer stores
                the KV of all tokens, but computes nothing else for the others, and `attention` may
                give its output for the wanted ones alone there.
            store: rotates queries and keys in place and stores keys and values, in one, or has
                `attention` do that, which else must not. For inputs of one chunk.
        """
        inputs = (tokens_T, positions_T, lengths_T)
        hidden = run_until(self.layers(*inputs, attention, rows_B=rows_B, store=store))
        assert hidden is not None
        return hidden

    def layers(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths_T: Tensor | None,
        attention: Attention,
        *,
        rows_B: Tensor | None = None,
        store: Store | None = None,
        spare: int = 0,
    ) -> Generator[int, None, Tensor]:
        """`forward` layer by layer, to be driven in inference mode: yields the number of layers
        that are done, after each but the last, and returns what `forward` does. In between, the
        residual stream and the next layer's queries, keys and values are all that it holds.
        Without a `store`, these have `spare` rows of zeros behind them (`kernels.spare`)."""
        hidden_TD = embedding(tokens_T, self._weights.embed_VD)
        angles = self._rotary.cos_sin(positions_T, lengths_T, self._dtype)
        layers, eps = self._weights.layers, self._spec.rms_norm_eps
        heads: list[Tensor] = []
        # behind the values too, where they stay where the projection leaves them
        beside = spare if len(hidden_TD) <= self._chunk_tokens else 0
        for rows in self._chunks(len(hidden_TD)):
            normed_TD = self._math.rms_norm(hidden_TD[rows], layers[0].input_norm_D, eps)
            qkv = self._math.project(layers[0].qkv, normed_TD, spare=beside)
            self._turn(layers[0], qkv, rows, angles, heads, store and partial(store, 0), spare)
            del qkv
        for index, (layer, following) in enumerate(zip(layers, (*layers[1:], None), strict=True)):
            out_TNH = attention(index, *heads)
            heads = []  # frees them: the next layer's are as long
            if rows_B is not None and following is None:
                out_TNH = out_TNH if len(out_TNH) == len(rows_B) else out_TNH[rows_B]
                hidden_TD = hidden_TD[rows_B]
            for rows in self._chunks(len(hidden_TD)):
                # in place: the residual stream is this function's own
                attended = (out_TNH[rows], hidden_TD[rows])
                qkv = self._after_attention(layer, following, *attended, spare=beside)
                if following is not None:
                    turn = store and partial(store, index + 1)
                    self._turn(following, qkv, rows, angles, heads, turn, spare)
                del qkv  # as long as the input, if that is one chunk
            del out_TNH
            if following is not None:
                yield index + 1
        return hidden_TD

    @torch.inference_mode()
    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits (B, V) over the whole vocabulary, fp32, of selected rows of `forward`."""
        return self.head(hidden_BD).float()

    @torch.inference_mode()
    def head(self, hidden_BD: Tensor) -> Tensor:
        """As `logits`, in the type that the arithmetic gives: the model's, if fast."""
        norm_D, eps = self._weights.final_norm_D, self._spec.rms_norm_eps
        normed_BD = self._math.rms_norm(hidden_BD, norm_D, eps)
        logits_BV = self._math.logits(normed_BD, self._weights.lm_head_VD)
        if self._tensor_parallel is not None and logits_BV.shape[1] < self._spec.vocab_size:
            logits_BV = self._tensor_parallel.all_gather(logits_BV)
        return logits_BV

    def _chunks(self, num_tokens: int) -> Iterator[slice]:
        """All rows in order, `chunk_tokens` at a time; one empty chunk when there is none."""
        for start in range(0, max(num_tokens, 1), self._chunk_tokens):
            yield slice(start, min(start + self._chunk_tokens, num_tokens))

    def _turn(
        self,
        layer: LayerWeights,
        qkv: tuple[Tensor, ...],
        rows: slice,
        angles: tuple[Tensor, Tensor],
        heads: list[Tensor],
        store: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None] | None,
        spare: int,
    ) -> None:
        """Queries, keys (both rotated) and values of a chunk, into the whole ones in `heads`.

        `heads` is empty before the first chunk. A chunk that is all of the input is not copied; its
        values have the `spare` rows behind them already.
        """
        (q, k, v), (cos_TH, sin_TH) = qkv, angles
        num_tokens, H, eps = len(q), self._spec.head_dim, self._spec.rms_norm_eps
        q_TNH = q.view(num_tokens, self._spec.num_heads, H)
        k_TKH = k.view(num_tokens, self._spec.num_kv_heads, H)
        v_TKH = v.view(num_tokens, self._spec.num_kv_heads, H)
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            q_TNH = self._math.rms_norm(q_TNH, layer.q_norm_H, eps)
            k_TKH = self._math.rms_norm(k_TKH, layer.k_norm_H, eps)
        if store is not None:
            store(q_TNH, k_TKH, v_TKH, cos_TH, sin_TH)
            heads.extend((q_TNH, k_TKH, v_TKH))
            return
        if num_tokens == len(cos_TH):
            out = None
            if spare:
                out = (new_rows(q_TNH, q_TNH.shape, spare), new_rows(k_TKH, k_TKH.shape, spare))
            turned = self._math.apply_rotary(q_TNH, k_TKH, cos_TH, sin_TH, out=out)
            heads.extend((*turned, v_TKH))
            return
        if not heads:
            whole = ((x, (len(cos_TH), *x.shape[1:])) for x in (q_TNH, k_TKH, v_TKH))
            heads.extend(new_rows(like, shape, spare) for like, shape in whole)
        turned = (heads[0][rows], heads[1][rows])
        self._math.apply_rotary(q_TNH, k_TKH, cos_TH[rows], sin_TH[rows], out=turned)
        heads[2][rows] = v_TKH

    def _after_attention(
        self,
        layer: LayerWeights,
        following: LayerWeights | None,
        out_TNH: Tensor,
        residual_TD: Tensor,
        *,
        spare: int,
    ) -> tuple[Tensor, ...]:
        """Adds the rest of the layer to `residual_TD`; the following layer's q, k and v, as the
        projection gives them."""
        math, ranks, eps = self._math, self._tensor_parallel, self._spec.rms_norm_eps
        out_TD = out_TNH.to(self._dtype).flatten(1)
        inner = Joint(layer.out, layer.post_norm_D, eps, layer.gate_up)
        gated_TF = math.add_and_project_gated(inner, out_TD, residual_TD, ranks)
        if following is None:
            math.add(layer.down, gated_TF, residual_TD, self._weights.final_norm_D, ranks)
            return ()
        outer = Joint(layer.down, following.input_norm_D, eps, following.qkv)
        return math.add_and_project(outer, gated_TF, residual_TD, ranks, spare=spare)
