"""Rotary position embedding as a value: its type, its parameters, the context it allows.

Knows: both spellings, `rope_theta` with `rope_scaling` and transformers-5 `rope_parameters`, and
which values contradict each other (a wrong original length serves garbage without an error).
Does not know: torch; `model.rope` computes angles from this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from loongd.errors import ModelError

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]

_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_SCALED_KEYS = _COMMON_KEYS | {"factor", "original_max_position_embeddings"}
_ALLOWED_KEYS: dict[str, frozenset[str]] = {
    "default": _COMMON_KEYS,
    "linear": _SCALED_KEYS,
    "dynamic": _SCALED_KEYS,
    "llama3": _SCALED_KEYS | {"low_freq_factor", "high_freq_factor"},
    # `finetuned` is a note in the first YaRN checkpoints; it changes no arithmetic
    "yarn": _SCALED_KEYS
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"finetuned"},
}
_REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor",),
}

_Positive = Annotated[float, Meta(gt=0)]
_Factor = Annotated[float, Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. `factor` is 1 for `default`; the two frequency factors belong to
    `llama3`, everything below them to `yarn`; `original_max_position_embeddings` to both."""

    theta: float = 10000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def max_context_tokens(self, max_position_embeddings: int) -> int:
        """Most positions of a request for a model that states `max_position_embeddings`."""
        if self.type in ("default", "llama3"):
            return max_position_embeddings
        original = self.original_max_position_embeddings or max_position_embeddings
        return round(original * self.factor)


class _Raw(msgspec.Struct, frozen=True):
    """`rope_scaling` or `rope_parameters` as written in the file."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Positive | None = None
    partial_rotary_factor: float | None = None
    factor: _Factor | None = None
    original_max_position_embeddings: Annotated[int, Meta(ge=1)] | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    attention_factor: _Positive | None = None
    beta_fast: _Positive | None = None
    beta_slow: _Positive | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def parse_rope(
    rope_scaling: dict[str, Any] | None,
    rope_parameters: dict[str, Any] | None,
    *,
    theta: float | None,
    original: int | None,
    max_positions: int,
) -> RopeSpec:
    """One RopeSpec from either spelling.

    Args:
        rope_scaling: old spelling, beside a `theta` of its own.
        rope_parameters: new spelling, theta inside.
        theta: `rope_theta` at the top level.
        original: `original_max_position_embeddings` at the top level.
        max_positions: `max_position_embeddings`.

    Raises:
        ModelError: an unknown type or key, a missing key, or values that contradict each other.
    """
    if rope_scaling and rope_parameters and rope_scaling != rope_parameters:
        raise ModelError("rope_scaling and rope_parameters are both set and differ")
    name = "rope_parameters" if rope_parameters else "rope_scaling"
    values = rope_parameters or rope_scaling or {}
    try:
        raw = msgspec.convert(values, _Raw)
    except msgspec.ValidationError as error:
        raise ModelError(f"{name}: {error}") from None
    kind = _type(raw, name)
    _check_keys(values, kind, name)
    if raw.partial_rotary_factor not in (None, 1.0):
        raise ModelError(
            f"{name}.partial_rotary_factor = {raw.partial_rotary_factor} is not supported"
        )
    if theta and raw.rope_theta and theta != raw.rope_theta:
        raise ModelError(f"rope_theta = {theta} contradicts {name}.rope_theta = {raw.rope_theta}")
    factor = 1.0 if kind == "default" else raw.factor or 1.0
    return RopeSpec(
        theta=raw.rope_theta or theta or 10000.0,
        type=kind,
        factor=factor,
        original_max_position_embeddings=_original(raw, kind, original, max_positions),
        low_freq_factor=raw.low_freq_factor or 1.0,
        high_freq_factor=raw.high_freq_factor or 4.0,
        attention_factor=raw.attention_factor,
        beta_fast=raw.beta_fast or 32.0,
        beta_slow=raw.beta_slow or 1.0,
        mscale=raw.mscale,
        mscale_all_dim=raw.mscale_all_dim,
        truncate=raw.truncate,
    )


def _type(raw: _Raw, name: str) -> RopeType:
    if raw.rope_type and raw.type and raw.rope_type != raw.type:
        raise ModelError(f"{name}.rope_type = {raw.rope_type!r} contradicts type = {raw.type!r}")
    kind = raw.rope_type or raw.type or "default"
    if kind not in _ALLOWED_KEYS:
        raise ModelError(
            f"{name}.rope_type = {kind!r} is not supported; supported: {', '.join(_ALLOWED_KEYS)}"
        )
    return cast("RopeType", kind)


def _check_keys(values: dict[str, Any], kind: RopeType, name: str) -> None:
    # a null is the same as an absent key
    present = {key for key, value in values.items() if value is not None}
    unknown = sorted(present - _ALLOWED_KEYS[kind])
    if unknown:
        raise ModelError(
            f"{name}.{unknown[0]} = {values[unknown[0]]!r} is not supported for type {kind!r}"
        )
    missing = [key for key in _REQUIRED_KEYS[kind] if key not in present]
    if missing:
        raise ModelError(f"{name}.{missing[0]} is missing; type {kind!r} needs it")


def _original(raw: _Raw, kind: RopeType, top_level: int | None, max_positions: int) -> int | None:
    """The original context length, refused when it contradicts the other lengths."""
    key = "original_max_position_embeddings"
    inner = raw.original_max_position_embeddings
    if top_level and inner and top_level != inner:
        raise ModelError(f"{key} = {top_level} contradicts the one with the rope type, {inner}")
    original = inner or top_level
    if kind == "default" or original is None:
        return max_positions if kind == "yarn" else None
    if kind in ("linear", "dynamic"):
        if original != max_positions:
            raise ModelError(
                f"{key} = {original} contradicts max_position_embeddings = {max_positions}: "
                f"type {kind!r} extends the latter by factor {raw.factor}"
            )
        return None
    extended = round(original * (raw.factor or 1.0))
    if original > max_positions or (kind == "yarn" and extended < max_positions):
        raise ModelError(
            f"{key} = {original} with factor {raw.factor} (together {extended}) contradicts "
            f"max_position_embeddings = {max_positions}"
        )
    return original
