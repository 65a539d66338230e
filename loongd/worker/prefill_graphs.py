"""Small prefill steps on a GPU: each bucket of new tokens is captured once and then replayed.

Knows: the kernels of such a step, which read everything that differs between steps from memory.
Does not know: plans, how a plan becomes numbers, other instances.

The eager way launches some 400 kernels from Python: 25 ms and more for an 8B model, of which the
device needs 5 to 15. Keys and values are stored first, and then all attention is over the pool;
but a prompt that is alone and long enough for a library has its attention there, over its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongd.kernels.attention import AttentionBackend, Spans
from loongd.kernels.dispatch import pick
from loongd.kernels.gpu.plan import Tiling, extend_tiling
from loongd.model.llama import Attention, Llama
from loongd.model.spec import ModelSpec
from loongd.worker.captured import Captured, Recent, capture, graph_pool, storing
from loongd.worker.kvcache import KvCache
from loongd.worker.prefill_layout import BUCKETS, PrefillNumbers, PrefillShape
from loongd.worker.slot_table import SlotTable

_LEAST_TILED_ROWS = 64
"""Smaller tiles save nothing, and each size is compiled anew."""


@dataclass(frozen=True, slots=True)
class PrefillParts:
    """What graphs are made of."""

    model: Llama
    spec: ModelSpec
    kv: KvCache
    table: SlotTable
    backend: AttentionBackend

    def tiling(self, bucket: int, *, has_slots: bool = True) -> Tiling:
        """How attention over the pool, or over packed keys, is cut in steps of this bucket."""
        rows = max(bucket * self.group, _LEAST_TILED_ROWS)
        dtype, head_dim = self.kv.k_LSKH.dtype, self.spec.head_dim
        return extend_tiling(self.kv.device, dtype, head_dim, rows, has_slots=has_slots)

    def shape(
        self, bucket: int, *, has_slots: bool = True, is_square: bool = False
    ) -> PrefillShape:
        """The same, as a step's numbers need it."""
        tiling = self.tiling(bucket, has_slots=has_slots)
        return PrefillShape(bucket, self.group, tiling.block_m, tiling.block_k, is_square)

    def has_square(self, bucket: int) -> bool:
        """Whether a library attends to a lone prompt of this bucket."""
        planned = self.backend.planned
        return planned is not None and planned.is_one_call(bucket)

    @property
    def group(self) -> int:
        """Query heads that share keys."""
        return self.spec.num_heads // self.spec.num_kv_heads

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        rows_B: Tensor,
        attention: Attention,
    ) -> Tensor:
        """All layers over tokens at their positions: hidden states (B, D) of the wanted rows. Their
        K and V go to these slots, none to -1. Reads nothing on the host."""
        return self.model.forward(
            tokens_T.long(),
            positions_T,
            None,
            attention,
            rows_B=rows_B.long(),
            store=storing(self.kv, slots_T),
        )


