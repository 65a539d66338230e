"""Elastic attention: one layer's attention of a step, over the group.

Knows: the ring with proactive retention for new tokens, partial attention over cached tokens
wherever they lie, and the merge. One object serves all layers of one step.
Does not know: how the model makes q, k, v, or why the plan is as it is.

Order per layer: new K/V of own requests is stored; queries leave with the first block; blocks of
new K/V pass round the ring (the next block travels while this one is used); own pool; small blocks,
which come all at once instead, while the pool is used; own pool for own and others' queries in one,
where all are of one request; rounds of older tokens' keys (the next round travels while this one is
used, the first while the model computes before this layer, or while the ring does); others' queries
are answered; answers come back and are merged in group order. That fixed order makes the result
independent of arrival; exact partial results (`kernels.exact_attention`) make it independent of the
group too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from loongd.kernels.attention import AttentionBackend, PoolSlots, Spans
from loongd.kernels.partials import FloatPartials, Partials
from loongd.kernels.pool import store_kv
from loongd.worker.comm import Pending, Transport
from loongd.worker.heart import Pulse
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import (
    Gathered,
    JointPart,
    Keep,
    KeyRound,
    PoolPart,
    RingStep,
    Rows,
    StepLayout,
    Tails,
)

_Block = tuple[Tensor, Tensor]
"""K and V of some tokens: (T, K, H) each."""


class _State:
    """Running result of all query rows."""

    def __init__(self, q_TNH: Tensor, partials: Partials) -> None:
        self._like = q_TNH
        self._partials = partials
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        if len(out) == 0:
            return
        if self._out is None or self._lse is None:
            if len(out) == len(self._like):
                self._out, self._lse = out, lse
                return
            self._out, self._lse = self._partials.empty(self._like)
        self._out = self._partials.widened(self._out)
        if isinstance(rows, slice):
            self._partials.merge_(self._out[rows], self._lse[rows], out, lse)
        else:
            part, part_lse = self._out[rows], self._lse[rows]
            self._partials.merge_(part, part_lse, out, lse)
            self._out[rows], self._lse[rows] = part, part_lse

    def result(self) -> Tensor:
        if self._out is None or self._lse is None:
            return torch.zeros_like(self._like)
        return self._partials.result(self._out, self._lse, self._like.dtype)


@dataclass(slots=True)
class _Asked:
    """Queries that travel to this member (`queries`, back to back in `packed`) and from it.

    They leave with the first blocks, if any do: an exchange costs the host as much as a message.
    Else `pending` is theirs alone. In a joint part, own queries are the first of `packed`.
    """

    sends: list[tuple[int, Tensor]]
    receives: list[tuple[int, Tensor]]
    packed: Tensor
    queries: list[Tensor]
    answers: list[Tensor] = field(default_factory=list)
    left: bool = False
    pending: Pending | None = None


@dataclass(frozen=True, slots=True)
class _Coming:
    """Keys and values on their way to this member: of a round, or all new ones."""

    pending: Pending
    blocks: list[_Block]


class EspAttention:
    """`attention(layer, q, k, v)` for the model, bound to one step's layout."""

    def __init__(
        self,
        layout: StepLayout,
        kv: KvCache,
        transport: Transport,
        backend: AttentionBackend,
        *,
        scale: float,
        windows: tuple[int | None, ...],
        pulse: Pulse | None = None,
        partials: Partials | None = None,
        sampled_only: bool = False,
    ) -> None:
        """`windows[layer]` is the sliding window of that layer in tokens, None for none; `pulse`
        counts finished layers; `partials` is the form of the backend's results, `FloatPartials`
        by default. With `sampled_only` the last layer gives the layout's `sample_rows` alone,
        where that saves work."""
        self._layout = layout
        self._kv = kv
        self._transport = transport
        self._backend = backend
        self._scale = scale
        self._windows = windows
        self._pulse = Pulse() if pulse is None else pulse
        self._partials = FloatPartials() if partials is None else partials
        tails = sampled_only and layout.only_ring and bool(layout.ring)
        self._tails_at = len(windows) - 1 if tails else None
        self._coming: _Coming | None = None

    def __call__(self, layer: int, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor) -> Tensor:
        """Attention of this member's new tokens: q_TNH, k_TKH, v_TKH in, out_TNH out.

        Stores the K/V that this member keeps. Collective over the members of the step.
        """
        layout = self._layout
        if layer == self._tails_at:
            q_TNH = q_TNH[list(layout.sample_rows)]
        state = _State(q_TNH, self._partials)
        if self._coming is None:
            self._coming = self._send_keys(layer, 0)
        asked = self._ask(q_TNH)
        if layout.store is not None:
            self._store(layer, layout.store, k_TKH, v_TKH)
        blocks = None
        if layout.gathered is not None:
            blocks = self._gather(layout.gathered, k_TKH, v_TKH, asked)
        else:
            self._ring(layer, q_TNH, k_TKH, v_TKH, state, asked)
        if layout.square is not None:
            rows = layout.square.rows
            part = (q_TNH[rows], k_TKH[rows], v_TKH[rows])
            state.add(rows, *self._square(layer, *part, layout.square.spans))
        if layout.local is not None and layout.joint is None:
            q_local = q_TNH[layout.local.q_rows]
            state.add(layout.local.q_rows, *self._over_pool(layer, q_local, layout.local))
        if layout.gathered is not None and blocks is not None:
            self._over_gathered(layer, layout.gathered, q_TNH, blocks, state)
        if layout.joint is not None:
            self._over_joint(layer, layout.joint, asked, state)
        self._over_rounds(layer, q_TNH, state)
        self._answer(layer, asked, state, q_TNH)
        if self._transport.lingers and layer + 1 < len(self._windows):
            self._coming = self._send_keys(layer + 1, 0)
        self._pulse.layers += 1
        return state.result()

    def settle(self) -> None:
        """Wait for what is on its way to the next layer; collective, like a layer."""
        if self._coming is not None:
            self._coming.pending.wait()

    # ---- new x new -----------------------------------------------------------------------------

    def _ring(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, state: _State, asked: _Asked
    ) -> None:
        layout = self._layout
        if not layout.ring:
            return
        own = layout.block_lens[layout.me]
        block = (k[:own], v[:own])
        if len(layout.ring) > 1:  # v may be a view with gaps; messages have none
            block = (block[0].contiguous(), block[1].contiguous())
        for number, step in enumerate(layout.ring):
            last = number == len(layout.ring) - 1
            following, moving = self._pass_on(block, step, asked, last=last)
            if step.keep is not None:
                self._store(layer, step.keep, *block)
            self._ring_part(layer, q, block, step, state)
            if moving is not None:
                moving.wait()
            block = following

    def _pass_on(
        self, block: _Block, step: RingStep, asked: _Asked, *, last: bool
    ) -> tuple[_Block, Pending | None]:
        """Start moving blocks one member on; returns the next block (not filled yet)."""
        layout = self._layout
        if last:
            return block, None
        dop = len(layout.members)
        shape = (layout.block_lens[(step.source - 1) % dop], *block[0].shape[1:])
        following = (block[0].new_empty(shape), block[1].new_empty(shape))
        to, source = (layout.me + 1) % dop, (layout.me - 1) % dop
        sends = [(layout.members[to], part) for part in block if len(part)]
        receives = [(layout.members[source], part) for part in following if len(part)]
        return following, self._post(asked, sends, receives)

    def _gather(self, part: Gathered, k: Tensor, v: Tensor, asked: _Asked) -> _Coming:
        """Start sending the own block to all others and taking in theirs: one message each."""
        layout = self._layout
        own = layout.block_lens[layout.me]
        blocks = k.new_empty((part.num_rows, 2, *k.shape[1:]))
        torch.stack((k[:own], v[:own]), dim=1, out=blocks[:own])
        others = list(zip(layout.ring[1:], part.ends[:-1], part.ends[1:], strict=True))
        receives = [
            (layout.members[step.source], blocks[first:end])
            for step, first, end in others
            if first < end
        ]
        sends = [(layout.members[step.source], blocks[:own]) for step, _, _ in others if own]
        pending = self._post(asked, sends, receives)
        return _Coming(pending, [(blocks[:, 0], blocks[:, 1])])

    def _over_gathered(
        self, layer: int, part: Gathered, q: Tensor, coming: _Coming, state: _State
    ) -> None:
        """Store what is kept, and own queries over all blocks, in one launch."""
        coming.pending.wait()
        own, ((k, v),) = self._layout.block_lens[self._layout.me], coming.blocks
        if part.keep is not None:
            self._store(layer, part.keep, k, v)
        if layer == self._tails_at:
            self._over_tails(q, (k, v), part.tails, state)
        elif own:
            copies = len(part.ends)
            repeated = q[:own].repeat(copies, 1, 1)
            out, lse = self._backend.square_causal(repeated, k, v, part.spans)
            outs, lses = (x.split_with_sizes([own] * copies) for x in (out, lse))
            for of_block in zip(outs, lses, strict=True):
                state.add(slice(0, own), *of_block)

    def _post(
        self,
        asked: _Asked,
        sends: list[tuple[int, Tensor]],
        receives: list[tuple[int, Tensor]],
    ) -> Pending:
        """Start an exchange, with the queries that have not left yet."""
        if not asked.left:
            asked.left = True
            sends, receives = asked.sends + sends, asked.receives + receives
        return self._transport.post(sends, receives)

    def _ring_part(
        self, layer: int, q: Tensor, block: _Block, step: RingStep, state: _State
    ) -> None:
        if layer == self._tails_at:
            rows = tuple(np.arange(first, end) for first, end in step.tails)
            self._over_tails(q, block, rows, state)
            return
        q_part, k, v = q[step.q_rows], block[0][step.k_rows], block[1][step.k_rows]
        if len(q_part) == 0:
            return
        state.add(step.q_rows, *self._square(layer, q_part, k, v, step.spans))

    def _square(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        window = self._windows[layer]
        if window is None:
            return self._backend.square_causal(q, k, v, spans)
        return self._partials.windowed(q, k, v, spans, scale=self._scale, window=window)

    def _over_tails(self, q: Tensor, block: _Block, tails: Tails, state: _State) -> None:
        """The last new tokens alone, in the last layer: each sees all of its request's rows."""
        lens = tuple(map(len, tails))
        if any(lens):
            spans = Spans((1,) * len(lens), lens, q.device)
            packed = PoolSlots(tails, q.device)
            state.add(slice(0, len(q)), *self._backend.over_pool(q, *block, packed, spans))

    def _store(self, layer: int, keep: Keep, k: Tensor, v: Tensor) -> None:
        rows = keep.rows
        pool = (self._kv.k_LSKH[layer], self._kv.v_LSKH[layer])
        if isinstance(rows, slice):
            store_kv(k[rows], v[rows], keep.slots, *pool)
        else:
            store_kv(k, v, keep.slots, *pool, rows_R=rows)

    # ---- new x cached --------------------------------------------------------------------------

    def _over_pool(self, layer: int, q: Tensor, part: PoolPart) -> tuple[Tensor, Tensor]:
        k_SKH, v_SKH = self._kv.k_LSKH[layer], self._kv.v_LSKH[layer]
        window = self._windows[layer]
        if window is None:
            return self._backend.over_pool(q, k_SKH, v_SKH, part.slots, part.spans)
        k, v = k_SKH[part.slots.packed], v_SKH[part.slots.packed]
        return self._partials.windowed(q, k, v, part.spans, scale=self._scale, window=window)

    def _over_joint(self, layer: int, joint: JointPart, asked: _Asked, state: _State) -> None:
        """Others' queries came with the first blocks, which were waited for."""
        out, lse = self._over_pool(layer, asked.packed, joint.part)
        own = joint.num_own
        state.add(joint.own_rows, out[:own], lse[:own])
        lens = [len(theirs) for theirs in asked.queries]
        asked.answers = list(_packed(out[own:], lse[own:]).split_with_sizes(lens))

    def _send_keys(self, layer: int, number: int) -> _Coming | None:
        """Start a round, if there is one: own keys to owners of queries, others' to this member."""
        if number >= len(self._layout.rounds):
            return None
        part = self._layout.rounds[number]
        sends = [
            (owner, block)
            for owners, slots in part.keys_out
            for block in self._kv.read_layer(layer, slots)
            for owner in owners
        ]
        blocks = [self._kv.empty_layer_block(count) for _, count, _ in part.keys_in]
        receives = [
            (member, block)
            for (member, _, _), pair in zip(part.keys_in, blocks, strict=True)
            for block in pair
        ]
        return _Coming(self._transport.post(sends, receives), blocks)

    def _over_rounds(self, layer: int, q: Tensor, state: _State) -> None:
        """Own queries over the keys that leave, and over those that arrive."""
        for number, part in enumerate(self._layout.rounds):
            following = self._send_keys(layer, number + 1)
            if part.local is not None:
                own = self._over_pool(layer, q[part.local.q_rows], part.local)
                state.add(part.local.q_rows, *own)
            self._over_arrived(q, part, state)
            self._coming = following

    def _over_arrived(self, q: Tensor, part: KeyRound, state: _State) -> None:
        # a function of its own, since its blocks must be free before those after next are taken
        assert self._coming is not None
        self._coming.pending.wait()
        for (_, _, over), (k, v) in zip(part.keys_in, self._coming.blocks, strict=True):
            out, lse = self._backend.over_pool(q[over.q_rows], k, v, over.slots, over.spans)
            state.add(over.q_rows, out, lse)

    def _ask(self, q: Tensor) -> _Asked:
        """Queries for holders, and room for those that others send."""
        layout, joint = self._layout, self._layout.joint
        sends = [(member, q[rows].contiguous()) for member, rows, _ in layout.queries_out]
        num_own = 0 if joint is None else joint.num_own
        lens = [num_own, *(count for _, count, _ in layout.queries_in)]
        packed = q.new_empty((sum(lens), *q.shape[1:]))
        own, *queries = packed.split_with_sizes(lens)
        if joint is not None:
            own.copy_(q[joint.own_rows])
        receives = [
            (member, buffer)
            for (member, _, _), buffer in zip(layout.queries_in, queries, strict=True)
        ]
        asked = _Asked(sends, receives, packed, queries)
        if len(layout.ring) < 2:  # nothing that they could leave with
            asked.pending = self._post(asked, [], [])
        return asked

    def _answer(self, layer: int, asked: _Asked, state: _State, q: Tensor) -> None:
        """Answer others' queries, and merge their answers in group order."""
        layout = self._layout
        if asked.pending is not None:  # else they came with a block, which was waited for
            asked.pending.wait()
        if layout.joint is None:
            incoming = zip(layout.queries_in, asked.queries, strict=True)
            asked.answers = [
                _packed(*self._over_pool(layer, theirs, part)) for (*_, part), theirs in incoming
            ]
        askers = [member for member, _, _ in layout.queries_in]
        sends = list(zip(askers, asked.answers, strict=True))
        answers = [
            (member, rows, self._answer_buffer(count, q.shape[1]))
            for member, rows, count in layout.queries_out
        ]
        receives = [(member, buffer) for member, _, buffer in answers]
        self._transport.post(sends, receives).wait()
        for _, rows, buffer in answers:
            state.add(rows, buffer[..., :-1], buffer[..., -1])

    def _answer_buffer(self, num_rows: int, num_heads: int) -> Tensor:
        shape = (num_rows, num_heads, self._partials.columns(self._kv.k_LSKH.shape[-1]) + 1)
        return torch.empty(shape, dtype=self._partials.dtype, device=self._kv.k_LSKH.device)


def _packed(out: Tensor, lse: Tensor) -> Tensor:
    """A partial result as one message."""
    return torch.cat((out, lse.unsqueeze(-1)), dim=-1)
