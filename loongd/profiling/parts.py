"""Which degrees of parallelism are measured, with how many masters, and the time of each.

Knows: how a run's time is shared out, and how far a run has come. Does not know: steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loongd.profiling.grid import Effort


@dataclass(frozen=True, slots=True)
class Part:
    """A degree of parallelism, which has `share` of the time; `first` of it is over then.

    Args:
        budget_s: seconds that its points may take.
        ends_s: when nothing more of it is begun than must be.
        told_s: what all parts are said to take.
    """

    dop: int
    first: float
    share: float
    budget_s: float
    ends_s: float
    told_s: float

    def within(self, word: dict[str, Any]) -> dict[str, Any]:
        """Its progress as that of all parts."""
        fraction = self.first + self.share * word["fraction"]
        return word | {"fraction": fraction, "left_s": self.told_s * (1.0 - fraction)}


def parts_of(dops: Sequence[int], effort: Effort, now: float) -> list[Part]:
    """One part for each degree: as large as it has kinds of steps."""
    kinds = [1 + len(masters_of(dop)) for dop in dops]
    shares = [count / sum(kinds) for count in kinds]
    parts = []
    for number, (dop, share) in enumerate(zip(dops, shares, strict=True)):
        first = sum(shares[:number])
        ends_s = now + effort.limit_s * (first + share)
        parts.append(Part(dop, first, share, effort.total_s * share, ends_s, effort.told_s))
    return parts


def dops_of(num_instances: int) -> list[int]:
    """All degrees up to four, then powers of two and the largest."""
    wanted = {*range(1, 5), *(1 << i for i in range(3, 10)), num_instances}
    return sorted(dop for dop in wanted if dop <= num_instances)


def masters_of(dop: int) -> list[int]:
    """How many masters decode steps of a group are measured with."""
    return sorted({1, dop})
