"""Which slots of one instance are free: a sorted list of runs.

Knows: slot numbers. Does not know: tensors, segments, requests.
Runs keep a request's slots together where they can, so that attention reads long pieces of its KV
as views instead of copies; correctness never depends on it. A long prompt comes in chunks, each
placed right behind the one before: newcomers leave room there. Short ones stand at the end of the
longest run, long ones at its start if that is the pool's, else in its middle.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loongd.errors import PlanError

LONG = 2048
"""From so many slots on, an allocation is taken for a prompt's first chunk, with more to come."""
GROWTH = 1024
"""Free slots behind a shorter one, for its answer."""
ANYWHERE = -2
"""Stands for the last slot of whoever has none: no slot comes right behind it."""


class SlotAllocator:
    """Free slots 0 .. `total` - 1 as disjoint, non-adjacent runs `[start, end)`."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.num_free = total
        self._starts = np.array([0] if total else [], np.int64)
        self._ends = np.array([total] if total else [], np.int64)

    def allocate(self, count: int, *, after: int | None = None) -> npt.NDArray[np.int64]:
        """`count` slots, if possible one run, if possible right behind slot `after`.

        Raises PlanError when fewer are free (the scheduler counts slots, so this is a bug).
        """
        if count > self.num_free:
            raise PlanError(f"{count} KV slots needed, {self.num_free} of {self.total} free")
        parts: list[npt.NDArray[np.int64]] = []
        missing = count
        if after is not None:
            at = int(self._starts.searchsorted(after + 1))
            if at < len(self._starts) and self._starts[at] == after + 1:
                missing -= self._take(at, after + 1, missing, parts)
        while missing:
            at = self._longest_run()
            missing -= self._take(at, self._place(at, missing), missing, parts)
        self.num_free -= count
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def allocate_each(self, after: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """One slot for each of these, if possible right behind it, else any: decode takes hundreds
        a step. `after` are slots in use, each once, or ANYWHERE.

        Raises PlanError when fewer are free; then none is taken.
        """
        if len(after) > self.num_free:
            raise PlanError(f"{len(after)} KV slots needed, {self.num_free} of {self.total} free")
        if not len(after):
            return after.copy()
        slots = after + 1
        at = self._starts.searchsorted(slots)
        behind = self._starts.take(at, mode="clip") == slots
        missing = len(after) - int(np.count_nonzero(behind))
        # slots in use are different, so that no run is found twice
        self._starts[at[behind] if missing else at] += 1
        some = self._starts < self._ends
        if np.count_nonzero(some) < len(some):
            self._starts, self._ends = self._starts[some], self._ends[some]
        self.num_free -= len(after)
        if missing:
            slots[~behind] = self._take_last(missing)
        return slots

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
        assert (self._starts < self._ends).all()
        assert (self._ends[:-1] < self._starts[1:]).all()
        assert (self._ends - self._starts).sum() == self.num_free
        assert not len(self._ends) or (self._starts[0] >= 0 and self._ends[-1] <= self.total)

    def _longest_run(self) -> int:
        return int((self._ends - self._starts).argmax())

    def _place(self, at: int, count: int) -> int:
        """Where in a run a newcomer stands."""
        start, end = int(self._starts[at]), int(self._ends[at])
        if count < LONG:
            return max(start, end - count - GROWTH)
        return start if start == 0 else max(start, (start + end - count) // 2)

    def _take(self, at: int, start: int, count: int, parts: list[npt.NDArray[np.int64]]) -> int:
        """Up to `count` slots of a run from `start` on; returns how many."""
        first, end = int(self._starts[at]), int(self._ends[at])
        taken = min(count, end - start)
        parts.append(np.arange(start, start + taken, dtype=np.int64))
        left = [(lo, hi) for lo, hi in ((first, start), (start + taken, end)) if lo < hi]
        self._replace(at, at + 1, left)
        return taken

    def _take_last(self, count: int) -> npt.NDArray[np.int64]:
        """`count` slots from the starts of the last runs."""
        parts: list[npt.NDArray[np.int64]] = []
        while count:
            last = len(self._starts) - 1
            count -= self._take(last, int(self._starts[last]), count, parts)
        return np.concatenate(parts)

    def _insert(self, start: int, end: int) -> None:
        at = int(self._starts.searchsorted(start, side="right"))
        first, last = at, at
        if at > 0 and self._ends[at - 1] == start:
            first, start = at - 1, int(self._starts[at - 1])
        if at < len(self._starts) and self._starts[at] == end:
            last, end = at + 1, int(self._ends[at])
        self._replace(first, last, [(start, end)])

    def _replace(self, first: int, last: int, runs: list[tuple[int, int]]) -> None:
        """Put `runs` in the place of those from `first` to before `last`."""
        if len(runs) == last - first:
            for at, (start, end) in enumerate(runs, first):
                self._starts[at], self._ends[at] = start, end
            return
        new = np.array(runs, np.int64).reshape(-1, 2)
        self._starts = np.concatenate((self._starts[:first], new[:, 0], self._starts[last:]))
        self._ends = np.concatenate((self._ends[:first], new[:, 1], self._ends[last:]))
