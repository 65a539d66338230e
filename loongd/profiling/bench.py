"""Steps made up for their duration: prefill and decode of given sizes on a group.

Knows: how a size becomes a `RunStep` with synthetic tokens, and what KV it needs beforehand.
Does not know: which sizes are worth running (`profiling.grid`), or what the times mean.

KV that decode and chunks read is prefilled once per group (`fill`) in blocks; a request reads one
or several of them. Requests of a large batch share blocks, so the pool need not hold every token
that a step reads.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from loongd.exclusive import Exclusive
from loongd.wire import Extend, RunStep, Sampling, pack_tokens

NUM_BLOCKS = 16


def even(total: int, members: Sequence[int]) -> list[tuple[int, int]]:
    """`total` tokens in consecutive runs, spread evenly over the members."""
    each, more = divmod(total, len(members))
    counts = [each + (i < more) for i in range(len(members))]
    return [(m, count) for m, count in zip(members, counts, strict=True) if count]


class Bench:
    """Runs steps on groups of the first so many instances."""

    def __init__(self, exclusive: Exclusive, *, vocab_size: int, max_tokens: int) -> None:
        """`max_tokens` is the most that a request may have."""
        self._exclusive = exclusive
        self._last_segment = 1 << 40
        self._blocks: list[int] = []
        self._dirty: list[int] = []
        self._members: list[int] = []
        self.block_tokens = 0
        self.max_tokens = max_tokens
        rng = random.Random(1)
        self._tokens = array("i", (rng.randrange(vocab_size) for _ in range(4096)))

    @property
    def num_instances(self) -> int:
        return len(self._exclusive.instances)

    @property
    def pool_tokens(self) -> int:
        """Slots of the smallest instance."""
        return min(ready.pool_tokens for ready in self._exclusive.instances)

    def group(self, dop: int) -> None:
        """Steps from now on run on the first `dop` instances."""
        self._members = [ready.instance for ready in self._exclusive.instances[:dop]]

    async def fill(self, block_tokens: int) -> None:
        """Prefill the blocks that later steps read; each member holds a part of each block, so
        `block_tokens` is at least the group's size. Raises WorkerError."""
        self.clear()
        self.block_tokens = block_tokens
        for _ in range(NUM_BLOCKS):
            self._blocks.append(self._segment())
            await self._run([self._chunk(block_tokens, segment=self._blocks[-1])])
        self._dirty = []  # blocks stay until `clear`

    async def prefill(self, items: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step of (cached, new) tokens; cached is a multiple of `block_tokens`."""
        batch = []
        for cached, new in items:
            batch.append(self._chunk(new, cached=self._read(cached), segment=self._segment()))
        elapsed_s = await self._run(batch)
        self._tidy()
        return elapsed_s

    async def decode(self, *, num_masters: int, batch: int, num_blocks: int) -> float:
        """Seconds of a step of `batch` requests that read `num_blocks` blocks each."""
        extends = [
            self._newest(i, self._members[i % num_masters], num_blocks) for i in range(batch)
        ]
        elapsed_s = await self._run(extends)
        self._tidy()
        return elapsed_s

    def clear(self) -> None:
        """Free all that this bench has put into the pool, after the steps sent so far."""
        self._dirty += self._blocks  # freeing twice does no harm
        self._blocks = []
        self._tidy()

    # ---- inside --------------------------------------------------------------------------------

    def _tidy(self) -> None:
        self._exclusive.free(self._dirty)
        self._dirty = []

    def _segment(self) -> int:
        self._last_segment += 1
        self._dirty.append(self._last_segment)
        return self._last_segment

    def _read(self, tokens: int) -> list[int]:
        return self._blocks[: tokens // self.block_tokens] if tokens else []

    def _chunk(self, new: int, *, segment: int, cached: Sequence[int] = ()) -> Extend:
        return Extend(
            request_id=str(segment),
            tokens=self._some(new),
            start=len(cached) * self.block_tokens,
            master=None,
            segment=segment,
            keep=even(new, self._members),
            cached=list(cached),
            holders=list(self._members) if cached else [],
            sampling=Sampling(),
        )

    def _newest(self, number: int, master: int, num_blocks: int) -> Extend:
        segment = self._segment()
        first = number * num_blocks
        cached = [self._blocks[(first + i) % NUM_BLOCKS] for i in range(num_blocks)]
        return Extend(
            request_id=str(segment),
            tokens=self._some(1),
            start=num_blocks * self.block_tokens,
            master=master,
            segment=segment,
            keep=[],
            cached=cached,
            holders=list(self._members),
            sampling=Sampling(),
        )

    def _some(self, count: int) -> bytes:
        known = self._tokens
        return pack_tokens((known * (count // len(known) + 1))[:count])

    async def _run(self, batch: list[Extend]) -> float:
        step = RunStep(
            step_id=self._exclusive.next_step_id(),
            epoch=self._exclusive.epoch,
            members=self._members,
            batch=batch,
        )
        return await self._exclusive.run(step)
