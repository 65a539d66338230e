"""What a simulated step takes: the part of a cost model that the engine asks for.

Knows: how many equal decode steps in a row are asked for. Does not know: what a step costs
(`loongd.sched.sib`), noise, overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loongd.sched.plan import DecodePlan


class Costs(Protocol):
    """What the executor asks of a cost model; `loongd.sched.sib.Sib` is one."""

    def prefill_s(self, dop: int, items: Sequence[tuple[int, int]]) -> float:
        """Seconds of a prefill step of `dop` instances; items are (cached, new) tokens."""

    def decode_s(self, *, dop: int, num_masters: int, batch: int, kv_tokens: int) -> float:
        """Seconds of a decode step of `batch` requests with `kv_tokens` of KV together."""

    def decode_run_s(self, batch: int, kv_tokens: int, num_steps: int) -> list[float]:
        """`decode_s` of so many steps in a row on one instance; the first reads `kv_tokens`, each
        later one `batch` more. No step may take less time than the one before it."""

    def migrate_s(self, tokens: int) -> float:
        """Seconds to move the KV of `tokens` tokens between two instances."""


def decode_steps_s(costs: Costs, plan: DecodePlan, kv_tokens: int, num_steps: int) -> list[float]:
    """Seconds of so many steps in a row like `plan`; the first reads `kv_tokens` altogether, each
    later one a token of each request more. Masters may take turns: as many of them have equal
    shares in each step."""
    batch, dop, num_masters = len(plan.items), plan.dop, len(plan.masters)
    if dop == 1:
        return costs.decode_run_s(batch, kv_tokens, num_steps)
    lengths = range(kv_tokens, kv_tokens + batch * num_steps, batch)
    return [
        costs.decode_s(dop=dop, num_masters=num_masters, batch=batch, kv_tokens=n) for n in lengths
    ]
