"""Decode on a GPU: each shape of step is captured once as a CUDA graph and then replayed.

Knows: how a graph reads a step's numbers, draws the best tokens and leaves them on the device for
the step that follows; exchanges with other members are part of the graph (`worker.peers`).
Does not know: plans that are not decode, groups' reasons, sockets.

One launch a step instead of some hundreds: an eager step of an 8B model takes 18 ms of launches, of
which the device needs 4. All graphs share one memory pool; they run one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loongd.kernels.dispatch import pick
from loongd.kernels.fresh import Fresh
from loongd.kernels.merge import merge_state_
from loongd.kernels.pool import next_tokens
from loongd.kernels.sampling import best_tokens
from loongd.model.llama import Llama
from loongd.model.sampler import Drawing, Mark, sample_once
from loongd.worker.captured import STAGES, Captured, Recent, capture, graph_pool, storing
from loongd.worker.decode_layout import (
    BEGIN,
    BUCKETS,
    END,
    ENTRY,
    NUM_COLUMNS,
    POSITION,
    SLOT,
    SOURCE,
    TOKEN,
    DecodeRows,
    DecodeShape,
)
from loongd.worker.kvcache import KvCache
from loongd.worker.peers import PeerMemory
from loongd.worker.slot_table import SlotTable

MOST_FRESH = 32
"""Rows up to which attention itself rotates and stores the new tokens. On an H200 a layer's
attention of one row takes 9.4 us so, not 10.9; of 64 to 256 as long either way; of 1,024 short ones
601, not 465."""


@dataclass(frozen=True, slots=True)
class DecodeParts:
    """What graphs are made of; `peers` is None where there are none, or they cannot be reached."""

    model: Llama
    kv: KvCache
    table: SlotTable
    peers: PeerMemory | None
    scale: float


class GroupAttention:
    """One layer's attention of a decode step, as `loongd.model.llama.Attention`."""

    def __init__(self, parts: DecodeParts, shape: DecodeShape, columns: Tensor) -> None:
        self._parts = parts
        self._shape = shape
        self._columns = columns
        self._split_kv = pick("attend", columns.device).split_kv
        self._store_at_once = storing(parts.kv, columns[SLOT])
        self._fresh: Fresh | None = None
        """What the layer's attention will store."""

    def store(
        self,
        layer: int,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        cos_TH: Tensor,
        sin_TH: Tensor,
    ) -> None:
        """As `loongd.model.llama.Store`; left to attention where rows are few and queries do not
        have to travel first."""
        self._fresh = None
        if self._shape.asks or self._shape.bucket > MOST_FRESH:
            self._store_at_once(layer, q_TNH, k_TKH, v_TKH, cos_TH, sin_TH)
        else:
            self._fresh = Fresh(k_TKH, v_TKH, cos_TH, sin_TH, self._columns[SLOT])

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Ask the holders, attend to what is here, answer others, merge in group order."""
        del k_TKH, v_TKH  # `store` has them
        peers, asks = self._parts.peers, self._shape.asks
        if peers is None or not asks:
            # nothing is merged into it, so that it may be of the model's type
            lse = torch.empty(q_TNH.shape[:2], dtype=torch.float32, device=q_TNH.device)
            out = q_TNH.new_empty(q_TNH.shape)
            self._over_pool(layer, q_TNH, BEGIN, out=(out, lse), fresh=self._fresh)
            self.answer(layer)
            return out
        q_TNH = q_TNH.contiguous()
        for peer in asks:
            peers.ask(peer, q_TNH)
        out, lse = self._over_pool(layer, q_TNH, BEGIN)
        self.answer(layer)
        for peer in asks:
            merge_state_(out, lse, *peers.await_answer(peer, len(q_TNH)))
        return out

    def answer(self, layer: int) -> None:
        """Answer the members that ask."""
        peers, shape = self._parts.peers, self._shape
        if peers is None:
            return
        for number, peer in enumerate(shape.answers):
            q_RNH = peers.await_question(peer, shape.bucket)
            place = peers.answer_place(peer, shape.bucket)
            self._over_pool(layer, q_RNH, NUM_COLUMNS + 2 * number, out=place)
            peers.answered(peer)

    def _over_pool(
        self,
        layer: int,
        q_RNH: Tensor,
        column: int,
        *,
        out: tuple[Tensor, Tensor] | None = None,
        fresh: Fresh | None = None,
    ) -> tuple[Tensor, Tensor]:
        parts = self._parts
        found: tuple[Tensor, Tensor] = self._split_kv(
            q_RNH,
            parts.kv.k_LSKH[layer],
            parts.kv.v_LSKH[layer],
            parts.table.slots_S,
            None,
            self._columns[column],
            k_ends=self._columns[column + END - BEGIN],
            scale=parts.scale,
            out=out,
            fresh=fresh,
        )
        return found


class DecodeStep:
    """The kernels of one shape of step over fixed tensors; run as it is, or captured."""

    def __init__(self, parts: DecodeParts, shape: DecodeShape, drawn_B: Tensor) -> None:
        """`drawn_B` (int64): the last step's tokens, read and then overwritten."""
        self._parts = parts
        self.shape = shape
        self._drawn_B = drawn_B
        height = NUM_COLUMNS + 2 * len(shape.answers)
        # columns begin at multiples of 16 bytes, as kernels like it
        width = max(shape.bucket, 4)
        device = drawn_B.device
        self.numbers = torch.zeros((height, width), dtype=torch.int32, device=device)
        self._tokens = torch.zeros(shape.bucket, dtype=torch.int64, device=device)
        self._attention = GroupAttention(parts, shape, self.numbers[:, : shape.bucket])
        self.logits_BV: Tensor | None = None

    def run(self) -> None:
        """All layers, and the best token of each own row. Reads nothing on the host."""
        parts, bucket = self._parts, self.shape.bucket
        if not self.shape.owns:
            for layer in range(len(parts.kv.k_LSKH)):
                self._attention.answer(layer)
            return
        rows = self.numbers[:, :bucket]
        given = (rows[SOURCE], rows[TOKEN], rows[ENTRY], rows[SLOT])
        next_tokens(self._drawn_B, *given, parts.table.slots_S, self._tokens)
        inputs = (self._tokens, rows[POSITION], None)
        hidden_TD = parts.model.forward(*inputs, self._attention, store=self._attention.store)
        self.logits_BV = parts.model.head(hidden_TD)
        best_tokens(self.logits_BV, out=self._drawn_B[:bucket])


