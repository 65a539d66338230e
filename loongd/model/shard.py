"""What one tensor-parallel rank of an instance holds of a model.

Knows: which dimension of which tensor is cut, by Hugging Face name, and what numbers must divide.
Does not know: torch, files. The daemon imports this file to refuse a size before it starts workers.

Query, key, value, gate and up projections are cut by outputs (whole heads), the projections after
them by inputs, so that each block needs one sum over the ranks; the head is cut by vocabulary
when that divides. The embedding and the norms are whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loongd.errors import ModelError
from loongd.model.spec import ModelSpec

_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Cut:
    """Indices `start` .. `stop - 1` of dimension `dim`."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of the `size` workers of an instance."""

    rank: int = 0
    size: int = 1

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """The model as this rank computes it: its share of heads and of the MLP's columns.

        `vocab_size` and `hidden_size` stay whole. Raises ModelError when a number does not divide.
        """
        parts = {
            "num_attention_heads": spec.num_heads,
            "num_key_value_heads": spec.num_kv_heads,
            "intermediate_size": spec.intermediate_size,
        }
        for name, value in parts.items():
            if value % self.size:
                raise ModelError(
                    f"tensor_parallel_size = {self.size} does not divide {name} = {value}; "
                    f"sizes that work: {', '.join(map(str, possible_sizes(spec)))}"
                )
        return replace(
            spec,
            num_heads=spec.num_heads // self.size,
            num_kv_heads=spec.num_kv_heads // self.size,
            intermediate_size=spec.intermediate_size // self.size,
        )

    def cuts_vocabulary(self, spec: ModelSpec) -> bool:
        """Whether each rank has a slice of the head; else each has all of it."""
        return self.size > 1 and spec.vocab_size % self.size == 0

    def cut(self, name: str, shape: tuple[int, ...], spec: ModelSpec) -> Cut | None:
        """This rank's part of the tensor `name` of the whole model; None is all of it."""
        module, _, kind = name.rpartition(".")
        layer = module.rpartition(".")[2]
        if layer in _BY_OUTPUTS or (layer == "lm_head" and self.cuts_vocabulary(spec)):
            dim = 0
        elif layer in _BY_INPUTS and kind == "weight":
            dim = 1
        else:
            return None
        if self.size == 1:
            return None
        each = shape[dim] // self.size
        return Cut(dim, self.rank * each, (self.rank + 1) * each)


WHOLE = Shard()
"""The only rank of an instance of one worker."""


def possible_sizes(spec: ModelSpec) -> list[int]:
    """Every tensor-parallel size that the model allows, 1 first."""
    return [
        size
        for size in range(1, spec.num_kv_heads + 1)
        if spec.num_kv_heads % size == 0 and spec.intermediate_size % size == 0
    ]
