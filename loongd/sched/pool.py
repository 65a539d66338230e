"""The unified KV pool, counted: how many slots of each instance each segment uses.

Knows: counts. Does not know: slot numbers (the workers have them) or requests.
Invariant: used + free == total on each instance, and used is the sum over the segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Set


class SlotPool:
    """Slots of all alive instances and the segments that lie in them."""

    def __init__(self) -> None:
        # In ascending order of instances.
        self._total: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._segments: dict[int, dict[int, int]] = {}

    def add_instance(self, instance: int, slots: int) -> None:
        """A new, empty instance."""
        assert instance not in self._total, f"instance {instance} is in the pool already"
        self._total[instance] = slots
        self._total = {i: self._total[i] for i in sorted(self._total)}
        self._used[instance] = 0

    def remove_instance(self, instance: int) -> None:
        """Forget an instance; its segments must have been freed."""
        assert self._used[instance] == 0, f"instance {instance} still holds KV"
        del self._total[instance], self._used[instance]

    def allocate(self, segment: int, instance: int, num_slots: int) -> None:
        """Charge `num_slots` of `instance` to `segment`.

        Raises AssertionError when it has fewer free slots.
        """
        used = self._used[instance] + num_slots
        assert num_slots > 0, num_slots
        assert used <= self._total[instance], f"{num_slots} more slots of instance {instance}"
        counts = self._segments.get(segment)
        if counts is None:
            counts = self._segments[segment] = {}
        counts[instance] = counts.get(instance, 0) + num_slots
        self._used[instance] = used

    def extend(self, charges: Iterable[tuple[int, int]]) -> None:
        """Charge one slot of each (segment, instance).

        Raises AssertionError when an instance has not so many free slots.
        """
        segments, used = self._segments, self._used
        for segment, instance in charges:
            counts = segments.get(segment)
            if counts is None:
                segments[segment] = {instance: 1}
            else:
                counts[instance] = counts.get(instance, 0) + 1
            used[instance] += 1
        full = [i for i, count in used.items() if count > self._total[i]]
        assert not full, f"more slots are used than there are on {full}"

    def free_segment(self, segment: int) -> tuple[int, ...]:
        """Free all slots of a segment; the instances that held any, ascending."""
        counts = self._segments.pop(segment)
        for instance, num_slots in counts.items():
            self._used[instance] -= num_slots
        return tuple(sorted(counts))

    def release(self, segment: int, instance: int, num_slots: int) -> None:
        """Give back `num_slots` of `instance` that `segment` has there."""
        counts = self._segments[segment]
        assert 0 < num_slots <= counts.get(instance, 0), f"segment {segment} has {counts}"
        counts[instance] -= num_slots
        if counts[instance] == 0:
            del counts[instance]
        self._used[instance] -= num_slots

    def lose(self, segment: int, instance: int) -> int:
        """Forget what a segment has on an instance that is gone; the number of its slots."""
        num_slots = self._segments[segment].pop(instance, 0)
        self._used[instance] -= num_slots
        return num_slots

    def counts(self, segment: int) -> dict[int, int]:
        """Slots of a segment by instance (a copy)."""
        return dict(self._segments[segment])

    def holders(self, segment: int) -> Set[int]:
        """Instances with any slot of a segment (a live view)."""
        return self._segments[segment].keys()

    def tokens_on(self, segment: int, instance: int) -> int:
        """Slots of a segment on one instance."""
        return self._segments[segment].get(instance, 0)

    def free_slots(self, instance: int) -> int:
        return self._total[instance] - self._used[instance]

    def used_slots(self, instance: int) -> int:
        return self._used[instance]

    def free_by_instance(self) -> dict[int, int]:
        """Free slots of every instance, in ascending order of instances (a copy)."""
        used = self._used
        return {i: slots - used[i] for i, slots in self._total.items()}

    @property
    def total(self) -> int:
        return sum(self._total.values())

    @property
    def used(self) -> int:
        return sum(self._used.values())

    @property
    def segments(self) -> frozenset[int]:
        """Ids of all live segments."""
        return frozenset(self._segments)

    def check(self) -> None:
        """Raises AssertionError when the counts contradict each other."""
        sums = dict.fromkeys(self._total, 0)
        for segment, counts in self._segments.items():
            for instance, num_slots in counts.items():
                assert num_slots > 0, f"segment {segment} on {instance}: {num_slots}"
                sums[instance] += num_slots
        assert sums == self._used, f"segments use {sums}, counted {self._used}"
        for instance, used in self._used.items():
            assert 0 <= used <= self._total[instance], f"instance {instance} uses {used}"
