"""Which steps are worth timing, and what to make of repeated times.

Knows: sizes. Does not know: workers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from loongd.profiling.bench import NUM_BLOCKS

Items = tuple[tuple[int, int], ...]
_MIN_TOKENS = 16
_MIN_ROUNDS = 3
_BATCHES = (1, 2, 3, 5, 7, 8, 12, 15, 16, 23, 31, 32, 47, 64, 95, 128, 191, 256, 383, 512)
"""Requests of one master; some are powers of two, for those run faster than their neighbours."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much time a profile may take.

    Args:
        max_step_s: the longest prefill step worth timing.
        max_rounds: most repetitions of one point.
        point_s: seconds that one point's repetitions may take altogether.
        max_batch: the largest decode batch.
    """

    max_step_s: float
    max_rounds: int
    point_s: float
    max_batch: int

    def rounds(self, step_s: float) -> int:
        """Repetitions of a step that took `step_s` at first; that one counts."""
        return min(max(int(self.point_s / step_s), _MIN_ROUNDS), self.max_rounds)


QUICK = Effort(max_step_s=1.2, max_rounds=9, point_s=0.8, max_batch=64)
FULL = Effort(max_step_s=4.0, max_rounds=11, point_s=3.0, max_batch=256)


@dataclass(frozen=True, slots=True)
class DecodeSize:
    """A decode batch; each of its requests reads `num_blocks` blocks."""

    batch: int
    num_blocks: int


def typical(times: Sequence[float]) -> float:
    """One time for several of the same step: the median of the fastest third.

    Warm-up, and whatever else runs on the machine, only makes steps slower.
    """
    ordered = sorted(times)
    return median(ordered[: (len(ordered) + 2) // 3])


def spread(times: Sequence[float]) -> float:
    """How much repetitions of the same step differ: their median over the fastest, less one."""
    return median(times) / min(times) - 1


def prefill_sizes(longest: int, block_tokens: int) -> list[Items]:
    """Single prompts, batches, and chunks of long prompts, up to `longest` tokens a step.

    Chunks read multiples of `block_tokens` that make at most `longest` tokens.
    """
    singles: list[Items] = []
    tokens = longest
    while tokens >= _MIN_TOKENS and len(singles) < 8:
        singles.append(((0, _uneven(tokens)),))
        tokens //= 2
    batches: list[Items] = [
        tuple((0, _uneven(each)) for _ in range(count))
        for count, each in ((2, longest // 4), (4, longest // 8), (16, longest // 64))
    ]
    chunks: list[Items] = [
        ((blocks * block_tokens, _uneven(new)),)
        for blocks, new in (
            (NUM_BLOCKS, longest // 4),
            (NUM_BLOCKS, longest // 16),
            (NUM_BLOCKS // 2, longest // 8),
            (NUM_BLOCKS // 4, longest // 2),
        )
    ]
    return [*dict.fromkeys([*singles, *batches, *chunks])]


def _uneven(tokens: int) -> int:
    """Near `tokens`, but no power of two: those run faster than prompts of any length do."""
    return max(tokens - tokens // 16 - 1, _MIN_TOKENS - 1)


def decode_sizes(max_batch: int, num_masters: int) -> list[DecodeSize]:
    """Batches from 1 to `max_batch`, shared by the masters, over little KV and over much."""
    batches = sorted({b * num_masters for b in _BATCHES if b * num_masters <= max_batch} | {1})
    sizes = [DecodeSize(batch, 1) for batch in batches]
    sizes += [DecodeSize(batch, blocks) for batch in (1, 3, 8) for blocks in (4, NUM_BLOCKS)]
    sizes.append(DecodeSize(16, 8))
    return sizes


def unseen_prefills(longest: int, block_tokens: int, seed: int, count: int) -> list[Items]:
    """Random batches of mixed lengths, some of them chunks, inside the range of the profile."""
    rng = random.Random(seed)
    found: list[Items] = []
    while len(found) < count:
        left = rng.randint(max(longest // 8, _MIN_TOKENS), max(longest, _MIN_TOKENS))
        if len(found) % 3 == 2:
            blocks = rng.randint(1, NUM_BLOCKS)
            found.append(((blocks * block_tokens, max(left // 4, _MIN_TOKENS)),))
            continue
        items: list[tuple[int, int]] = []
        while left >= _MIN_TOKENS and len(items) < 8:
            tokens = rng.randint(_MIN_TOKENS, left)
            items.append((0, tokens))
            left -= tokens
        found.append(tuple(items))
    return found


def unseen_decodes(max_batch: int, seed: int, count: int) -> list[DecodeSize]:
    """Random decode batches inside the range of the profile."""
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        batch = round(max_batch ** rng.random())
        most = max(1, min(NUM_BLOCKS, 8 * NUM_BLOCKS // batch))
        found.append(DecodeSize(batch, rng.randint(1, most)))
    return found
