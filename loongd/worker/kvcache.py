"""The KV pool of one instance: K and V by layer and slot, and which slots a segment has.

Knows: segments (ids chosen by the scheduler) as arrays of local slots and token positions.
Does not know: requests, groups, what other instances hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongd.worker.slots import SlotAllocator


@dataclass(slots=True)
class _Segment:
    """Local part of one segment; arrays grow by doubling, the first `length` entries count."""

    slots: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    length: int

    def append(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
        end = self.length + len(slots)
        self._make_room(end)
        self.slots[self.length : end] = slots
        self.positions[self.length : end] = positions
        self.length = end

    def append_one(self, slot: int, position: int) -> None:
        end = self.length
        if end == len(self.slots):
            self._make_room(end + 1)
        self.slots[end] = slot
        self.positions[end] = position
        self.length = end + 1

    def _make_room(self, end: int) -> None:
        if end > len(self.slots):
            room = max(end, 2 * len(self.slots), 16) - self.length
            self.slots = np.concatenate((self.slots[: self.length], np.empty(room, np.int64)))
            self.positions = np.concatenate(
                (self.positions[: self.length], np.empty(room, np.int64))
            )


class KvCache:
    """`k_LSKH` and `v_LSKH` plus the account of their slots."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self.k_LSKH = torch.empty(shape, dtype=dtype, device=device)
        self.v_LSKH = torch.empty(shape, dtype=dtype, device=device)
        self._free = SlotAllocator(num_slots)
        self._segments: dict[int, _Segment] = {}
        self.rewrites = 0
        """Grows whenever a segment changes other than by growth at its end, or by its end."""
        self.changes = 0
        """Grows whenever any segment changes."""

    @property
    def total(self) -> int:
        return self._free.total

    @property
    def num_free(self) -> int:
        return self._free.num_free

    @property
    def num_used(self) -> int:
        return sum(segment.length for segment in self._segments.values())

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    def extend(
        self, segment: int, positions: npt.NDArray[np.int64], *, after: Sequence[int] = ()
    ) -> npt.NDArray[np.int64]:
        """Slots for new tokens of a segment (created when unknown), in the order of `positions`.

        `after` names the request's older segments: the new slots go behind their last one if
        that place is free. Raises PlanError when the pool has too few free slots.
        """
        last = self._last_slot((*after, segment))
        slots = self._free.allocate(len(positions), after=last)
        known = self._segments.get(segment)
        if known is None:
            self._segments[segment] = _Segment(slots.copy(), positions.copy(), len(slots))
        else:
            known.append(slots, positions)
        self.changes += 1
        return slots

    def adopt(self, segment: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Slots for tokens that come from another pool, into any of a request's segments.

        Raises PlanError when the pool has too few free slots.
        """
        self.rewrites += 1
        return self.extend(segment, positions)

    def extend_each(
        self, segments: Sequence[int], positions: Sequence[int], last: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """The slot of one new token of each of these segments, which are of different requests.

        `last` (int64) are the requests' last slots, or `slots.ANYWHERE`: the new ones go behind
        them if that place is free. Raises PlanError when too few are free, and takes none.
        """
        slots = self._free.allocate_each(last)
        known = self._segments
        for segment, slot, position in zip(segments, slots.tolist(), positions, strict=True):
            one = known.get(segment)
            if one is None:
                empty = np.empty(0, np.int64)
                one = known[segment] = _Segment(empty, empty, 0)
            one.append_one(slot, position)
        self.changes += 1
        return slots

    def length_of(self, segment: int) -> int:
        """Tokens of a segment that are here."""
        known = self._segments.get(segment)
        return 0 if known is None else known.length

    def truncate(self, segment: int, count: int) -> None:
        """Take back the newest `count` tokens of a segment (a step that failed, KV that moved)."""
        self.rewrites += 1
        self.changes += 1
        known = self._segments[segment]
        keep = known.length - count
        self._free.free(known.slots[keep : known.length])
        known.length = keep
        if keep == 0:
            del self._segments[segment]

    def take_back(self, grown: Sequence[tuple[int, int]]) -> None:
        """Truncate segments by what a step has added to them, (segment, tokens), newest first."""
        for segment, count in reversed(grown):
            self.truncate(segment, count)

    def slots_of(self, segments: Sequence[int]) -> npt.NDArray[np.int64]:
        """All local slots of these segments, oldest first; unknown segments have none here."""
        parts = [
            known.slots[: known.length]
            for known in map(self._segments.get, segments)
            if known is not None
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def positions_of(self, segments: Sequence[int]) -> npt.NDArray[np.int64]:
        """Token positions of `slots_of(segments)`, in the same order."""
        parts = [
            known.positions[: known.length]
            for known in map(self._segments.get, segments)
            if known is not None
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def free(self, segments: Sequence[int]) -> None:
        """Forget segments; ids that hold nothing here are ignored."""
        for segment in segments:
            known = self._segments.pop(segment, None)
            if known is not None:
                self.changes += 1
                self._free.free(known.slots[: known.length])

    def keep(self, segments: Sequence[int]) -> None:
        """Forget all segments but these."""
        self.free([segment for segment in self._segments if segment not in set(segments)])

    @property
    def device(self) -> torch.device:
        return self.k_LSKH.device

    def empty_block(self, num_tokens: int) -> Tensor:
        """Room for `num_tokens` tokens' K and V of all layers: (2, L, T, K, H)."""
        layers, _, num_kv_heads, head_dim = self.k_LSKH.shape
        return self.k_LSKH.new_empty((2, layers, num_tokens, num_kv_heads, head_dim))

    def empty_layer_block(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Room for `num_tokens` tokens' K and V of one layer: (T, K, H) each."""
        shape = (num_tokens, *self.k_LSKH.shape[2:])
        return self.k_LSKH.new_empty(shape), self.v_LSKH.new_empty(shape)

    def read_layer(self, layer: int, slots: slice | Tensor) -> tuple[Tensor, Tensor]:
        """K and V of one layer, (T, K, H) each: of a run of slots in place, of others (int64 on
        the device) copied out."""
        pool = (self.k_LSKH[layer], self.v_LSKH[layer])
        if isinstance(slots, slice):
            return pool[0][slots], pool[1][slots]
        return pool[0].index_select(0, slots), pool[1].index_select(0, slots)

    def read(self, slots: npt.NDArray[np.int64]) -> Tensor:
        """K and V of these slots, copied out: (2, L, T, K, H)."""
        index = torch.from_numpy(slots).to(self.device)
        block = self.empty_block(len(slots))
        torch.index_select(self.k_LSKH, 1, index, out=block[0])
        torch.index_select(self.v_LSKH, 1, index, out=block[1])
        return block

    def write(self, slots: npt.NDArray[np.int64], block: Tensor) -> None:
        """The inverse of `read`."""
        index = torch.from_numpy(slots).to(self.device)
        self.k_LSKH.index_copy_(1, index, block[0])
        self.v_LSKH.index_copy_(1, index, block[1])

    def check(self) -> None:
        """Assert `free + used == total` and that no slot has two owners."""
        self._free.check()
        assert self.num_free + self.num_used == self.total
        slots = self.slots_of(list(self._segments))
        assert len(np.unique(slots)) == len(slots)

    def _last_slot(self, segments: Sequence[int]) -> int | None:
        for segment in reversed(segments):
            known = self._segments.get(segment)
            if known is not None and known.length:
                return int(known.slots[known.length - 1])
        return None
