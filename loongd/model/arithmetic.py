"""How the model's operations between attention calls are computed: fast, or exact.

Knows: `Arithmetic`, what a forward pass needs. `Fast` takes the best kernels for the device;
`Exact` (deterministic mode) makes each row of a result a function of that row of the input alone:
matrix products, norms and activations in float64 whose sums are exact (`kernels.exact`), rounded
to the model's type where the fast path rounds, or less often.
Does not know: layers and their order, attention.

Letters: T packed tokens, D model dim, N query heads, K kv heads, H head dim, F hidden of the MLP,
O outputs, V vocabulary.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from loongd.kernels import elementwise, exact, skinny
from loongd.kernels.division import Division
from loongd.kernels.spare import linear_with_spare
from loongd.model.weights import Projection


class TensorParallel(Protocol):
    """The workers of one instance, as the model needs them; all call the same, in order."""

    def all_reduce(self, x_TD: Tensor) -> None:
        """Replace `x_TD` by its sum over the ranks, the same bits on all."""

    def all_gather(self, x_BV: Tensor) -> Tensor:
        """The ranks' equally shaped tensors side by side: (B, R V), by rank."""


@dataclass(frozen=True, slots=True)
class Joint:
    """Where two projections meet at the residual stream: `added` adds to it, `following` reads the
    norm of that."""

    added: Projection
    norm_D: Tensor
    eps: float
    following: Projection


