"""Which slots each decoding request has here, as one list in the device's memory.

Knows: regions. A request has one region of the table, a little longer than its KV, so that a new
token's slot is written behind the others by the step itself and nothing else has to move.
Does not know: steps, K and V, why a request grows.

A region is written anew when what it says cannot be right any more: KV that has moved, a step that
ran another way, no room left. The table has room for everything twice; when its end is reached,
all regions are dropped and come back as they are asked for.

The requests of the last decode step are kept as columns of numbers. While the very same ones decode
again and nothing else happens to the pool, their regions are not looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loongd.wire import Extend
from loongd.worker.kvcache import KvCache
from loongd.worker.slots import ANYWHERE

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
    last: int
    """The last slot, or `slots.ANYWHERE`."""


@dataclass(slots=True)
class _Decoding:
    """Requests that decode together; columns (int64) have a row for each.

    While they are here, their regions' own `length` and `tail` are out of date.
    """

    extends: Sequence[Extend]
    regions: list[_Region]
    segments: list[int]
    begins: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    room: int
    """Steps until the first region is full."""
    tails: npt.NDArray[np.int64]
    """Tokens of the newest segment that are here."""
    last: npt.NDArray[np.int64]
    """Last slots."""


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
        self._decoding: _Decoding | None = None
        self._older: tuple[Sequence[Extend], npt.NDArray[np.int64]] | None = None
        self._changes = 0
        """The pool's, as of when the two were right."""

    def begin_step(self, num_requests: int, new_tokens: int = 0) -> None:
        """Make sure that the step's requests have room, come what may.

        `new_tokens` are those that `grow_by` will be asked for.
        """
        used = self._kv.total - self._kv.num_free + new_tokens
        needed = _room(used) + 2 * _LEAST_ROOM * num_requests
        if self._end + needed > self._most:
            self._regions.clear()
            self._decoding = self._older = None
            self._end = 0

    def older(self, extends: Sequence[Extend]) -> npt.NDArray[np.int64]:
        """(2, requests): first and end of each request's older slots in the table; nothing may be
        added yet. The same object is taken for the same requests, as in `grow`."""
        if self._older is not None and self._older[0] is extends and self._is_unchanged():
            return self._older[1]
        self._settle()
        regions = [self._find(extend) for extend in extends]
        held = np.array([(r.begin, r.begin + r.length) for r in regions], np.int64).reshape(-1, 2).T
        self._older = extends, held
        self._changes = self._kv.changes
        return held

    def grow(
        self, extends: Sequence[Extend], positions: Sequence[int]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(slots, first, end) of requests with one new token each, whose slots are taken.

        The step must write each slot as the last entry. The same `extends` object means the same
        requests and segments as in the step before, whatever else its members say: `positions`
        are those of the new tokens. Raises PlanError when too few are free; then none is taken.
        """
        rows = self._decoding
        if rows is None or rows.extends is not extends or not rows.room or not self._is_unchanged():
            if not self._is_unchanged():
                self._older = None
            self._settle()
            rows = self._gather(extends)
        slots = self._kv.extend_each(rows.segments, positions, rows.last)
        rows.lengths += 1
        rows.tails += 1
        rows.room -= 1
        rows.last = slots
        self._decoding = rows
        self._changes = self._kv.changes
        return slots, rows.begins, rows.begins + rows.lengths

    def grow_by(self, extend: Extend, count: int) -> tuple[npt.NDArray[np.int64], int, int]:
        """(slots, first, end) of a request with `count` new tokens, whose slots are taken.

        The step must write the slots as the last entries. Raises PlanError when too few are free.
        """
        self._settle()
        region = self._find(extend, count)
        if region.length + count > region.capacity:
            region = self._write(extend, count)
        positions = extend.start + np.arange(count, dtype=np.int64)
        slots = self._kv.extend(extend.segment, positions, after=extend.cached)
        region.length += count
        region.tail = (extend.segment, self._kv.length_of(extend.segment))
        region.last = int(slots[-1]) if count else region.last
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

    def _is_unchanged(self) -> bool:
        return self._changes == self._kv.changes

    def _gather(self, extends: Sequence[Extend]) -> _Decoding:
        """The requests' regions, each with room for one more, as columns."""
        regions = [self._find(extend) for extend in extends]
        for row, (extend, region) in enumerate(zip(extends, regions, strict=True)):
            if region.length == region.capacity:
                regions[row] = self._write(extend)
        segments = [extend.segment for extend in extends]
        return _Decoding(
            extends,
            regions,
            segments,
            begins=np.array([region.begin for region in regions], np.int64),
            lengths=np.array([region.length for region in regions], np.int64),
            room=min((region.capacity - region.length for region in regions), default=0),
            tails=np.array([self._kv.length_of(segment) for segment in segments], np.int64),
            last=np.array([region.last for region in regions], np.int64),
        )

    def _settle(self) -> None:
        """Bring the regions of the last decode step up to date."""
        rows, self._decoding = self._decoding, None
        if rows is None:
            return
        numbers = np.stack((rows.lengths, rows.tails, rows.last), axis=1).tolist()
        columns = zip(rows.regions, rows.segments, numbers, strict=True)
        for region, segment, (length, tokens, last) in columns:
            region.length, region.tail, region.last = length, (segment, tokens), last

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
            last=int(slots[-1]) if len(slots) else ANYWHERE,
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
