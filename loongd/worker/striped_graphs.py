"""The kernels of a small prefill of new prompts on a group, run as they are or captured.

Knows: their order, and how the members' K and V reach each other (`Boxes`).
Does not know: plans, how a plan becomes numbers, when something is captured.

A layer: own K and V leave for all others; own queries over own keys, while they travel; each
other's K and V as they come: what is kept is stored, own queries over the keys, and the results are
merged, own first and then round the ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from loongd.kernels.dispatch import pick
from loongd.kernels.merge import merge_state_
from loongd.kernels.pool import store_kv
from loongd.worker.peers import Boxes, box_bytes, map_buffers
from loongd.worker.prefill_graphs import PrefillParts, StepGraphs
from loongd.worker.striped_layout import ROWS, StripedNumbers, StripedShape, StripedWork, most_rows


class StripedSpace:
    """Memory of all such steps of a worker, which run one after the other."""

    def __init__(self, parts: PrefillParts, boxes: Boxes, num_rows: int) -> None:
        """`num_rows` are the most of a member."""
        spec, kv = parts.spec, parts.kv
        sizes = (num_rows, spec.num_heads)
        self.boxes = boxes
        self.states = [
            (
                torch.zeros(*sizes, spec.head_dim, dtype=torch.float32, device=kv.device),
                torch.zeros(sizes, dtype=torch.float32, device=kv.device),
            )
            for _ in range(2)
        ]
        block = (num_rows, *block_sizes(parts))
        self.block = torch.zeros(block, dtype=kv.k_LSKH.dtype, device=kv.device)


def block_sizes(parts: PrefillParts) -> tuple[int, int, int]:
    """Of a row's K and V: (2, K, H)."""
    return 2, parts.spec.num_kv_heads, parts.spec.head_dim


class StripedStep:
    """The kernels of one shape over fixed tensors."""

    def __init__(self, parts: PrefillParts, shape: StripedShape, space: StripedSpace) -> None:
        self._parts = parts
        self._shape = shape
        self._boxes = space.boxes
        self._peers = tuple(shape.members[source] for source in shape.sources[1:])
        self._attend = pick("attend", parts.kv.device)
        self._tiling = parts.tiling(shape.rows, has_slots=False)
        self._block = space.block[: shape.rows]
        self._own, self._other = (
            (out[: shape.rows], lse[: shape.rows]) for out, lse in space.states
        )
        self.numbers = torch.zeros(sum(shape.sizes), dtype=torch.int32, device=parts.kv.device)
        views = self.numbers.split_with_sizes(shape.sizes)
        dop = len(shape.members)
        self._tokens_T, self._positions_T = views[:2]
        self._slots = views[2 : 2 + dop]
        self._rows_B = views[2 + dop]
        tables = views[3 + dop :]
        self._tables = [(tables[2 * at].view(-1, 5), tables[2 * at + 1]) for at in range(dop)]
        for slots in self._slots:
            slots.fill_(-1)
        self.hidden_BD: Tensor | None = None

    def run(self) -> None:
        """All layers, into `hidden_BD`: the wanted rows. Reads nothing on the host."""
        numbers = (self._tokens_T, self._positions_T, self._slots[0], self._rows_B)
        self.hidden_BD = self._parts.forward(*numbers, self._attention)
        self._await_taken()

    def _attention(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """As `loongd.model.llama.Attention`; the last layer gives the wanted rows alone."""
        kv = self._parts.kv
        if layer:
            self._await_taken()
        torch.stack((k_TKH, v_TKH), dim=1, out=self._block)
        for peer in self._peers:
            self._boxes.send(peer, self._block)
        self._over(0, q_TNH, k_TKH, v_TKH, self._own)
        for number, peer in enumerate(self._peers, 1):
            message = self._boxes.await_message(peer, self._block.numel())
            k_peer, v_peer = message.view(self._block.shape).unbind(1)
            store_kv(k_peer, v_peer, self._slots[number], kv.k_LSKH[layer], kv.v_LSKH[layer])
            self._over(number, q_TNH, k_peer, v_peer, self._other)
            self._boxes.take(peer)
            merge_state_(*self._own, *self._other)
        out_TNH = self._own[0]
        last = layer == self._parts.spec.num_layers - 1
        return out_TNH[self._rows_B.long()] if last else out_TNH

    def _over(
        self, source: int, q_TNH: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, Tensor]
    ) -> None:
        """All own queries over one member's keys."""
        self._attend.extend_planned(
            q_TNH,
            k,
            v,
            None,
            *self._tables[source],
            scale=self._parts.spec.head_dim**-0.5,
            tiling=self._tiling,
            out=state,
        )

    def _await_taken(self) -> None:
        for peer in self._peers:
            self._boxes.await_taken(peer)


class StripedGraphs:
    """All graphs of a worker's prefills with others."""

    def __init__(
        self, parts: PrefillParts, space: StripedSpace, rank: int, pool: Any = None
    ) -> None:
        """`pool` is memory of other graphs (`graph_pool`); its own by default."""
        self._parts = parts
        self._space = space
        self._rank = rank
        self._graphs = StepGraphs(self._step, parts.table, pool)

    @classmethod
    def map(
        cls, parts: PrefillParts, rank: int, world_size: int, pool: Any = None
    ) -> StripedGraphs | None:
        """Maps the peers' memory: collective over all workers, each of them a whole instance.

        None in a world of one, and where GPUs cannot map each other's memory.
        """
        if world_size == 1:
            return None
        num_rows, dtype = most_rows(2), parts.kv.k_LSKH.dtype
        length = num_rows * prod(block_sizes(parts))
        mapped = map_buffers(box_bytes(world_size, length, dtype), parts.kv.device)
        if mapped is None:
            return None
        boxes = Boxes(mapped.buffers, rank, length=length, dtype=dtype, owner=mapped)
        return cls(parts, StripedSpace(parts, boxes, num_rows), rank, pool)

    def shape_of(self, work: StripedWork) -> StripedShape:
        """The step's shape on this member."""
        return self._shape(work.rows, work.members)

    def capture(self) -> Iterator[float]:
        """Run kernels of all kinds once, which compiles what has to be; yields the fraction done.
        Steps are captured when they are first needed."""
        rows = (ROWS[-1], ROWS[0])
        for number, count in enumerate(rows):
            # this worker is its own peer
            self._step(self._shape(count, (self._rank, self._rank))).run()
            torch.cuda.synchronize(self._parts.kv.device)
            yield (number + 1) / len(rows)

    def launch(self, step: StripedNumbers) -> Tensor | None:
        """Start a step; as `StepGraphs.launch`."""
        return self._graphs.launch(step.shape, step.numbers, len(step.sampled))

    def _shape(self, rows: int, members: tuple[int, ...]) -> StripedShape:
        return StripedShape(self._rank, members, self._parts.shape(rows, has_slots=False))

    def _step(self, shape: StripedShape) -> StripedStep:
        return StripedStep(self._parts, shape, self._space)