class Arithmetic(Protocol):
    """The operations of a forward pass; all work row by row."""

    most_tokens: int
    """Rows that may pass through the linear layers at once."""

    def rotary_angles(
        self, positions_T: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.elementwise.rotary_angles`."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """As `kernels.elementwise.rms_norm`."""

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Tensor:
        """As `kernels.elementwise.add_rms_norm`: changes `residual_TD`."""

    def apply_rotary(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        cos_TH: Tensor,
        sin_TH: Tensor,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.elementwise.apply_rotary`."""

    def silu_mul(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        """As `kernels.elementwise.silu_mul`."""

    def project(
        self, projection: Projection, x_TD: Tensor, *, spare: int = 0
    ) -> tuple[Tensor, ...]:
        """`projection(x_TD)`, with `spare` rows of zeros behind (`kernels.spare`)."""

    def project_gated(self, projection: Projection, x_TD: Tensor) -> Tensor:
        """`silu_mul` of a projection's two outputs."""

    def project_summed(
        self, projection: Projection, x_TD: Tensor, ranks: TensorParallel | None
    ) -> Tensor:
        """The only output of a projection cut by inputs, summed over the ranks."""

    def add(
        self,
        projection: Projection,
        x_TD: Tensor,
        residual_TD: Tensor,
        norm_D: Tensor,
        ranks: TensorParallel | None,
    ) -> None:
        """`residual_TD` grows by `project_summed`. `norm_D` belongs to the norm that is next."""

    def add_and_project(
        self,
        joint: Joint,
        x_TD: Tensor,
        residual_TD: Tensor,
        ranks: TensorParallel | None,
        *,
        spare: int = 0,
    ) -> tuple[Tensor, ...]:
        """`residual_TD` grows by `project_summed(joint.added, x_TD)`; `joint.following` of the norm
        of that, as `project`."""

    def add_and_project_gated(
        self, joint: Joint, x_TD: Tensor, residual_TD: Tensor, ranks: TensorParallel | None
    ) -> Tensor:
        """As `add_and_project`, with `project_gated`."""

    def logits(self, x_BD: Tensor, lm_head_VD: Tensor) -> Tensor:
        """Logits of the head's rows."""


def _add_norm(
    math: Arithmetic,
    joint: Joint,
    x_TD: Tensor,
    residual_TD: Tensor,
    ranks: TensorParallel | None,
) -> Tensor:
    """What `joint.following` reads."""
    added_TD = math.project_summed(joint.added, x_TD, ranks)
    return math.add_rms_norm(added_TD, residual_TD, joint.norm_D, joint.eps)


_LEAST_WIDENED = 3
"""Rows from which a CPU without half-precision products multiplies faster in float32, the weights'
conversion included: 512 rows of a 576 x 1,536 matrix take 110 ms in bf16 on AVX2, 16 ms so."""


def _slow_types(device: torch.device) -> frozenset[torch.dtype]:
    """The types whose products this device can only do element by element."""
    if device.type != "cpu":
        return frozenset()
    library = torch.ops.mkldnn
    fast = {
        torch.bfloat16: library._is_mkldnn_bf16_supported(),
        torch.float16: library._is_mkldnn_fp16_supported(),
    }
    return frozenset(dtype for dtype, supported in fast.items() if not supported)


class Fast:
    """The best kernels of each device; products of few rows by own ones where those are faster."""

    most_tokens = sys.maxsize
    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    rotary_angles = staticmethod(elementwise.rotary_angles)
    apply_rotary = staticmethod(elementwise.apply_rotary)
    silu_mul = staticmethod(elementwise.silu_mul)

    def __init__(
        self,
        tickets: Tensor | None = None,
        slow_types: frozenset[torch.dtype] = frozenset(),
    ) -> None:
        """`tickets` are `skinny.new_tickets`; without, all products are the library's. Those of
        `slow_types` are done in float32 and rounded once."""
        self._tickets = tickets
        self._slow_types = slow_types

    @classmethod
    def on(cls, device: torch.device) -> Fast:
        """For one stream of one device."""
        tickets = skinny.new_tickets(device) if device.type == "cuda" else None
        return cls(tickets, _slow_types(device))

    def project(
        self, projection: Projection, x_TD: Tensor, *, spare: int = 0
    ) -> tuple[Tensor, ...]:
        return projection(x_TD, partial(linear_with_spare, spare=spare) if spare else self._linear)

    def project_gated(self, projection: Projection, x_TD: Tensor) -> Tensor:
        weight_OD, *others = projection.weights_OD
        if not others and self._are_few(x_TD, weight_OD, gated=True):
            return skinny.gated_linear_of_few(x_TD, weight_OD, projection.biases_O[0])
        return self.silu_mul(*self.project(projection, x_TD))

    def project_summed(
        self, projection: Projection, x_TD: Tensor, ranks: TensorParallel | None
    ) -> Tensor:
        (out_TD,) = self.project(projection, x_TD)
        if ranks is not None and len(out_TD):
            ranks.all_reduce(out_TD)
        return out_TD

    def add(
        self,
        projection: Projection,
        x_TD: Tensor,
        residual_TD: Tensor,
        norm_D: Tensor,
        ranks: TensorParallel | None,
    ) -> None:
        # of few rows, a part of the norm comes with it: a kernel without is one more to compile
        if self._add_few(projection, x_TD, residual_TD, norm_D, 0.0, ranks) is None:
            residual_TD += self.project_summed(projection, x_TD, ranks)

    def add_and_project(
        self,
        joint: Joint,
        x_TD: Tensor,
        residual_TD: Tensor,
        ranks: TensorParallel | None,
        *,
        spare: int = 0,
    ) -> tuple[Tensor, ...]:
        added = None if spare else self._add_joined(joint, x_TD, residual_TD, ranks)
        if added is None:
            norm_TD = _add_norm(self, joint, x_TD, residual_TD, ranks)
            return self.project(joint.following, norm_TD, spare=spare)
        assert self._tickets is not None
        product = partial(skinny.linear_of_few, tickets=self._tickets, division=added[1])
        return joint.following(added[0], product)

    def add_and_project_gated(
        self, joint: Joint, x_TD: Tensor, residual_TD: Tensor, ranks: TensorParallel | None
    ) -> Tensor:
        added = self._add_joined(joint, x_TD, residual_TD, ranks, gated=True)
        if added is None:
            norm_TD = _add_norm(self, joint, x_TD, residual_TD, ranks)
            return self.project_gated(joint.following, norm_TD)
        (weight_OD,), (bias_O,) = joint.following.weights_OD, joint.following.biases_O
        return skinny.gated_linear_of_few(added[0], weight_OD, bias_O, division=added[1])

    def logits(self, x_BD: Tensor, lm_head_VD: Tensor) -> Tensor:
        return self._linear(x_BD, lm_head_VD, None)

    def _add_joined(
        self,
        joint: Joint,
        x_TD: Tensor,
        residual_TD: Tensor,
        ranks: TensorParallel | None,
        *,
        gated: bool = False,
    ) -> tuple[Tensor, Division] | None:
        """As `_add_few`, if what follows is an own product too."""
        weight_OD, *others = joint.following.weights_OD
        if others or not self._are_few(x_TD, weight_OD, gated=gated):
            return None
        return self._add_few(joint.added, x_TD, residual_TD, joint.norm_D, joint.eps, ranks)

    def _add_few(
        self,
        added: Projection,
        x_TD: Tensor,
        residual_TD: Tensor,
        norm_D: Tensor,
        eps: float,
        ranks: TensorParallel | None,
    ) -> tuple[Tensor, Division] | None:
        """As `skinny.add_linear_of_few` where that is best and no sum over ranks comes before the
        addition; else None, and nothing has happened."""
        if self._tickets is None or ranks is not None or not 0 < len(x_TD) <= skinny.MOST_ROWS:
            return None
        (weight_OD,), (bias_O,) = added.weights_OD, added.biases_O
        if len(x_TD) > skinny.most_rows_added(weight_OD):
            return None
        return skinny.add_linear_of_few(
            x_TD, weight_OD, bias_O, residual_TD, norm_D, eps, self._tickets
        )

    def _linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        if self._tickets is not None and self._are_few(x_TD, weight_OD):
            return skinny.linear_of_few(x_TD, weight_OD, bias_O, self._tickets)
        if weight_OD.dtype in self._slow_types and len(x_TD) >= _LEAST_WIDENED:
            wide_O = None if bias_O is None else bias_O.float()
            return functional.linear(x_TD.float(), weight_OD.float(), wide_O).to(x_TD.dtype)
        return functional.linear(x_TD, weight_OD, bias_O)

    def _are_few(self, x_TD: Tensor, weight_OD: Tensor, *, gated: bool = False) -> bool:
        few = self._tickets is not None and 0 < len(x_TD) <= skinny.MOST_ROWS
        return few and len(x_TD) <= skinny.most_rows(weight_OD, gated=gated)


class Exact:
    """Float64 with exact sums; the same bits for a row in any batch, member and kind of device."""

    most_tokens = 2048  # 8 bytes an element and more than one copy of it

    def rotary_angles(
        self, positions_T: Tensor, inv_freq: Tensor, scale: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        half = positions_T[:, None].float() * inv_freq
        cosines, sines = exact.cos_sin(torch.cat((half, half), dim=-1))
        return (cosines.float() * scale).to(dtype), (sines.float() * scale).to(dtype)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        # square root and division round correctly everywhere, a reciprocal root does not
        root_T1 = exact.mean_square(x_TD).add_(eps).sqrt_()
        return (x_TD.double() / root_T1).mul_(weight_D.double()).to(x_TD.dtype)

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> Tensor:
        return self.rms_norm(residual_TD.add_(x_TD), weight_D, eps)

    def apply_rotary(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        cos_TH: Tensor,
        sin_TH: Tensor,
        *,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        cos_T1H, sin_T1H = cos_TH[:, None].double(), sin_TH[:, None].double()
        turned = (_turned(q_TNH, cos_T1H, sin_T1H), _turned(k_TKH, cos_T1H, sin_T1H))
        if out is None:
            return turned
        return out[0].copy_(turned[0]), out[1].copy_(turned[1])

    def silu_mul(self, gate_TF: Tensor, up_TF: Tensor) -> Tensor:
        return exact.silu(gate_TF).mul_(up_TF.double()).to(gate_TF.dtype)

    def project(
        self, projection: Projection, x_TD: Tensor, *, spare: int = 0
    ) -> tuple[Tensor, ...]:
        assert not spare  # no attention of exact results asks for it
        outs = tuple(
            exact.linear(x_TD, weight_OD, bias_O).to(x_TD.dtype)
            for weight_OD, bias_O in zip(projection.weights_OD, projection.biases_O, strict=True)
        )
        if len(outs) == len(projection.sizes):
            return outs
        return torch.split_with_sizes(outs[0], projection.sizes, dim=-1)

    def project_gated(self, projection: Projection, x_TD: Tensor) -> Tensor:
        return self.silu_mul(*self.project(projection, x_TD))

    def project_summed(
        self, projection: Projection, x_TD: Tensor, ranks: TensorParallel | None
    ) -> Tensor:
        out_TD = exact.linear(x_TD, projection.weights_OD[0], projection.biases_O[0])
        if ranks is not None and len(out_TD):
            # gathered and added by rank: a reduction adds in an order that depends on the place
            parts_TRD = ranks.all_gather(out_TD).view(len(out_TD), -1, out_TD.shape[1])
            first_TD, *others = parts_TRD.unbind(1)
            out_TD = sum(others, start=first_TD)
        return out_TD.to(x_TD.dtype)

    def add(
        self,
        projection: Projection,
        x_TD: Tensor,
        residual_TD: Tensor,
        norm_D: Tensor,
        ranks: TensorParallel | None,
    ) -> None:
        del norm_D
        residual_TD += self.project_summed(projection, x_TD, ranks)

    def add_and_project(
        self,
        joint: Joint,
        x_TD: Tensor,
        residual_TD: Tensor,
        ranks: TensorParallel | None,
        *,
        spare: int = 0,
    ) -> tuple[Tensor, ...]:
        norm_TD = _add_norm(self, joint, x_TD, residual_TD, ranks)
        return self.project(joint.following, norm_TD, spare=spare)

    def add_and_project_gated(
        self, joint: Joint, x_TD: Tensor, residual_TD: Tensor, ranks: TensorParallel | None
    ) -> Tensor:
        norm_TD = _add_norm(self, joint, x_TD, residual_TD, ranks)
        return self.project_gated(joint.following, norm_TD)

    def logits(self, x_BD: Tensor, lm_head_VD: Tensor) -> Tensor:
        return exact.linear(x_BD, lm_head_VD).float()


def _turned(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    first, second = x_TNH.double().chunk(2, dim=-1)
    half_TNH = torch.cat((-second, first), dim=-1)
    whole_TNH = torch.cat((first, second), dim=-1)
    return whole_TNH.mul_(cos_T1H).add_(half_TNH.mul_(sin_T1H)).to(x_TNH.dtype)
