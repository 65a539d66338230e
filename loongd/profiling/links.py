"""How fast KV moves between instances: every pair, both ways.

Knows: which moves are timed and what their times say of each pair and of all. Does not know: what
moving KV is good for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from itertools import combinations

import msgspec

from loongd.profiling.bench import Bench
from loongd.profiling.grid import typical
from loongd.sched.sib_fit import MigratePoint, fit_migrate
from loongd.sched.sib_profile import LinkFit, MigrateFit

_ROUNDS = 4
_PARTS = (128, 32, 8, 4, 2, 1)
"""Moves are the largest one divided by these."""
_LEAST_TOKENS = 16
_LONG_S = 0.5
"""A larger move is not timed when one has taken so long."""


@dataclass(frozen=True, slots=True)
class Links:
    """Moves timed so far, by pair."""

    bench: Bench
    points: dict[tuple[int, int], list[MigratePoint]]

    async def measure(self, most_tokens: int) -> AsyncGenerator[float, None]:
        """Time moves of up to `most_tokens` between all pairs; yields the share done. Raises
        WorkerError."""
        instances = self.bench.instances
        pairs = list(combinations(instances, 2))
        for number, (source, target) in enumerate(pairs):
            segment = await self.bench.put(source, most_tokens)
            self.points[source, target] = await self._pair(segment, source, target, most_tokens)
            self.bench.tidy()
            yield (number + 1) / len(pairs)

    async def _pair(
        self, segment: int, source: int, target: int, most_tokens: int
    ) -> list[MigratePoint]:
        points: list[MigratePoint] = []
        least = min(_LEAST_TOKENS, max(most_tokens // 2, 1))
        for tokens in sorted({max(least, most_tokens // part) for part in _PARTS}):
            times: list[float] = []
            for _ in range(_ROUNDS):
                for a, b in ((source, target), (target, source)):
                    times.append(await self.bench.migrate(segment, tokens, source=a, target=b))
            points.append(MigratePoint(tokens, typical(times)))
            if len(points) > 1 and points[-1].elapsed_s > _LONG_S:
                break
        return points

    def fit(self, kv_bytes_per_token: int) -> MigrateFit:
        """One line for all pairs, and one for each."""
        together = fit_migrate([point for points in self.points.values() for point in points])
        links = []
        for pair, points in self.points.items():
            alone = fit_migrate(points)
            per_token_s = alone.token_s or together.token_s
            bytes_per_s = kv_bytes_per_token / per_token_s if per_token_s else 0.0
            links.append(
                LinkFit(instances=pair, alpha_s=alone.alpha_s, bytes_per_s=round(bytes_per_s))
            )
        return msgspec.structs.replace(together, links=links)
