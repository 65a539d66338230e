"""Which slots each decoding request has here, as one list in the device's memory.

Knows: regions. A request has one region of the table, a little longer than its KV, so that a new
token's slot is written behind the others by the step itself and nothing else has to move.
Does not know: steps, K and V, why a request grows.

A region is written anew when what it says cannot be right any more: KV that has moved, a step that
ran another way, no room left. The table has room for everything twice; when its end is reached,
all regions are dropped and come back as they are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loongd.wire import Extend
from loongd.worker.kvcache import KvCache

_LEAST_ROOM = 64
_ROOM_SHARE = 8
"""A region has room for an eighth more tokens than it holds, and for 64."""
_MAX_REQUESTS = 4096
"""Requests of one step for which the table surely has room."""


@dataclass(slots=True)
class _Region:
    begin: int
    capacity: int
    length: int
    rewrites: int
    tail: tuple[int, int]
    """(last segment, its tokens here) as of the last look."""


class SlotTable:
    """`slots_S`, int32 on the device, and the account of its regions.

    `scratch` is an entry that belongs to nobody.
    """

    def __init__(self, kv: KvCache) -> None:
        self._kv = kv
        self._most = 2 * _room(kv.total) + _LEAST_ROOM * _MAX_REQUESTS
        self.slots_S = torch.zeros(self._most + 1, dtype=torch.int32, device=kv.device)
        self.scratch = self._most
        self._end = 0
        self._regions: dict[int, _Region] = {}
        self._writes: list[tuple[int, npt.NDArray[np.int64]]] = []

    def begin_step(self, num_requests: int, new_tokens: int = 0) -> None:
        """Make sure that the step's requests have room, come what may.

        `new_tokens` are those that `grow_by` will be asked for.
        """
        used = self._kv.total - self._kv.num_free + new_tokens
        needed = _room(used) + 2 * _LEAST_ROOM * num_requests
        if self._end + needed > self._most:
            self._regions.clear()
            self._end = 0

    def older(self, extend: Extend) -> tuple[int, int]:
        """(first, end) of the request's older slots in the table; nothing may be added yet."""
        region = self._find(extend)
        return region.begin, region.begin + region.length

    def grow(self, extend: Extend) -> tuple[int, int, int]:
        """(slot, first, end) of a request with one new token, whose slot is taken.

        The step must write the slot as the last entry. Raises PlanError when no slot is free.
        """
        region = self._find(extend)
        if region.length == region.capacity:
            region = self._write(extend)
        slot = self._kv.extend_one(extend.segment, extend.start, after=extend.cached)
        region.length += 1
        region.tail = (extend.segment, self._kv.length_of(extend.segment))
        return slot, region.begin, region.begin + region.length

    def grow_by(self, extend: Extend, count: int) -> tuple[npt.NDArray[np.int64], int, int]:
        """(slots, first, end) of a request with `count` new tokens, whose slots are taken.

        The step must write the slots as the last entries. Raises PlanError when too few are free.
        """
        region = self._find(extend, count)
        if region.length + count > region.capacity:
            region = self._write(extend, count)
        positions = extend.start + np.arange(count, dtype=np.int64)
        slots = self._kv.extend(extend.segment, positions, after=extend.cached)
        region.length += count
        region.tail = (extend.segment, self._kv.length_of(extend.segment))
        return slots, region.begin, region.begin + region.length

    def forget(self, segments: list[int]) -> None:
        """Drop the regions of requests whose segments are freed."""
        for segment in segments:
            self._regions.pop(segment, None)

    def upload(self) -> None:
        """Bring regions that were written anew to the device, in the order of its stream."""
        for begin, slots in self._writes:
            part = torch.from_numpy(slots.astype(np.int32))
            self.slots_S[begin : begin + len(slots)].copy_(part)
        self._writes.clear()

    def _find(self, extend: Extend, more: int = 0) -> _Region:
        region = self._regions.get(_anchor(extend))
        if region is None or region.rewrites != self._kv.rewrites:
            return self._write(extend, more)
        segment, tokens = region.tail
        last = extend.cached[-1] if extend.cached else extend.segment
        if segment != last or self._kv.length_of(segment) != tokens:
            return self._write(extend, more)
        return region

    def _write(self, extend: Extend, more: int = 0) -> _Region:
        """A region with what the pool has, and room for `more` tokens and then some."""
        slots = self._kv.slots_of(extend.cached)
        last = extend.cached[-1] if extend.cached else extend.segment
        region = _Region(
            begin=self._end,
            capacity=_room(len(slots) + more),
            length=len(slots),
            rewrites=self._kv.rewrites,
            tail=(last, self._kv.length_of(last)),
        )
        self._end += region.capacity
        self._regions[_anchor(extend)] = region
        if len(slots):
            self._writes.append((region.begin, slots))
        return region


def _room(num_tokens: int) -> int:
    return num_tokens + num_tokens // _ROOM_SHARE + _LEAST_ROOM


def _anchor(extend: Extend) -> int:
    """A request's first segment: no other request has it, and it does not change."""
    return extend.cached[0] if extend.cached else extend.segment