class PrefillStep:
    """The kernels of one bucket over fixed tensors; run as it is, or captured."""

    def __init__(
        self, parts: PrefillParts, shape: PrefillShape, state: tuple[Tensor, Tensor]
    ) -> None:
        """`state`: outputs (`bucket`, N, H) and log-sum-exps of attention, finite; written over.

        Rows of padding are not written, so that what is finite stays so.
        """
        self._parts = parts
        self._tiling = parts.tiling(shape.bucket)
        self._state = state
        self._attend = pick("attend", parts.kv.device)
        self._square = Spans((shape.bucket,), (shape.bucket,), parts.kv.device)
        self.shape = shape
        self.numbers = torch.zeros(sum(shape.sizes), dtype=torch.int32, device=parts.kv.device)
        views = self.numbers.split_with_sizes(shape.sizes)
        self._tokens_T, self._positions_T, self._slots_T, self._entries_T = views[:4]
        self._rows_B, self._begins_B, self._ends_B, tiles, self._tile_ends = views[4:]
        self._tiles = tiles.view(-1, 5)
        self.clear()
        self.hidden_BD: Tensor | None = None

    def clear(self) -> None:
        """Make it the step of no request, which stores nothing."""
        self.numbers.zero_()
        self._slots_T.fill_(-1)
        self._entries_T.fill_(self._parts.table.scratch)

    def run(self) -> None:
        """All layers, into `hidden_BD`: the wanted rows. Reads nothing on the host."""
        parts = self._parts
        parts.table.slots_S.index_copy_(0, self._entries_T.long(), self._slots_T)
        numbers = (self._tokens_T, self._positions_T, self._slots_T, self._rows_B)
        self.hidden_BD = parts.forward(*numbers, self._attention)

    def _attention(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """As `loongd.model.llama.Attention`; the last layer gives the wanted rows alone."""
        parts = self._parts
        scale = parts.spec.head_dim**-0.5
        pool = (parts.kv.k_LSKH[layer], parts.kv.v_LSKH[layer], parts.table.slots_S)
        if layer == parts.spec.num_layers - 1:
            # the last new token of a request sees all of its keys, as in decode
            q_BNH = q_TNH[self._rows_B.long()]
            lse = torch.empty(q_BNH.shape[:2], dtype=torch.float32, device=q_BNH.device)
            place = (q_BNH.new_empty(q_BNH.shape), lse)
            ends = {"k_ends": self._ends_B, "scale": scale, "out": place}
            self._attend.split_kv(q_BNH, *pool, None, self._begins_B, **ends)
            return place[0]
        if self.shape.is_square:
            # the rows of padding are the last: no other row sees them
            return parts.backend.square_causal(q_TNH, k_TKH, v_TKH, self._square)[0]
        self._attend.extend_planned(
            q_TNH,
            *pool,
            self._tiles,
            self._tile_ends,
            scale=scale,
            tiling=self._tiling,
            out=self._state,
        )
        return self._state[0]


class Kernels(Protocol):
    """A step's kernels over fixed tensors: `run` reads `numbers` (int32), fills `hidden_BD`."""

    numbers: Tensor
    hidden_BD: Tensor | None  # noqa: N815 - a shape

    def run(self) -> None:
        """Launch them."""


Shape = TypeVar("Shape")


class StepGraphs(Generic[Shape]):
    """Steps of one kind: each shape is captured when it is first asked for."""

    def __init__(self, make: Callable[[Shape], Kernels], table: SlotTable, pool: Any) -> None:
        """`pool` is memory of other graphs (`graph_pool`); their own by default."""
        self.make = make
        self._table = table
        self._known: Recent[Shape, tuple[Kernels, Captured]] = Recent(table.slots_S.device)
        self._pool: Any = graph_pool(table.slots_S.device) if pool is None else pool

    def launch(self, shape: Shape, numbers: npt.NDArray[np.int32], num_drawn: int) -> Tensor | None:
        """Start a step: hidden states (B, D) after the last layer of the tokens that draw, valid
        until the next one in the stream; None when there is none."""
        self._table.upload()
        kernels, graph = self.graph(shape)
        graph.replay(numbers)
        hidden_BD = kernels.hidden_BD
        return hidden_BD[:num_drawn] if num_drawn and hidden_BD is not None else None

    def graph(self, shape: Shape) -> tuple[Kernels, Captured]:
        """Captured now, or before."""
        return self._known.of(shape, self._capture)

    def _capture(self, shape: Shape) -> tuple[Kernels, Captured]:
        kernels = self.make(shape)
        return kernels, capture(kernels.run, kernels.numbers, self._pool)


class PrefillGraphs:
    """All graphs of a worker's steps alone."""

    def __init__(self, parts: PrefillParts, pool: Any = None) -> None:
        """`pool` is memory of other graphs (`graph_pool`); its own by default."""
        self._parts = parts
        kv, spec = parts.kv, parts.spec
        sizes = (BUCKETS[-1], spec.num_heads)
        self._out_TNH = torch.zeros(*sizes, spec.head_dim, dtype=kv.k_LSKH.dtype, device=kv.device)
        self._lse_TN = torch.zeros(sizes, dtype=torch.float32, device=kv.device)
        self._graphs = StepGraphs(self._step, parts.table, pool)

    def shape_of(self, bucket: int, *, is_lone: bool) -> PrefillShape:
        """The shape of steps of this bucket, of one prompt without older tokens if `is_lone`."""
        return self._parts.shape(bucket, is_square=is_lone and self._parts.has_square(bucket))

    def capture(self) -> Iterator[float]:
        """Capture all buckets; yields the fraction done. The largest first: others fit into what
        it has taken."""
        both = ((bucket, is_lone) for bucket in reversed(BUCKETS) for is_lone in (False, True))
        shapes = list(dict.fromkeys(self.shape_of(bucket, is_lone=lone) for bucket, lone in both))
        for number, shape in enumerate(shapes):
            self._step(shape).run()  # compiles and plans what has to be
            torch.cuda.synchronize(self._parts.kv.device)
            self._graphs.graph(shape)
            yield (number + 1) / len(shapes)

    def launch(self, step: PrefillNumbers) -> Tensor | None:
        """Start a step; as `StepGraphs.launch`."""
        return self._graphs.launch(step.shape, step.numbers, len(step.sampled))

    def _step(self, shape: PrefillShape) -> PrefillStep:
        state = self._out_TNH[: shape.bucket], self._lse_TN[: shape.bucket]
        return PrefillStep(self._parts, shape, state)
