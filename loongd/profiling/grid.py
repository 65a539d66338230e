"""Which steps are worth timing, and what to make of repeated times.

Knows: sizes. Does not know: workers.

Random batches come from seeds: those of a profile from `PROFILE_SEED`, those of a check from
another, so that no checked batch was ever profiled.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from math import inf
from statistics import median, median_low

from loongd.sched.sib_detail import LONG_CACHED_TOKENS, LONG_NEW_TOKENS
from loongd.wire import PaddedSizes

Items = tuple[tuple[int, int], ...]
NUM_BLOCKS = 128
"""Blocks of KV that chunks and decode steps read."""
PROFILE_SEED = 1
_MIN_TOKENS = 16
LEAST_ROUNDS = 3
"""Runs of a step that nothing prevents: the first does not count, and two can differ."""
_SINGLES = 12
_RANDOM_PREFILLS = 12
_MOST_REQUESTS = 24
_BATCHES = (
    *(1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16, 17, 20, 23, 24, 25, 28, 31, 32, 33, 40, 47, 48, 49),
    *(56, 63, 64, 65, 80, 95, 96, 97, 112, 127, 128, 129, 160, 191, 192, 193, 224, 255, 256, 257),
    *(320, 383, 384, 385, 512),
)
"""Requests of one master; some are powers of two, for those run faster than their neighbours, some
one less than a multiple of four, for which processors take longest, and some on both sides of the
sizes for which decode steps are captured."""
_UNEVEN_BATCHES = (2, 3, 4)
"""Requests of the busiest of several masters, of which the others have one less."""
_READING_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Of those, the ones that are measured over much KV too."""
_LEAST_SHARED = 256
_SHARED_BY = (3, 2, 6)
"""Requests that share a padded size of so many tokens or more, in turn."""
_FEW_QUERIES = (33, 190, 410)
"""New tokens of small chunks, beside what parts of the longest step give."""
_LEVELS = (NUM_BLOCKS // 16, NUM_BLOCKS // 4, NUM_BLOCKS)
"""Blocks that a decode step reads altogether, beside next to none."""


_SMALL_BATCHES = ((1, 15), (1, 63), (1, 119), (2, 31), (4, 31), (8, 15), (16, 15))
"""Requests and new tokens of each, in steps that a GPU waits for its host in."""
_SMALL_CHUNKS = ((16384, 31), (8192, 79), (5376, 119), (1024, 200))
"""Cached tokens of each member, about, and new tokens."""
_LONG_CHUNKS = (8192, 4096)
"""Cached tokens of each member under a few more than the fewest new ones of a long chunk."""
_ALONE_CHUNKS = ((2048, 1900), (12288, 1500), (24576, 1000), (40960, 700), (40960, 900))
_GROUP_CHUNKS = (
    *((2048, 7500), (4096, 5500), (8192, 3000), (24576, 3400), (32768, 1400), (65536, 700)),
    *((12288, 600), (1024, 900), (40960, 2600)),
)
"""Cached tokens of each member, about, and new tokens, of the larger replays on one instance and on
a group; the last ones are no replays, for their pairs."""
_BESIDE_REPLAYS = 4
"""Chunks that are too long to be replayed have so many times less cached tokens, for their devices
to wait for a host."""
_NOT_PADDED = PaddedSizes([], [])


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time a profile may take.

    Args:
        max_step_s: the longest prefill step worth timing.
        max_decode_s: the longest decode step over little KV worth timing.
        min_rounds: fewest runs of one point, the first of which does not count; two are enough
            for long steps of a GPU, which are the same to a per cent each time.
        max_rounds: most runs of one point.
        point_s: seconds that one point's runs may take altogether.
        burst_s: seconds that a run of a step takes at least, the step again and again.
        row_steps: decode steps in a row, the first of which does not count.
        max_batch: the largest decode batch.
        fill_s: seconds of prefill that the KV for chunks and decode steps may take.
        total_s: seconds that all points of all groups may take altogether, but for the fewest runs
            of each.
        limit_s: seconds after which no point is run that has run `LEAST_ROUNDS` times, from the
            start of a profile, warm-up and all.
        look_twice: whether the machine may be slower for a moment, so that what is worth timing is
            looked for twice.
    """

    max_step_s: float
    max_decode_s: float
    min_rounds: int
    max_rounds: int
    point_s: float
    burst_s: float
    row_steps: int
    max_batch: int
    fill_s: float
    total_s: float
    limit_s: float = inf
    look_twice: bool = False

    @property
    def told_s(self) -> float:
        """What a profile is said to take."""
        return self.total_s if self.limit_s == inf else self.limit_s

    def rounds(self, run_s: float) -> int:
        """Runs of a step, of which one has taken `run_s` at first; that one counts."""
        return min(max(int(self.point_s / run_s), self.min_rounds), self.max_rounds)

    def on_cpu(self) -> Effort:
        """For workers that share their processor with all that runs, so that steps differ each
        time: more runs of shorter steps, while there is time. No clock has to warm up and no step
        waits for its launch, so a step need not follow another of its kind."""
        return replace(
            self,
            max_step_s=min(self.max_step_s, 0.6),
            max_decode_s=min(self.max_decode_s, 0.25),
            min_rounds=self.min_rounds + 3,
            max_rounds=2 * self.max_rounds,
            point_s=2 * self.point_s,
            burst_s=0.0,
            row_steps=1,
            max_batch=self.max_batch // 4,
            total_s=2 * self.total_s,
            limit_s=3 * self.total_s,
            look_twice=True,
        )


QUICK = Effort(
    max_step_s=0.6,
    max_decode_s=0.25,
    min_rounds=2,
    max_rounds=4,
    point_s=0.3,
    burst_s=0.03,
    row_steps=5,
    max_batch=256,
    fill_s=3.0,
    total_s=60.0,
)
FULL = Effort(
    max_step_s=2.0,
    max_decode_s=0.6,
    min_rounds=2,
    max_rounds=6,
    point_s=1.0,
    burst_s=0.05,
    row_steps=7,
    max_batch=512,
    fill_s=6.0,
    total_s=140.0,
)


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """A decode batch: how many blocks each of its requests reads; 0 stands for a tiny one."""

    blocks: tuple[int, ...]

    @property
    def batch(self) -> int:
        return len(self.blocks)


def typical(times: Sequence[float]) -> float:
    """One time for several runs of the same step, in their order: the median of all but the first.

    The first compiles, plans and fills caches. The fastest one is no step's usual time where other
    work shares the machine. Of an even number of runs the lower middle one counts: whatever else
    happens only makes steps slower.
    """
    return median_low(times[1:] or times)


def spread(times: Sequence[float]) -> float:
    """How much repetitions of the same step differ: their median over the fastest, less one."""
    return median(times[1:] or times) / min(times[1:] or times) - 1


def prefill_sizes(
    longest: int,
    block_tokens: int,
    most_cached: int,
    *,
    limit: int = 0,
    padded_sizes: Sequence[int] = (),
) -> list[Items]:
    """Single prompts, batches, chunks of long prompts, and random ones, up to `longest` tokens a
    step, and one prompt of twice that within `limit`, for what lies beyond. Chunks read multiples
    of `block_tokens`, at most `most_cached` tokens. One prompt for each of `padded_sizes`, to which
    small steps are padded."""
    singles: list[Items] = [((0, _uneven(2 * longest)),)] if 2 * longest <= limit else []
    tokens = longest
    while tokens >= _MIN_TOKENS and len(singles) < _SINGLES:
        singles.append(((0, _uneven(tokens)),))
        tokens //= 2
    singles += [((0, _uneven(size)),) for size in padded_sizes if size <= longest]
    if padded_sizes:  # a little above them steps run another way
        singles += [((0, new),) for new in _just_above(padded_sizes[-1]) if new <= longest]
    shared = [s for s in padded_sizes if s >= _LEAST_SHARED and s <= longest]
    batches: list[Items] = [
        tuple((0, _uneven(longest // share)) for _ in range(count))
        for count, share in ((2, 3), (4, 32), (8, 10), (16, 64), (_MOST_REQUESTS, 256))
    ]
    batches += [
        ((0, _uneven(size) // count),) * count
        for size, count in zip(shared, cycle(_SHARED_BY), strict=False)
    ]
    most = min(NUM_BLOCKS, most_cached // block_tokens)
    chunks: list[Items] = [
        ((most // part * block_tokens, _middling(longest // share)),)
        for part in (1, 3, 9)
        for share in (2 * part, 16 * part, 128)
        if most // part
    ]
    # long chunks over little KV, as the first ones of a prompt are
    chunks += [
        ((most // part * block_tokens, _middling(longest // 2)),)
        for part in (9, 18)
        if most // part
    ]
    # few queries over much KV: as long as reading it, and queries come in tiles
    fewest = [(1, _middling(longest // 512)), *((p, n) for n in _FEW_QUERIES for p in (1, 2))]
    chunks += [
        ((most // part * block_tokens, new),)
        for part, new in fewest
        if most // part and 2 * new <= longest
    ]
    mixed = random_prefills(longest, block_tokens, most_cached, PROFILE_SEED, _RANDOM_PREFILLS)
    fitting = [items for items in batches if sum(new for _, new in items) <= longest]
    return [*dict.fromkeys([*singles, *fitting, *chunks, *mixed])]


def _just_above(tokens: int) -> tuple[int, int]:
    """A little more than `tokens`, and a little more than that."""
    return tokens + tokens // 32, tokens + tokens // 4


def _uneven(tokens: int) -> int:
    """Near `tokens`, but no power of two: those run faster than prompts of any length do."""
    return max(tokens - tokens // 16 - 1, _MIN_TOKENS - 1)


def _middling(tokens: int) -> int:
    """Near `tokens`, but not near a multiple of a large power of two: kernels take queries in such
    pieces, and the odd rest, which costs more, is neither the largest nor the smallest."""
    return max(tokens * 17 // 20, _MIN_TOKENS - 1)


def launch_sizes(
    longest: int, block_tokens: int, limit: int, dop: int, padded: PaddedSizes = _NOT_PADDED
) -> list[Items]:
    """Steps so small that a GPU waits for its host: prompts, chunks, and chunks that are long by
    `sched.sib_detail`; up to `longest` new tokens, and `limit` tokens a request. Chunks read
    multiples of `block_tokens`. Where steps are `padded` each also as much larger as it must be to
    be no replay, and more of the larger chunks that are."""

    def chunk(tokens: int, new: int) -> Items:
        most = min(NUM_BLOCKS, max(limit - new, 0) // block_tokens)
        return ((min(max(round(tokens * dop / block_tokens), 1), most) * block_tokens, new),)

    more, more_chunk = max(padded.prompts, default=0), max(padded.chunks, default=0)
    long = max(LONG_NEW_TOKENS * dop, more_chunk if dop > 1 else 0) * 9 // 8
    chunks = [chunk(*one) for one in _SMALL_CHUNKS]
    longs = [chunk(tokens, long) for tokens in _LONG_CHUNKS]
    if more_chunk:
        chunks += [
            chunk(tokens // _BESIDE_REPLAYS, new + more_chunk) for tokens, new in _SMALL_CHUNKS
        ]
        most = more_chunk - more_chunk // 16
        replayed = _GROUP_CHUNKS if dop > 1 else _ALONE_CHUNKS
        chunks += [chunk(tokens, min(new, most)) for tokens, new in replayed]
    batches = [
        ((0, new + m // count),) * count for count, new in _SMALL_BATCHES for m in sorted({0, more})
    ]
    sizes = [
        *batches,
        *(items for items in chunks if items[0][0]),
        *(items for items in longs if items[0][0] >= LONG_CACHED_TOKENS * dop),
    ]
    fitting = [items for items in sizes if sum(new for _, new in items) <= longest]
    return [*dict.fromkeys(items for items in fitting if max(map(sum, items)) <= limit)]


def decode_sizes(max_batch: int, num_masters: int, most_blocks: int) -> list[DecodeSize]:
    """Batches up to `max_batch`, shared by the masters, over next to no KV and over three amounts;
    a request reads at most `most_blocks`."""
    batches = [b * num_masters for b in _BATCHES]
    batches += [(b - 1) * num_masters + 1 for b in _UNEVEN_BATCHES] if num_masters > 1 else []
    sizes = [DecodeSize((0,) * batch) for batch in batches if batch <= max_batch]
    for batch in (b * num_masters for b in _READING_BATCHES if b * num_masters <= max_batch):
        sizes += [
            DecodeSize(deal(total, batch)) for total in _LEVELS if total <= batch * most_blocks
        ]
    return sizes


def levels(block_tokens: int, dop: int) -> list[int]:
    """KV tokens of a member, near which the sizes of `decode_sizes` lie."""
    return [0, *(total * block_tokens // dop for total in _LEVELS)]


def deal(total: int, batch: int) -> tuple[int, ...]:
    """`total` blocks among the requests of a batch, as evenly as they go, those with one more
    anywhere: a kernel shares out requests in their order, and takes longest where the short ones
    are all at its end, as they never are."""
    each, more = divmod(total, batch)
    blocks = [each + (i < more) for i in range(batch)]
    random.Random(PROFILE_SEED).shuffle(blocks)
    return tuple(blocks)


def random_prefills(
    longest: int, block_tokens: int, most_cached: int, seed: int, count: int
) -> list[Items]:
    """Random batches of mixed lengths, a third of them chunks, inside the range of a profile."""
    rng = random.Random(seed)
    most_blocks = min(NUM_BLOCKS, most_cached // block_tokens)
    least = max(_MIN_TOKENS, min(4 * _MIN_TOKENS, longest // 4))
    found: list[Items] = []
    while len(found) < count:
        total = _log_uniform(rng, least, longest)
        if len(found) % 3 == 2:
            blocks = rng.randint(0, most_blocks)
            found.append(((blocks * block_tokens, max(total // 2, _MIN_TOKENS)),))
            continue
        most = max(1, min(total // _MIN_TOKENS, _MOST_REQUESTS))
        requests = _log_uniform(rng, 1, most)
        weights = [rng.uniform(0.05, 1.0) for _ in range(requests)]
        share = (total - requests * (_MIN_TOKENS - 1)) / sum(weights)
        found.append(tuple((0, _MIN_TOKENS - 1 + max(1, int(share * w))) for w in weights))
    return found


def random_decodes(
    max_batch: int, num_masters: int, most_blocks: int, seed: int, count: int
) -> list[DecodeSize]:
    """Random decode batches inside the range of a profile, their KV dealt at random."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        batch = _log_uniform(rng, num_masters, max(max_batch, num_masters))
        total = rng.randint(0, min(NUM_BLOCKS, batch * most_blocks))
        cuts = sorted(rng.randint(0, total) for _ in range(batch - 1))
        ends = [*cuts, total]
        dealt = [end - start for start, end in zip([0, *cuts], ends, strict=True)]
        found.append(DecodeSize(_limited(dealt, most_blocks)))
    return found


def _limited(dealt: Sequence[int], most_blocks: int) -> tuple[int, ...]:
    """No request above `most_blocks`; what is cut off goes to the next that have room."""
    left = accumulate(dealt, lambda spare, n: max(0, spare + n - most_blocks), initial=0)
    return tuple(min(most_blocks, spare + n) for spare, n in zip(left, dealt, strict=False))


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    """Small sizes as often as large ones."""
    if most <= least:
        return max(most, 1)
    return min(most, max(least, int(least * (most / least) ** rng.random() + 0.5)))
