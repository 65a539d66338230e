"""Which slots of one instance are free: a sorted list of runs.

Knows: slot numbers. Does not know: tensors, segments, requests.
Runs keep a request's slots together where they can, so that attention reads long pieces of its KV
as views instead of copies; correctness never depends on it. A long prompt comes in chunks, each
placed right behind the one before: newcomers leave room there. Short ones stand at the end of the
longest run, long ones at its start if that is the pool's, else in its middle.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
import numpy.typing as npt

from loongd.errors import PlanError

LONG = 2048
"""From so many slots on, an allocation is taken for a prompt's first chunk, with more to come."""
GROWTH = 1024
"""Free slots behind a shorter one, for its answer."""


class SlotAllocator:
    """Free slots 0 .. `total` - 1 as disjoint, non-adjacent runs `[start, end)`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_free = total
        self._starts: list[int] = [0] if total else []
        self._ends: list[int] = [total] if total else []

    def allocate(self, count: int, *, after: int | None = None) -> npt.NDArray[np.int64]:
        """`count` slots, if possible one run, if possible right behind slot `after`.

        Raises PlanError when fewer are free (the scheduler counts slots, so this is a bug).
        """
        if count > self.num_free:
            raise PlanError(f"{count} KV slots needed, {self.num_free} of {self.total} free")
        parts: list[npt.NDArray[np.int64]] = []
        missing = count
        if after is not None:
            at = bisect_left(self._starts, after + 1)
            if at < len(self._starts) and self._starts[at] == after + 1:
                missing -= self._take(at, after + 1, missing, parts)
        while missing:
            at = self._longest_run()
            missing -= self._take(at, self._place(at, missing), missing, parts)
        self.num_free -= count
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def allocate_one(self, *, after: int | None) -> int:
        """One slot, if possible right behind slot `after`, else any: decode takes hundreds a step.

        Raises PlanError when none is free.
        """
        if not self.num_free:
            raise PlanError(f"1 KV slot needed, 0 of {self.total} free")
        at = -1
        if after is not None:
            at = bisect_left(self._starts, after + 1)
            if at == len(self._starts) or self._starts[at] != after + 1:
                at = -1
        slot = self._starts[at]
        self._starts[at] += 1
        if self._starts[at] == self._ends[at]:
            del self._starts[at], self._ends[at]
        self.num_free -= 1
        return slot

    def free(self, slots: npt.NDArray[np.int64]) -> None:
        """Give slots back; each must be in use (asserted by `check` in tests)."""
        if len(slots) == 0:
            return
        ordered = np.sort(slots)
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        for part in np.split(ordered, breaks):
            self._insert(int(part[0]), int(part[-1]) + 1)
        self.num_free += len(slots)

    def check(self) -> None:
        """Assert that runs are sorted, disjoint, not adjacent and sum to `num_free`."""
        assert all(s < e for s, e in zip(self._starts, self._ends, strict=True))
        assert all(e < s for e, s in zip(self._ends, self._starts[1:], strict=False))
        assert sum(self._ends) - sum(self._starts) == self.num_free
        assert not self._ends or (self._starts[0] >= 0 and self._ends[-1] <= self.total)

    def _longest_run(self) -> int:
        lengths = [e - s for s, e in zip(self._starts, self._ends, strict=True)]
        return max(range(len(lengths)), key=lengths.__getitem__)

    def _place(self, at: int, count: int) -> int:
        """Where in a run a newcomer stands."""
        start, end = self._starts[at], self._ends[at]
        if count < LONG:
            return max(start, end - count - GROWTH)
        return start if start == 0 else max(start, (start + end - count) // 2)

    def _take(self, at: int, start: int, count: int, parts: list[npt.NDArray[np.int64]]) -> int:
        """Up to `count` slots of a run from `start` on; returns how many."""
        first, end = self._starts[at], self._ends[at]
        taken = min(count, end - start)
        parts.append(np.arange(start, start + taken, dtype=np.int64))
        left = [(lo, hi) for lo, hi in ((first, start), (start + taken, end)) if lo < hi]
        self._starts[at : at + 1] = [lo for lo, _ in left]
        self._ends[at : at + 1] = [hi for _, hi in left]
        return taken

    def _insert(self, start: int, end: int) -> None:
        at = bisect_right(self._starts, start)
        joins_left = at > 0 and self._ends[at - 1] == start
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends[at]
            del self._starts[at], self._ends[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = start
        else:
            self._starts.insert(at, start)
            self._ends.insert(at, end)
