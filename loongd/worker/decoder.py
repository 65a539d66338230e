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
from loongd.model.sampler import Drawing, begin_sample
from loongd.model.spec import ModelSpec
from loongd.wire import RunStep
from loongd.worker.decode_graphs import DecodeGraphs, DecodeParts
from loongd.worker.decode_layout import (
    BUCKETS,
    MAX_EXCHANGED_ROWS,
    DecodeBatch,
    DecodeRows,
    lay_out_rows,
    shape_of,
    what_stays,
)
from loongd.worker.flight import Airborne, Coming, Flight, Landed
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
        self._batch: DecodeBatch | None = None

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

    def batch_of(self, step: RunStep) -> DecodeBatch | None:
        """The step's batch; None when it must run another way, on all of its members."""
        last, same = self._batch, what_stays(step)
        if last is not None and last.goes_on(step, same):
            return last
        shape = shape_of(step, self._rank)
        if shape is None or (shape.exchanges and not self._graphs.has_peers):
            return None
        self._batch = DecodeBatch.of(step, self._rank, shape, same)
        return self._batch

    def has_drawn(self, step_id: int) -> bool:
        """Whether that step's tokens are on the device."""
        return step_id != 0 and step_id == self._step_id

    def forget(self, segments: list[int]) -> None:
        """These segments are freed."""
        self._table.forget(segments)

    def launch(self, step: RunStep, batch: DecodeBatch) -> Flight:
        """Start a step. Raises PlanError when the pool is full; the pool is then as before."""
        if not batch.shape.owns and not batch.shape.answers:
            self._step_id, self._rows = step.step_id, {}
            return Landed([])
        rows = lay_out_rows(step, batch, self._table, drawn_rows=self._rows)
        with ExitStack() as undo:
            undo.callback(self._take_back, batch)
            self._step_id = step.step_id
            self._rows = {request: row for row, request in enumerate(batch.requests)}
            flown = self._graphs.launch(rows, _drawer(rows))
            undo.pop_all()
        if isinstance(flown, Drawing):
            return Airborne(flown, batch.extends)
        return Coming(flown, batch.requests)

    def _take_back(self, batch: DecodeBatch) -> None:
        for extend in batch.extends:
            self._kv.truncate(extend.segment, 1)


def _drawer(rows: DecodeRows) -> Callable[[Tensor], Drawing] | None:
    recipe = rows.batch.recipe
    if recipe is None:
        return None
    positions = [position + 1 for position in rows.positions]
    return lambda logits_BV: begin_sample(logits_BV, recipe, positions)
