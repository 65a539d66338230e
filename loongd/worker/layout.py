"""The geometry of one step for one member, as values fixed before the first layer.

Knows: what there is to know about a step: which new tokens this member computes, which it keeps
in which slots, which blocks pass in the ring, whose queries or keys come and go.
Does not know: how it is worked out (`worker.geometry`), tensors of K, V or Q, transports.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from loongd.kernels.attention import PoolSlots, Spans
from loongd.wire import Extend

Rows = slice | Tensor
"""Rows of a packed tensor: a slice (view) where they are consecutive, else an index."""

Ints = npt.NDArray[np.int64]


ROUND_TOKENS = 32768
"""Older tokens whose keys a member takes in in one round, while it computes over the round before,
where these are not too many rounds: a size of keys that cuDNN is planned for
(`kernels.cudnn.KEY_SIZES`), large enough for merging to be cheap."""
ROUND_BYTES = 512 << 20
"""Most bytes of a round's keys, at least `ROUND_TOKENS` of them. Two rounds are in memory."""
GATHERED_ROWS = 1024
"""Most new tokens of a member for which all members send their K and V to all at once. So few are
launched by the host more slowly than computed (28 us each, 8B on an H200, against 1.7 ms and more a
layer), and a ring launches anew for each block; more should travel while others are used."""
JOINT_ROWS = 64
"""Up to so many queries of a request, own ones do not wait for others': reading its keys takes most
of the time, and is done while these are on their way."""
FLOPS_PER_BYTE = 1775
"""What a member computes in attention while a byte comes from another: 600 TFLOP/s, as cuDNN does
on an H200, over the 338 GB/s that NVLink gives it each way. Elsewhere keys may travel too late or
too early, which costs time alone."""


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes that one row costs on the way: a query with its float32 answer, and a token's K, V.

    `pair_flops` are the operations of a query over a key: with 0 bytes alone decide what travels.
    `round_tokens` and `gathered_rows` bound what is in memory at once; more than `joint_rows`
    queries of a request are attended to together.
    """

    query: int
    key: int
    pair_flops: int = 0
    round_tokens: int = ROUND_TOKENS
    gathered_rows: int = GATHERED_ROWS
    joint_rows: int = JOINT_ROWS

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> RowBytes:
        """For one layer of a model (one tensor-parallel rank of it)."""
        answer = num_heads * (head_dim + 1) * 4
        return cls(
            query=num_heads * head_dim * element_bytes + answer,
            key=2 * num_kv_heads * head_dim * element_bytes,
            pair_flops=4 * num_heads * head_dim,
            round_tokens=most_round_tokens(2 * num_kv_heads * head_dim * element_bytes),
        )


def most_round_tokens(key_bytes: int) -> int:
    """Of a round: a power of two; `key_bytes` are a token's K and V in a layer."""
    return max(ROUND_TOKENS, 1 << (ROUND_BYTES // key_bytes).bit_length() >> 1)


@dataclass(frozen=True, slots=True)
class Keep:
    """Rows of a block to store in `slots` (both int64 on the device)."""

    rows: Rows
    slots: Tensor


@dataclass(frozen=True, slots=True)
class RingStep:
    """What to do while the block of member `source` is at hand.

    `q_rows` of the packed queries and `k_rows` of the block; `spans` are squares, with rows
    between them that have no partner here (queries without keys, keys without queries).
    """

    source: int
    keep: Keep | None
    q_rows: slice
    k_rows: slice
    spans: Spans
    tails: tuple[tuple[int, int], ...] = ()
    """(first, end) of the block's rows of each request whose last new token is a query here, in
    the order of `StepLayout.sample_rows`: that token sees all of them."""


Tails = tuple[Ints, ...]
"""Rows of blocks that each request's last new token sees, of those whose one is a query here."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The ring's blocks side by side, in its order, when they come all at once.

    The first block's rows end at `ends[0]`, and so on; `keep` and `tails` count through all of
    them; `spans` are those of the ring with all own striped queries again for each block.
    """

    ends: tuple[int, ...]
    keep: Keep | None
    spans: Spans
    tails: Tails

    @property
    def num_rows(self) -> int:
        return self.ends[-1]


@dataclass(frozen=True, slots=True)
class PoolPart:
    """Queries (`q_rows` of the packed queries at hand) over this member's own pool."""

    q_rows: Rows
    slots: PoolSlots
    spans: Spans


@dataclass(frozen=True, slots=True)
class JointPart:
    """One request's queries over this member's own pool, attended to at once: `num_own` own ones
    (`own_rows` of the packed queries), then those of `StepLayout.queries_in`."""

    own_rows: Rows
    num_own: int
    part: PoolPart


@dataclass(frozen=True, slots=True)
class KeyRound:
    """One piece of older tokens of each member that sends keys, as far as it concerns this member.

    While the next round travels, own queries look at `local`, the piece that leaves here, and then
    at the pieces that arrive, in group order.
    """

    keys_out: tuple[tuple[tuple[int, ...], Rows], ...]
    """(members, slots) of own K and V that go to owners of queries."""
    local: PoolPart | None
    keys_in: tuple[tuple[int, int, PoolPart], ...]
    """(member, number of tokens, own queries over them); slots count from the arriving piece."""


@dataclass(frozen=True, slots=True)
class SquarePart:
    """New tokens of requests that one master computes alone, among themselves."""

    rows: Rows
    spans: Spans


@dataclass(frozen=True, slots=True)
class StepLayout:
    """All of it. `block_lens[s]` is the number of ring rows of member index s."""

    me: int
    members: tuple[int, ...]
    tokens: Ints
    positions: Ints
    lengths: Ints
    block_lens: tuple[int, ...]
    ring: tuple[RingStep, ...]
    gathered: Gathered | None
    """The same in one, where the blocks are small."""
    store: Keep | None
    square: SquarePart | None
    local: PoolPart | None
    queries_out: tuple[tuple[int, Rows, int], ...]
    """(member, rows, number of rows) of own queries that go to a holder."""
    queries_in: tuple[tuple[int, int, PoolPart], ...]
    """(member, number of rows, what they look at here)."""
    joint: JointPart | None
    """`local` and all of `queries_in` in one, where they are of one request."""
    rounds: tuple[KeyRound, ...]
    """Older tokens whose keys travel, in the order in which they do."""
    sample_rows: tuple[int, ...]
    sampled: tuple[Extend, ...]
    windowed: bool
    grown: tuple[tuple[int, int], ...]
    """(segment, tokens) that this step added to the pool, to take back if it fails."""

    @property
    def alone_tokens(self) -> int:
        """New tokens, where one request's are all of the step and this member computes them all;
        else 0."""
        num_rows = len(self.tokens)
        is_alone = len(self.ring) == 1 and self.ring[0].spans.q_lens == (num_rows,)
        return num_rows if is_alone and not self.windowed else 0

    def with_spare(self, rows: int) -> StepLayout:
        """For queries, keys and values with so many rows behind them (`Spans.spare`), where
        `alone_tokens`."""
        (step,) = self.ring
        return replace(self, ring=(replace(step, spans=replace(step.spans, spare=rows)),))

    @property
    def only_ring(self) -> bool:
        """Whether own queries meet new keys alone, and all of them in the ring."""
        elsewhere = (self.square, self.local, self.queries_out)
        travelled = any(part.local or part.keys_in for part in self.rounds)
        return not (self.windowed or travelled or any(elsewhere))