class DecodeFlight:
    """A step that the device works on: its tokens are on their way to `tokens_B`."""

    def __init__(self, tokens_B: Tensor, *, on_gpu: bool) -> None:
        """`tokens_B` is on the host; where there is no GPU, it is there already."""
        self._tokens_B = tokens_B
        self._done = Mark(on_gpu=on_gpu)

    def ready(self) -> bool:
        """Whether the device is through."""
        return self._done.is_reached()

    def finish(self) -> list[int]:
        """The own rows' tokens, in order, negative for none. Raises RuntimeError for what failed
        on the device."""
        self._done.wait()
        tokens: list[int] = self._tokens_B.tolist()
        return tokens


class DecodeGraphs:
    """All graphs of a worker. `drawn_B`: the last step's tokens on the device."""

    def __init__(self, parts: DecodeParts, pool: Any = None) -> None:
        """`pool` is memory of other graphs (`graph_pool`); its own by default."""
        self._parts = parts
        device = parts.kv.device
        self._graphs: Recent[DecodeShape, tuple[DecodeStep, Captured]] = Recent(device)
        self.drawn_B = torch.zeros(BUCKETS[-1], dtype=torch.int64, device=device)
        self._on_gpu = device.type == "cuda"
        self._pool: Any = graph_pool(device) if pool is None else pool
        self._tokens = deque(
            torch.zeros(BUCKETS[-1], dtype=torch.int64, pin_memory=self._on_gpu)
            for _ in range(STAGES)
        )

    @property
    def has_peers(self) -> bool:
        """Whether steps with exchanges can be captured."""
        return self._parts.peers is not None

    def capture(self, buckets: tuple[int, ...], rank: int) -> Iterator[float]:
        """Capture steps of one instance for these numbers of rows; yields the fraction done.

        Also runs what exchanges need once, with this worker as its own peer, so that every kernel
        is compiled before anything is captured.
        """
        for number, bucket in enumerate(buckets):
            if number == 0 and self._parts.peers is not None:
                self._run_once(DecodeShape(bucket, True, (rank,), (rank,)))
            shape = DecodeShape(bucket, True, (), ())
            logits_BV = self._run_once(shape)
            if number == 0 and logits_BV is not None:
                sample_once(logits_BV[:1])
            self._graph(shape)
            yield (number + 1) / len(buckets)

    def launch(
        self, rows: DecodeRows, draw: Callable[[Tensor], Drawing] | None
    ) -> DecodeFlight | Drawing:
        """Start a step. With `draw`, tokens come from it and the logits (B, V), queued behind them.

        Otherwise each row's best token is drawn on the device.
        """
        self._parts.table.upload()
        step, graph = self._graph(rows.shape)
        graph.replay(rows.columns)
        num_rows = len(rows.positions)
        logits_BV = step.logits_BV
        if draw is not None and num_rows and logits_BV is not None:
            # the next replay overwrites the logits, but only after what is launched here
            drawing = draw(logits_BV[:num_rows])
            self.drawn_B[:num_rows].copy_(drawing.tokens_B)
            return drawing
        tokens_B = self._tokens[0][:num_rows]
        self._tokens.rotate(-1)
        if num_rows:
            tokens_B.copy_(self.drawn_B[:num_rows], non_blocking=True)
        return DecodeFlight(tokens_B, on_gpu=self._on_gpu)

    def _graph(self, shape: DecodeShape) -> tuple[DecodeStep, Captured]:
        return self._graphs.of(shape, self._capture)

    def _capture(self, shape: DecodeShape) -> tuple[DecodeStep, Captured]:
        step = DecodeStep(self._parts, shape, self.drawn_B)
        return step, capture(step.run, step.numbers, self._pool)

    def _run_once(self, shape: DecodeShape) -> Tensor | None:
        """The logits (B, V), if this worker has any."""
        step = DecodeStep(self._parts, shape, self.drawn_B)
        step.numbers[SOURCE] = step.numbers[SLOT] = -1
        step.numbers[ENTRY] = self._parts.table.scratch
        step.run()
        torch.cuda.synchronize(self._parts.kv.device)
        return step.logits_BV
