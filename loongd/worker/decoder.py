"""Decode steps from the plan to the report, where they run as graphs.

Knows: which steps have a graph, how rows, graphs and drawn tokens belong together, and which rows
of the last step drew which request's token.
Does not know: steps of other kinds, sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from loongd.kernels.dispatch import has_triton
from loongd.model.llama import Llama
from loongd.model.sampler import Drawing, begin_sample, is_plain
from loongd.model.spec import ModelSpec
from loongd.wire import Extend, RunStep, Sampling
from loongd.worker.decode_graphs import DecodeGraphs, DecodeParts
from loongd.worker.decode_layout import (
    BUCKETS,
    MAX_EXCHANGED_ROWS,
    DecodeShape,
    lay_out_rows,
    shape_of,
)
from loongd.worker.flight import Airborne, Flight, Landed, report
from loongd.worker.kvcache import KvCache
from loongd.worker.peers import PeerMemory, buffer_bytes, map_buffers
from loongd.worker.slot_table import SlotTable

_CAPTURED = tuple(bucket for bucket in BUCKETS if bucket <= MAX_EXCHANGED_ROWS)
"""Numbers of rows captured at start; more, and exchanges, when they are first needed."""
_MOST_GROUPED_HEADS = 64
"""Most query heads of a kv head that the decode kernel takes."""


def can_capture(spec: ModelSpec, device: torch.device) -> bool:
    """Whether steps of this model can be graphs on this device."""
    windowed = any(spec.window(layer) is not None for layer in range(spec.num_layers))
    small = spec.head_dim <= 256 and spec.head_dim % 8 == 0
    grouped = spec.num_heads // spec.num_kv_heads <= _MOST_GROUPED_HEADS
    # frequencies of dynamic rope are worked out on the host, from lengths
    plain = not windowed and spec.rope.type != "dynamic"
    return device.type == "cuda" and has_triton() and small and grouped and plain


class Decoder:
    """Runs decode steps of one worker that is all of its instance."""

    def __init__(self, graphs: DecodeGraphs, table: SlotTable, kv: KvCache, rank: int) -> None:
        self._graphs = graphs
        self._table = table
        self._kv = kv
        self._rank = rank
        self._step_id = 0
        self._rows: dict[str, int] = {}

    @classmethod
    def build(
        cls,
        model: Llama,
        spec: ModelSpec,
        table: SlotTable,
        kv: KvCache,
        *,
        instance: int,
        world_size: int,
        pool: Any = None,
    ) -> Decoder:
        """Maps the peers' memory: collective over all workers, each of them a whole instance.

        `table` is that of `kv`; `pool` is memory of other graphs, None for none.
        """
        dtype = kv.k_LSKH.dtype
        sizes = (MAX_EXCHANGED_ROWS, spec.num_heads, spec.head_dim)
        peers: PeerMemory | None = None
        if world_size > 1:
            mapped = map_buffers(buffer_bytes(world_size, *sizes, dtype), kv.device)
            if mapped is not None:
                peers = PeerMemory(
                    mapped.buffers,
                    instance,
                    max_rows=MAX_EXCHANGED_ROWS,
                    num_heads=spec.num_heads,
                    head_dim=spec.head_dim,
                    dtype=dtype,
                    owner=mapped,
                )
        parts = DecodeParts(model, kv, table, peers, spec.head_dim**-0.5)
        return cls(DecodeGraphs(parts, pool), table, kv, instance)

    def capture(self) -> Iterator[float]:
        """Capture the most common steps; yields the fraction done."""
        return self._graphs.capture(_CAPTURED, self._rank)

    def shape_of(self, step: RunStep) -> DecodeShape | None:
        """The step's shape; None when it must run another way, on all of its members."""
        shape = shape_of(step, self._rank)
        if shape is None or (shape.exchanges and not self._graphs.has_peers):
            return None
        return shape

    def has_drawn(self, step_id: int) -> bool:
        """Whether that step's tokens are on the device."""
        return step_id != 0 and step_id == self._step_id

    def forget(self, segments: list[int]) -> None:
        """These segments are freed."""
        self._table.forget(segments)

    def launch(self, step: RunStep, shape: DecodeShape) -> Flight:
        """Start a step. Raises PlanError when the pool is full; the pool is then as before."""
        if not shape.owns and not shape.answers:
            self._step_id, self._rows = step.step_id, {}
            return Landed([])
        grown: list[tuple[int, int]] = []
        with ExitStack() as undo:
            undo.callback(self._take_back, grown)
            rows = lay_out_rows(step, self._rank, shape, self._table, grown, drawn_rows=self._rows)
            plain = all(is_plain(extend.sampling) for extend in rows.own)
            self._step_id = step.step_id
            self._rows = {extend.request_id: row for row, extend in enumerate(rows.own)}
            flown = self._graphs.launch(rows, None if plain else _drawer(rows.own))
            undo.pop_all()
        if isinstance(flown, list):
            return Landed(report(rows.own, flown))
        return Airborne(flown, rows.own)

    def _take_back(self, grown: list[tuple[int, int]]) -> None:
        for segment, count in reversed(grown):
            self._kv.truncate(segment, count)


def _drawer(own: tuple[Extend, ...]) -> Callable[[Tensor], Drawing]:
    params = [extend.sampling or Sampling() for extend in own]
    positions = [extend.start + 1 for extend in own]
    return lambda logits_BV: begin_sample(logits_BV, params, positions)
