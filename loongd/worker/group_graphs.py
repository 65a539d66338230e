"""The kernels of a prefill step of few tokens on a group, run as they are or captured.

Knows: their order, and how partial results of attention to older keys go round (`PartialBoxes`).
Does not know: plans, how a plan becomes numbers, when something is captured.

A layer: own older keys, for the queries of all new tokens; that leaves for the others; own queries
over the new keys, while it travels; the others' results are merged as they come, in group order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from loongd.kernels.dispatch import pick
from loongd.kernels.merge import merge_state_
from loongd.worker.group_layout import MOST_EXCHANGED_TOKENS, GroupNumbers, GroupShape, GroupWork
from loongd.worker.peers import PartialBoxes, box_bytes, map_buffers, partial_length
from loongd.worker.prefill_graphs import PrefillParts, StepGraphs
from loongd.worker.prefill_layout import BUCKETS
from loongd.worker.striped_layout import MOST_PARTIAL_ROWS


class GroupSpace:
    """Memory of all steps of a worker with others, which run one after the other: also of those
    that deal out their rows (`worker.striped_graphs`)."""

    def __init__(self, parts: PrefillParts, rank: int, boxes: PartialBoxes | None) -> None:
        """Without `boxes` nothing can be exchanged."""
        spec, device = parts.spec, parts.kv.device
        sizes = (max(BUCKETS[-1], MOST_PARTIAL_ROWS), spec.num_heads)
        self.rank = rank
        self.boxes = boxes
        self.out_TNH = torch.zeros(*sizes, spec.head_dim, dtype=torch.float32, device=device)
        self.lse_TN = torch.zeros(sizes, dtype=torch.float32, device=device)
        num_sent = MOST_PARTIAL_ROWS if boxes is not None else 0
        length = partial_length(num_sent, spec.num_heads, spec.head_dim)
        self.partial = torch.zeros(length, dtype=torch.float32, device=device)

    @classmethod
    def map(cls, parts: PrefillParts, rank: int, world_size: int) -> GroupSpace | None:
        """Maps the peers' memory: collective over all workers, each of them a whole instance.

        None in a world of one.
        """
        if world_size == 1:
            return None
        heads, head_dim = parts.spec.num_heads, parts.spec.head_dim
        length = partial_length(MOST_PARTIAL_ROWS, heads, head_dim)
        mapped = map_buffers(box_bytes(world_size, length, torch.float32), parts.kv.device)
        boxes = None
        if mapped is not None:
            boxes = PartialBoxes(
                mapped.buffers,
                rank,
                max_rows=MOST_PARTIAL_ROWS,
                num_heads=heads,
                head_dim=head_dim,
                owner=mapped,
            )
        return cls(parts, rank, boxes)


class GroupStep:
    """The kernels of one shape over fixed tensors."""

    def __init__(self, parts: PrefillParts, shape: GroupShape, space: GroupSpace) -> None:
        self._parts = parts
        self._shape = shape
        self._boxes = space.boxes
        self._attend = pick("attend", parts.kv.device)
        bucket, spec = shape.bucket, parts.spec
        self._state = space.out_TNH[:bucket], space.lse_TN[:bucket]
        self._partial = space.partial[: partial_length(bucket, spec.num_heads, spec.head_dim)]
        self.numbers = torch.zeros(sum(shape.sizes), dtype=torch.int32, device=parts.kv.device)
        views = self.numbers.split_with_sizes(shape.sizes)
        self._tokens_T, self._positions_T, self._slots_T, self._rows_B = views[:4]
        self._new = (views[4].view(-1, 5), views[5])
        self._older = (views[6].view(-1, 5), views[7]) if shape.holds else None
        self._slots_T.fill_(-1)
        self.hidden_BD: Tensor | None = None

    def run(self) -> None:
        """All layers, into `hidden_BD`: the wanted rows. Reads nothing on the host."""
        numbers = (self._tokens_T, self._positions_T, self._slots_T, self._rows_B)
        self.hidden_BD = self._parts.forward(*numbers, self._attention)
        self._await_taken()

    def _attention(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """As `loongd.model.llama.Attention`; the last layer gives the wanted rows alone."""
        parts, shape = self._parts, self._shape
        scale = parts.spec.head_dim**-0.5
        if self._older is not None:
            self._send_older(layer, q_TNH, scale)
        self._attend.extend_planned(
            q_TNH,
            k_TKH,
            v_TKH,
            None,
            *self._new,
            scale=scale,
            tiling=parts.tiling(shape.bucket, has_slots=False),
            out=self._state,
        )
        for source in shape.sources:
            self._merge(source)
        out_TNH = self._state[0]
        return out_TNH[self._rows_B.long()] if layer == parts.spec.num_layers - 1 else out_TNH

    def _send_older(self, layer: int, q_TNH: Tensor, scale: float) -> None:
        """All queries over own older keys, for all who take part."""
        parts, boxes = self._parts, self._boxes
        assert boxes is not None
        assert self._older is not None
        pool = (parts.kv.k_LSKH[layer], parts.kv.v_LSKH[layer], parts.table.slots_S)
        self._attend.extend_planned(
            q_TNH,
            *pool,
            *self._older,
            scale=scale,
            tiling=parts.tiling(self._shape.bucket),
            out=boxes.parts(self._partial),
            causal=False,
        )
        if layer:
            self._await_taken()
        for peer in self._shape.targets:
            boxes.send(peer, self._partial)

    def _await_taken(self) -> None:
        for peer in self._shape.targets:
            assert self._boxes is not None
            self._boxes.await_taken(peer)

    def _merge(self, source: int) -> None:
        boxes, shape = self._boxes, self._shape
        assert boxes is not None
        # what it has sent to itself comes back, as others' does
        if source == shape.rank and shape.rank not in shape.targets:
            merge_state_(*self._state, *boxes.parts(self._partial))
            return
        merge_state_(*self._state, *boxes.await_partial(source, shape.bucket))
        boxes.take(source)


class GroupGraphs:
    """All graphs of a worker's steps with others."""

    def __init__(self, parts: PrefillParts, space: GroupSpace, pool: Any = None) -> None:
        """`pool` is memory of other graphs (`graph_pool`); its own by default."""
        self._parts = parts
        self._space = space
        self._graphs = StepGraphs(self._step, parts.table, pool)

    def can_run(self, work: GroupWork) -> bool:
        """Whether a step has a graph: the same answer on all members. Where they can exchange
        something they share the rows of larger ones."""
        if self._space.boxes is None:
            return not work.holders
        return work.bucket <= MOST_EXCHANGED_TOKENS

    def shape_of(self, work: GroupWork) -> GroupShape:
        """The step's shape on this member, which is one of the workers."""
        rank = self._space.rank
        others = tuple(worker for worker in work.workers if worker != rank)
        targets = others if rank in work.holders else ()
        return self._shape(work.bucket, work.holders, targets)

    def capture(self) -> Iterator[float]:
        """Run all kernels once, which compiles what has to be, and capture the steps in which
        nothing is exchanged; yields the fraction done. The others when they are first needed."""
        rank, exchanges = self._space.rank, self._space.boxes is not None
        most = MOST_EXCHANGED_TOKENS if exchanges else BUCKETS[-1]
        buckets = [bucket for bucket in reversed(BUCKETS) if bucket <= most]
        for number, bucket in enumerate(buckets):
            if exchanges:
                # this worker is its own peer
                self._step(self._shape(bucket, (rank,), (rank,))).run()
            alone = self._shape(bucket, (), ())
            self._step(alone).run()
            torch.cuda.synchronize(self._parts.kv.device)
            self._graphs.graph(alone)
            yield (number + 1) / len(buckets)

    def launch(self, step: GroupNumbers) -> Tensor | None:
        """Start a step; as `StepGraphs.launch`."""
        return self._graphs.launch(step.shape, step.numbers, len(step.sampled))

    def _shape(self, bucket: int, sources: tuple[int, ...], targets: tuple[int, ...]) -> GroupShape:
        cuts = self._parts.shape(bucket, has_slots=False), self._parts.shape(bucket)
        return GroupShape(self._space.rank, *cuts, sources, targets)

    def _step(self, shape: GroupShape) -> GroupStep:
        return GroupStep(self._parts, shape, self._space)
