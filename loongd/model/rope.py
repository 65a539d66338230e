"""Rotary position embedding: cosines and sines for positions, of each type in `RopeSpec`.

Knows: the formulas, in the same order of fp32 operations as transformers, so that results are
equal to the bit on a CPU.
Does not know: queries and keys (`kernels.elementwise.apply_rotary` turns those).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from loongd.kernels.elementwise import rotary_angles
from loongd.model.rope_spec import RopeSpec
from loongd.model.spec import ModelSpec

Angles = Callable[
    [torch.Tensor, torch.Tensor, float, torch.dtype], tuple[torch.Tensor, torch.Tensor]
]
"""As `kernels.elementwise.rotary_angles`."""


class Rotary:
    """Angles of one model. Stateless after construction, unlike the reference for `dynamic`,
    whose frequencies depend on the longest sequence seen: here each token names its own."""

    def __init__(
        self,
        spec: ModelSpec,
        device: torch.device,
        *,
        angles: Angles = rotary_angles,
    ) -> None:
        """`angles` are those of the model's arithmetic."""
        self._rope = spec.rope
        self._angles = angles
        self._head_dim = spec.head_dim
        self._max_positions = spec.max_position_embeddings
        # computed on the CPU so that every device gets the same bits
        self._inv_freq = _inv_freq(spec.rope, spec.head_dim).to(device)
        self._scale = _attention_factor(spec.rope)

    def cos_sin(
        self,
        positions_T: torch.Tensor,
        lengths_T: torch.Tensor | None,
        dtype: torch.dtype = torch.float32,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, both (T, H); the second half repeats the first.

        Args:
            positions_T: position of each token in its request, int32 or int64.
            lengths_T: length of each token's request at this step, the token included; only
                `dynamic` looks at it, else it may be None.
            dtype: of the result; they are computed in float32.
        """
        inv_freq = self._inv_freq
        if self._rope.type == "dynamic":
            assert lengths_T is not None
            inv_freq = self._dynamic_inv_freq(lengths_T)
        return self._angles(positions_T, inv_freq, self._scale, dtype)

    def _dynamic_inv_freq(self, lengths_T: torch.Tensor) -> torch.Tensor:
        """Inverse frequencies (T, H/2), one row for each token's own length."""
        limit = self._max_positions
        # one length at a time on the CPU: a vectorized power rounds differently from the
        # reference's, which at long positions is a visible angle
        lengths = sorted({limit, *(max(length, limit) for length in lengths_T.tolist())})
        table = torch.stack([_dynamic(self._rope, self._head_dim, n, limit) for n in lengths])
        keys = torch.tensor(lengths, device=lengths_T.device)
        return table.to(lengths_T.device)[torch.searchsorted(keys, lengths_T.clamp(min=limit))]


def _exponents(dim: int) -> torch.Tensor:
    return torch.arange(0, dim, 2, dtype=torch.float32) / dim


def _inv_freq(rope: RopeSpec, dim: int) -> torch.Tensor:
    """Inverse frequencies, fp32, (H/2,)."""
    base: torch.Tensor = rope.theta ** _exponents(dim)
    if rope.type == "linear":
        return (1.0 / base) / rope.factor
    if rope.type == "llama3":
        return _llama3(1.0 / base, rope)
    if rope.type == "yarn":
        return _yarn(base, rope, dim)
    return 1.0 / base


def _dynamic(rope: RopeSpec, dim: int, length: int, limit: int) -> torch.Tensor:
    """NTK scaling: beyond the trained length `limit` the base grows to
    theta * (factor * length / limit - (factor - 1)) ** (H / (H - 2))."""
    if length <= limit:
        return _inv_freq(rope, dim)
    stretch = (rope.factor * torch.tensor(length) / limit) - (rope.factor - 1)
    base: torch.Tensor = rope.theta * stretch ** (dim / (dim - 2))
    return 1.0 / (base ** _exponents(dim))


def _llama3(inv_freq: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    original = rope.original_max_position_embeddings
    assert original is not None
    low_freq_wavelen = original / rope.low_freq_factor
    high_freq_wavelen = original / rope.high_freq_factor
    wavelen = 2 * math.pi / inv_freq
    scaled = torch.where(wavelen > low_freq_wavelen, inv_freq / rope.factor, inv_freq)
    smooth = (original / wavelen - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    medium = (wavelen >= high_freq_wavelen) & (wavelen <= low_freq_wavelen)
    return torch.where(medium, smoothed, scaled)


def _yarn(base: torch.Tensor, rope: RopeSpec, dim: int) -> torch.Tensor:
    """YaRN (arXiv 2309.00071): a ramp over dimensions from extrapolation to interpolation."""
    low = _yarn_dimension(rope.beta_fast, rope, dim)
    high = _yarn_dimension(rope.beta_slow, rope, dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as the reference does: the ramp must not divide by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    extrapolated = 1 - ramp
    return (1.0 / (rope.factor * base)) * (1 - extrapolated) + (1.0 / base) * extrapolated


def _yarn_dimension(num_rotations: float, rope: RopeSpec, dim: int) -> float:
    """The dimension that turns `num_rotations` times within the original context."""
    original = rope.original_max_position_embeddings
    assert original is not None
    return (dim * math.log(original / (num_rotations * 2 * math.pi))) / (2 * math.log(rope.theta))


def _attention_factor(rope: RopeSpec) -> float:
    """What YaRN multiplies cosines and sines with."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
