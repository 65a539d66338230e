"""The profile that serves until a measured one exists: a roofline.

Knows: a model's shape, what some devices can reach, and the arithmetic between them.
Does not know: the real workers; online correction (`sched.sib`) brings the result near them.

Prefill: linear layers 2 FLOP a parameter and token; causal attention 2 * layers * heads *
head_dim FLOP a squared token; both shared by the group. Decode: the larger of reading the weights
and the linear layers' arithmetic, and reading the KV. Each step pays launches, and in a group of
several the exchanges of each layer: one block for each other member in prefill, queries out and
answers back in decode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from loongd.sched.sib_profile import (
    Coefficients,
    DecodeCoefficients,
    DecodeFit,
    MigrateFit,
    PrefillFit,
    Profile,
)

_MAX_TOKENS = 1 << 20
"""A formula has no measured range; this is where anybody should doubt it."""


_LAYERS = re.compile(r"L(\d+)-")


def layers_of(shape: str) -> int:
    """Layers of a model with this shape in words (`ModelFacts.key`); 1 where these are others."""
    found = _LAYERS.match(shape)
    return int(found[1]) if found else 1


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's speed depends on. `element_bytes` is the size of a weight and of a KV
    element; `window` the smallest sliding window, None for none."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    element_bytes: int = 2
    window: int | None = None

    @property
    def key(self) -> str:
        """The shape in one word: profiles of equal shape are interchangeable."""
        window = "" if self.window is None else f"-w{self.window}"
        return (
            f"L{self.num_layers}-D{self.hidden_size}-N{self.num_heads}-K{self.num_kv_heads}"
            f"-H{self.head_dim}-F{self.intermediate_size}-V{self.vocab_size}"
            f"-{self.element_bytes}B{window}"
        )

    @property
    def body_parameters(self) -> int:
        """Parameters of all layers, without embedding and output head."""
        attention = 2 * self.num_heads + 2 * self.num_kv_heads
        layer = self.hidden_size * (attention * self.head_dim + 3 * self.intermediate_size)
        return self.num_layers * layer

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token in all layers."""
        heads = self.num_kv_heads * self.head_dim
        return 2 * self.num_layers * heads * self.element_bytes


class Hardware(msgspec.Struct, frozen=True, kw_only=True):
    """What one device reaches, not its peak.

    Args:
        linear_flops: FLOP/s of large matrix products in the serving type.
        attention_flops: FLOP/s of causal attention, the masked half not counted.
        memory_bytes: bytes/s of streaming weights and KV.
        link_bytes: bytes/s to another device, one way.
        exchange_s: latency of one exchange between members.
        layer_s: launches of one layer.
        item_s: what one more request costs a step (its own kernels, sampling).
    """

    linear_flops: float
    attention_flops: float
    memory_bytes: float
    link_bytes: float
    exchange_s: float
    layer_s: float
    item_s: float


_UNKNOWN_GPU = Hardware(
    linear_flops=100e12,
    attention_flops=60e12,
    memory_bytes=0.6e12,
    link_bytes=10e9,
    exchange_s=80e-6,
    layer_s=100e-6,
    item_s=20e-6,
)
_A100 = Hardware(
    linear_flops=250e12,
    attention_flops=175e12,
    memory_bytes=1.6e12,
    link_bytes=200e9,
    exchange_s=60e-6,
    layer_s=80e-6,
    item_s=20e-6,
)
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "H200": Hardware(
            linear_flops=780e12,
            attention_flops=600e12,
            memory_bytes=4.2e12,
            link_bytes=229e9,
            exchange_s=60e-6,
            layer_s=70e-6,
            item_s=20e-6,
        ),
        "H100": Hardware(
            linear_flops=700e12,
            attention_flops=550e12,
            memory_bytes=2.8e12,
            link_bytes=229e9,
            exchange_s=60e-6,
            layer_s=70e-6,
            item_s=20e-6,
        ),
        "A800": msgspec.structs.replace(_A100, link_bytes=150e9),
        "A100": _A100,
        "cpu": Hardware(
            linear_flops=40e9,
            attention_flops=20e9,
            memory_bytes=8e9,
            link_bytes=1e9,
            exchange_s=150e-6,
            layer_s=200e-6,
            item_s=500e-6,
        ),
    }
)
"""By a word of the device's name. GPUs: bf16, by the numbers that this project measured or that
A800 reaches in practice; cpu: one core, float32."""


