"""The kernels of a small prefill on a group that deals out its rows, run as they are or captured.

Knows: their order, and how the members' K and V, queries and partial results reach each other
(`Boxes`, `PartialBoxes`).
Does not know: plans, how a plan becomes numbers, when something is captured.

A layer: own K and V leave for all others, with own queries for those that hold older tokens; own
queries over own keys, new and older, while they travel. Then round the ring each other's message as
it comes: what is kept of its K and V is stored, its queries meet own older keys, and the partial
result goes back; own queries meet its keys. Partial results of the others' older keys come last.
All results are merged in this order.

Nobody waits for himself in a circle: a message waits for the layer before, a partial result for a
message of this layer, the next layer's messages for this layer's partial results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from loongd.kernels.dispatch import pick
from loongd.kernels.merge import merge_state_
from loongd.kernels.pool import store_kv
from loongd.worker.group_graphs import GroupSpace
from loongd.worker.peers import Boxes, box_bytes, map_buffers, partial_length
from loongd.worker.prefill_graphs import PrefillParts, StepGraphs
from loongd.worker.striped_layout import (
    MOST_SENT_ROWS,
    ROWS,
    StripedNumbers,
    StripedShape,
    StripedWork,
    message_length,
)

State = tuple[Tensor, Tensor]
"""Output (R, N, H) and log-sum-exp (R, N) of attention, float32."""


class StripedSpace:
    """Memory of all such steps of a worker, which run one after the other."""

    def __init__(self, parts: PrefillParts, boxes: Boxes, group: GroupSpace) -> None:
        """Partial results lie and travel where those of steps do that deal out nothing."""
        assert group.boxes is not None
        spec, kv = parts.spec, parts.kv
        self.boxes = boxes
        self.partials = group.boxes
        self.partial = group.partial
        sizes = (MOST_SENT_ROWS, spec.num_heads)
        self.own: State = group.out_TNH[: sizes[0]], group.lse_TN[: sizes[0]]
        self.other: State = (
            torch.zeros(*sizes, spec.head_dim, dtype=torch.float32, device=kv.device),
            torch.zeros(sizes, dtype=torch.float32, device=kv.device),
        )
        length = message_length(spec, MOST_SENT_ROWS)
        self.message = torch.zeros(length, dtype=kv.k_LSKH.dtype, device=kv.device)


class StripedStep:
    """The kernels of one shape over fixed tensors."""

    def __init__(self, parts: PrefillParts, shape: StripedShape, space: StripedSpace) -> None:
        self._parts = parts
        self._shape = shape
        self._boxes = space.boxes
        self._partials = space.partials
        self._others = [(n, shape.members[s]) for n, s in enumerate(shape.sources) if n]
        self._attend = pick("attend", parts.kv.device)
        rows, spec = shape.rows, parts.spec
        self._own, self._other = ((out[:rows], lse[:rows]) for out, lse in (space.own, space.other))
        self._partial = space.partial[: partial_length(rows, spec.num_heads, spec.head_dim)]
        self._message = space.message[: message_length(spec, rows)]
        self.numbers = torch.zeros(sum(shape.sizes), dtype=torch.int32, device=parts.kv.device)
        views = self.numbers.split_with_sizes(shape.sizes)
        dop = len(shape.members)
        self._tokens_T, self._positions_T = views[:2]
        self._slots = views[2 : 2 + dop]
        self._rows_B = views[2 + dop]
        tables = views[3 + dop :]
        pairs = [(tables[at].view(-1, 5), tables[at + 1]) for at in range(0, len(tables), 2)]
        self._new, self._older = pairs[:dop], pairs[dop:]
        for slots in self._slots:
            slots.fill_(-1)
        self.hidden_BD: Tensor | None = None

    def run(self) -> None:
        """All layers, into `hidden_BD`: the wanted rows. Reads nothing on the host."""
        numbers = (self._tokens_T, self._positions_T, self._slots[0], self._rows_B)
        self.hidden_BD = self._parts.forward(*numbers, self._attention)
        for _, peer in self._others:
            self._boxes.await_taken(peer)
            if self._shape.holds:
                self._partials.await_taken(peer)

    def _attention(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """As `loongd.model.llama.Attention`; the last layer gives the wanted rows alone."""
        shape = self._shape
        self._send(layer, q_TNH, k_TKH, v_TKH)
        self._over_new(0, q_TNH, k_TKH, v_TKH, self._own)
        if shape.holds:
            self._over_older(layer, 0, q_TNH, self._other)
            merge_state_(*self._own, *self._other)
        for number, peer in self._others:
            self._meet(layer, number, peer, q_TNH)
        for _, peer in self._others:
            if peer in shape.holders:
                merge_state_(*self._own, *self._partials.await_partial(peer, shape.rows))
                self._partials.take(peer)
        out_TNH = self._own[0]
        last = layer == self._parts.spec.num_layers - 1
        return out_TNH[self._rows_B.long()] if last else out_TNH

    def _send(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> None:
        """Own K and V to all others, and own queries to those that hold older tokens."""
        block, queries = self._parts_of(self._message)
        torch.stack((k_TKH, v_TKH), dim=1, out=block)
        if any(peer in self._shape.holders for _, peer in self._others):
            queries.copy_(q_TNH)
        for _, peer in self._others:
            if layer:
                self._boxes.await_taken(peer)
            self._boxes.send(peer, self._message[: self._length_to(peer)])

    def _meet(self, layer: int, number: int, peer: int, q_TNH: Tensor) -> None:
        """What another member has sent: all that is to be done with it, its answer first."""
        kv, boxes = self._parts.kv, self._boxes
        message = boxes.await_message(peer, self._length_to(self._shape.rank))
        block, queries = self._parts_of(message)
        k_peer, v_peer = block.unbind(1)
        store_kv(k_peer, v_peer, self._slots[number], kv.k_LSKH[layer], kv.v_LSKH[layer])
        if self._shape.holds:
            self._over_older(layer, number, queries, self._partials.parts(self._partial))
            if layer:
                self._partials.await_taken(peer)
            self._partials.send(peer, self._partial)
        self._over_new(number, q_TNH, k_peer, v_peer, self._other)
        boxes.take(peer)
        merge_state_(*self._own, *self._other)

    def _over_new(self, source: int, q_TNH: Tensor, k: Tensor, v: Tensor, state: State) -> None:
        """All own queries over one member's keys."""
        self._attend.extend_planned(
            q_TNH,
            k,
            v,
            None,
            *self._new[source],
            scale=self._parts.spec.head_dim**-0.5,
            tiling=self._parts.tiling(self._shape.rows, has_slots=False),
            out=state,
        )

    def _over_older(self, layer: int, source: int, q_TNH: Tensor, state: State) -> None:
        """All queries of one member over own older keys."""
        kv, table = self._parts.kv, self._parts.table
        self._attend.extend_planned(
            q_TNH,
            kv.k_LSKH[layer],
            kv.v_LSKH[layer],
            table.slots_S,
            *self._older[source],
            scale=self._parts.spec.head_dim**-0.5,
            tiling=self._parts.tiling(self._shape.rows),
            out=state,
            causal=False,
        )

    def _length_to(self, member: int) -> int:
        """Of a message to this member: without queries if it holds no older tokens."""
        spec, rows = self._parts.spec, self._shape.rows
        return message_length(spec, rows, queries=member in self._shape.holders)

    def _parts_of(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """K and V (R, 2, K, H) and queries (R, N, H), none of a short message, as views."""
        spec = self._parts.spec
        length = message_length(spec, self._shape.rows, queries=False)
        block = message[:length].view(-1, 2, spec.num_kv_heads, spec.head_dim)
        return block, message[length:].view(-1, spec.num_heads, spec.head_dim)


class StripedGraphs:
    """All graphs of a worker's steps that deal out their rows."""

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
        cls, parts: PrefillParts, group: GroupSpace | None, world_size: int, pool: Any = None
    ) -> StripedGraphs | None:
        """Maps the peers' memory: collective over all workers, each of them a whole instance.

        None in a world of one, and where GPUs cannot map each other's memory.
        """
        if group is None or group.boxes is None:
            return None
        length, dtype = message_length(parts.spec, MOST_SENT_ROWS), parts.kv.k_LSKH.dtype
        mapped = map_buffers(box_bytes(world_size, length, dtype), parts.kv.device)
        if mapped is None:
            return None
        boxes = Boxes(mapped.buffers, group.rank, length=length, dtype=dtype, owner=mapped)
        return cls(parts, StripedSpace(parts, boxes, group), group.rank, pool)

    def shape_of(self, work: StripedWork) -> StripedShape:
        """The step's shape on this member."""
        return self._shape(work.rows, work.members, work.holders)

    def capture(self) -> Iterator[float]:
        """Run kernels of all kinds once, which compiles what has to be; yields the fraction done.
        Steps are captured when they are first needed."""
        shapes = self._kinds()
        for number, shape in enumerate(shapes):
            self._step(shape).run()
            torch.cuda.synchronize(self._parts.kv.device)
            yield (number + 1) / len(shapes)

    def launch(self, step: StripedNumbers) -> Tensor | None:
        """Start a step; as `StepGraphs.launch`."""
        return self._graphs.launch(step.shape, step.numbers, len(step.sampled))

    def _kinds(self) -> list[StripedShape]:
        """The largest shapes whose attention is cut in different ways, with all kinds of kernels:
        this worker is its own peer."""
        kinds = {}
        for rows in ROWS:
            tilings = self._parts.tiling(rows, has_slots=False), self._parts.tiling(rows)
            kinds[tilings] = self._shape(rows, (self._rank,) * 2, (self._rank,))
        return list(reversed(kinds.values()))

    def _shape(self, rows: int, members: tuple[int, ...], holders: tuple[int, ...]) -> StripedShape:
        cuts = self._parts.shape(rows, has_slots=False), self._parts.shape(rows)
        return StripedShape(self._rank, members, holders, *cuts)

    def _step(self, shape: StripedShape) -> StripedStep:
        return StripedStep(self._parts, shape, self._space)
