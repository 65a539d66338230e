"""Steps made up for their duration: prefill, decode and migration of given sizes.

Knows: how a size becomes a message with synthetic tokens, and what KV it needs beforehand.
Does not know: which sizes are worth running (`profiling.grid`), or what the times mean.

KV that decode and chunks read is prefilled once per group (`fill`) in blocks; a request reads some
of them, or a tiny one. The requests of a step read different blocks: KV that several read comes
from a cache and is faster than any real batch's.

Messages say what the daemon's would. Decode steps come in rows of one batch that grows by its own
tokens, for so they are served: a first step of requests that a worker has not seen before brings
their slots to the device and is told its tokens, which costs a host some milliseconds.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import msgspec

from loongd.exclusive import Exclusive
from loongd.profiling.grid import NUM_BLOCKS
from loongd.wire import Extend, PaddedSizes, RunMigrate, RunStep, Sampling, pack_tokens

_NUM_TINY = 16
_TINY_TOKENS = 16
_PLACED_TOKENS = 2048
"""Of each member, from which on workers take a segment for a long prompt's (`worker.slots.LONG`),
where steps and the pool are large enough for so many."""
_POOL_SHARE = 8


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
        self._tiny: list[int] = []
        self._dirty: list[int] = []
        self._members: list[int] = []
        self.block_tokens = 0
        self.tiny_tokens = 0
        self.max_tokens = max_tokens
        rng = random.Random(1)
        self._tokens = array("i", (rng.randrange(vocab_size) for _ in range(4096)))

    @property
    def instances(self) -> list[int]:
        """Ids of all instances."""
        return [ready.instance for ready in self._exclusive.instances]

    @property
    def padded_sizes(self) -> PaddedSizes:
        """New tokens to which small prefill steps of the group are padded; none, if none are."""
        told = self._exclusive.instances[0].padded_sizes
        return told.get(len(self._members), PaddedSizes([], []))

    @property
    def pool_tokens(self) -> int:
        """Slots of the smallest instance."""
        return min(ready.pool_tokens for ready in self._exclusive.instances)

    def group(self, dop: int) -> None:
        """Steps from now on run on the first `dop` instances."""
        self._members = [ready.instance for ready in self._exclusive.instances[:dop]]

    async def fill(self, block_tokens: int, step_tokens: int) -> None:
        """Prefill the blocks that later steps read, some `step_tokens` a step; each member holds
        a part of each block, so `block_tokens` is at least the group's size. Raises WorkerError."""
        self.clear()
        self.block_tokens = block_tokens
        self.tiny_tokens = max(_TINY_TOKENS, len(self._members))
        placed = _PLACED_TOKENS * len(self._members)
        room = self.pool_tokens * len(self._members) // _POOL_SHARE
        longest = block_tokens + max(placed, block_tokens)
        if placed <= min(step_tokens, room) and longest <= self.max_tokens:
            self._blocks = await self._fill_in_row(placed)
        else:
            self._blocks = await self._fill(NUM_BLOCKS, block_tokens, step_tokens)
        self._tiny = await self._fill(_NUM_TINY, self.tiny_tokens, step_tokens)
        self._dirty = []  # blocks stay until `clear`

    async def _fill(self, count: int, tokens: int, step_tokens: int) -> list[int]:
        segments = [self._segment() for _ in range(count)]
        each = max(1, step_tokens // tokens)
        for at in range(0, count, each):
            await self._run([self._chunk(tokens, segment=s) for s in segments[at : at + each]])
        return segments

    async def _fill_in_row(self, placed: int) -> list[int]:
        """Blocks right behind each other, as the chunks of a prompt lie: scattered keys are copied
        before they are attended to, which counts where steps are fast. The first stands where a
        prompt of `placed` tokens does, with room for all."""
        each, place = placed, self._segment()
        last = place
        await self._run([self._chunk(each, segment=place)])
        blocks = []
        for _ in range(NUM_BLOCKS):
            behind, last = [last], self._segment()
            chunk = self._chunk(self.block_tokens, segment=last, cached=behind, each=each)
            await self._run([chunk])
            each = self.block_tokens
            blocks.append(last)
        self._exclusive.free([place])
        return blocks

    async def prefill(self, items: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step of (cached, new) tokens; cached is a multiple of `block_tokens`."""
        batch = []
        for cached, new in items:
            batch.append(self._chunk(new, cached=self._read(cached), segment=self._segment()))
        elapsed_s = await self._run(batch)
        self.tidy()
        return elapsed_s

    async def decode(
        self, *, num_masters: int, blocks: Sequence[int], num_steps: int
    ) -> list[float]:
        """Seconds of each of so many steps in a row, of requests that read so many blocks each at
        first, 0 for a tiny one."""
        batch, at = [], 0
        for number, count in enumerate(blocks):
            batch.append(self._newest(number, self._members[number % num_masters], at, count))
            at += count
        steps = [self._step(batch)]
        while len(steps) < num_steps:
            batch = [_one_more(extend) for extend in batch]
            steps.append(self._step(batch, follows=steps[-1].step_id))
        times = await self._exclusive.run_row(steps)
        self.tidy()
        return times

    def kv_tokens(self, blocks: Sequence[int], num_steps: int) -> int:
        """KV tokens that the requests of such a row of decode steps read, their new ones counted,
        in the step amid all but the first."""
        older = sum(count * self.block_tokens if count else self.tiny_tokens for count in blocks)
        return older + len(blocks) * (1 + num_steps // 2)

    async def put(self, instance: int, tokens: int) -> int:
        """A segment of so many tokens on one instance, prefilled there. Raises WorkerError."""
        members, self._members = self._members, [instance]
        segment = self._segment()
        await self._run([self._chunk(tokens, segment=segment)])
        self._members = members
        return segment

    async def migrate(self, segment: int, tokens: int, *, source: int, target: int) -> float:
        """Seconds to move the newest `tokens` of a segment from `source` to `target`."""
        return await self._exclusive.run(
            RunMigrate(
                step_id=self._exclusive.next_step_id(),
                epoch=self._exclusive.epoch,
                source=source,
                target=target,
                moves=[(segment, tokens)],
            )
        )

    def clear(self) -> None:
        """Free all that this bench has put into the pool, after the steps sent so far."""
        self._dirty += [*self._blocks, *self._tiny]  # freeing twice does no harm
        self._blocks, self._tiny = [], []
        self.tidy()

    def tidy(self) -> None:
        """Free what the steps so far have put into the pool, but for the blocks."""
        self._exclusive.free(self._dirty)
        self._dirty = []

    # ---- inside --------------------------------------------------------------------------------

    def _segment(self) -> int:
        self._last_segment += 1
        self._dirty.append(self._last_segment)
        return self._last_segment

    def _read(self, tokens: int) -> list[int]:
        return self._blocks[: tokens // self.block_tokens] if tokens else []

    def _chunk(
        self, new: int, *, segment: int, cached: Sequence[int] = (), each: int | None = None
    ) -> Extend:
        """`each`: tokens of each of the `cached` segments, by default those of a block."""
        each = self.block_tokens if each is None else each
        held = [len(cached) * count for _, count in even(each, self._members)]
        return Extend(
            request_id=str(segment),
            tokens=self._some(new),
            start=len(cached) * each,
            master=None,
            segment=segment,
            keep=even(new, self._members),
            cached=list(cached),
            holders=list(self._members) if cached else [],
            sampling=Sampling(),
            holder_tokens=held if cached else [],
        )

    def _newest(self, number: int, master: int, at: int, count: int) -> Extend:
        segment = self._segment()
        cached = [self._blocks[(at + i) % NUM_BLOCKS] for i in range(count)]
        return Extend(
            request_id=str(segment),
            tokens=self._some(1),
            start=count * self.block_tokens or self.tiny_tokens,
            master=master,
            segment=segment,
            keep=[],
            cached=cached or [self._tiny[number % _NUM_TINY]],
            holders=list(self._members),
            sampling=Sampling(),
        )

    def _some(self, count: int) -> bytes:
        known = self._tokens
        return pack_tokens((known * (count // len(known) + 1))[:count])

    async def _run(self, batch: list[Extend]) -> float:
        return await self._exclusive.run(self._step(batch))

    def _step(self, batch: list[Extend], *, follows: int = 0) -> RunStep:
        return RunStep(
            step_id=self._exclusive.next_step_id(),
            epoch=self._exclusive.epoch,
            members=self._members,
            batch=batch,
            follows=follows,
        )


def _one_more(extend: Extend) -> Extend:
    """The same request a step later: its token is not drawn yet, and its segment is begun."""
    begun = (
        extend.cached if extend.cached[-1] == extend.segment else [*extend.cached, extend.segment]
    )
    return msgspec.structs.replace(extend, tokens=b"", start=extend.start + 1, cached=begun)