def hardware_of(device: str, *, num_cores: int = 1) -> Hardware:
    """The constants for a device name; unknown GPUs get cautious ones.

    `num_cores` is what each instance has of a CPU; arithmetic grows with it, memory by its root.
    """
    found = next((known for word, known in HARDWARE.items() if word in device), None)
    if found is None:
        return _UNKNOWN_GPU
    if "cpu" not in device:
        return found
    return msgspec.structs.replace(
        found,
        linear_flops=found.linear_flops * num_cores,
        attention_flops=found.attention_flops * num_cores,
        memory_bytes=found.memory_bytes * num_cores**0.5,
    )


def default_profile(
    facts: ModelFacts,
    device: str,
    *,
    max_dop: int = 8,
    tp: int = 1,
    num_cores: int = 1,
    date: str = "",
) -> Profile:
    """The roofline of a model on a device, for groups of 1 to `max_dop` instances.

    `tp` devices make an instance; each is credited with nine tenths of its part. `num_cores` is
    what each instance has of a CPU.
    """
    hardware = hardware_of(device, num_cores=num_cores)
    if tp > 1:
        share = 0.9 * tp
        hardware = msgspec.structs.replace(
            hardware,
            linear_flops=hardware.linear_flops * share,
            attention_flops=hardware.attention_flops * share,
            memory_bytes=hardware.memory_bytes * share,
            link_bytes=hardware.link_bytes * tp,
            layer_s=hardware.layer_s + 2 * hardware.exchange_s,
        )
    dops = range(1, max_dop + 1)
    return Profile(
        model=facts.name,
        shape=facts.key,
        device=device,
        tp=tp,
        date=date,
        source="derived: roofline from the model's shape and constants of the device",
        measured=False,
        prefill=[_prefill(facts, hardware, dop) for dop in dops],
        decode=[_decode(facts, hardware, dop, m) for dop in dops for m in range(1, dop + 1)],
        migrate=MigrateFit(
            alpha_s=hardware.exchange_s * facts.num_layers,
            token_s=facts.kv_bytes_per_token / hardware.link_bytes,
        ),
        compute_bound_batch=compute_bound_batch(facts, hardware),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        link_bytes_per_s=hardware.link_bytes,
    )


def compute_bound_batch(facts: ModelFacts, hardware: Hardware) -> int:
    """Rows at which the linear layers' arithmetic takes as long as reading their weights."""
    rows = hardware.linear_flops * facts.element_bytes / (2 * hardware.memory_bytes)
    return max(1, round(rows))


def _weights_s(facts: ModelFacts, hardware: Hardware) -> float:
    parameters = facts.body_parameters + facts.head_parameters
    return parameters * facts.element_bytes / hardware.memory_bytes


def _prefill(facts: ModelFacts, hardware: Hardware, dop: int) -> PrefillFit:
    launches = facts.num_layers * (hardware.layer_s + (dop - 1) * hardware.exchange_s)
    attention = 2 * facts.num_layers * facts.num_heads * facts.head_dim
    coefficients = Coefficients(
        alpha_s=launches,
        beta_s=2 * facts.body_parameters / hardware.linear_flops / dop,
        gamma_s=attention / hardware.attention_flops / dop,
        item_s=hardware.item_s + 2 * facts.head_parameters / hardware.linear_flops,
        floor_s=max(launches, _weights_s(facts, hardware)),
    )
    return PrefillFit(
        dop=dop,
        coefficients=coefficients,
        max_tokens=_MAX_TOKENS,
        max_square=_MAX_TOKENS**2,
        max_items=1024,
    )


def _decode(facts: ModelFacts, hardware: Hardware, dop: int, num_masters: int) -> DecodeFit:
    exchanges = 0 if dop == 1 else 2
    parameters = facts.body_parameters + facts.head_parameters
    compute = 2 * parameters / hardware.linear_flops
    weights = _weights_s(facts, hardware)
    coefficients = DecodeCoefficients(
        alpha_s=weights + facts.num_layers * exchanges * hardware.exchange_s,
        request_s=hardware.item_s,
        over_s=compute,
        knee=weights / compute,
        kv_token_s=facts.kv_bytes_per_token / hardware.memory_bytes,
        floor_s=facts.num_layers * hardware.layer_s,
    )
    return DecodeFit(
        dop=dop,
        num_masters=num_masters,
        coefficients=coefficients,
        max_batch=4096,
        max_kv_tokens=64 * _MAX_TOKENS,
    )
