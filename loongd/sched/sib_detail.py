"""What measurements add to the formulas of `sched.sib_profile`: times that no line follows.

Knows: how a finer prefill formula and a grid of measured decode times are evaluated, and what must
hold so that no prediction of one kind falls when work is added. Does not know: how they are fitted
(`sched.sib_fit_detail`), or the coefficients that serve outside the measured range.

Prefill, for one degree of parallelism. A step is launched by the host and computed by the device,
at the same time; the slower one counts:
    host = step + item * requests + chunk * chunks + long * long chunks
    device = step + item * requests + many * [requests > 1] + chunk * chunks
             + chunk_token * sum(new of chunks) + cached * sum(cached) + rows(sum(new))
             + square * sum(new^2) + sum(2 * cached * (cross * tiles(new)
                                                       + few * min(tiles(new), few tokens)))
             + early * sum(2 * min(cached, early tokens) * new)
    T = max(host, device)
A chunk is a request with cached tokens: its queries travel, so it costs more than a fresh prompt
of its length; and few queries take as long as reading what they attend to, hence `cached`. Kernels
take queries in tiles, so `tiles` rounds them up; those that fit into half a tile are taken by a
kernel of smaller tiles. The first new tokens of a chunk cost more, `few`, and the first cached
ones, `early`: libraries attend faster to many keys with many queries. A long chunk is one whose
attention the kernels cut into pieces, each with launches of its own. `rows` is what the linear
layers take for so many rows: linear between measured points, for products of matrices have a best
size.

Steps so small that a GPU replays them, padded to a few sizes, are of another kind: no host holds
them up, and other kernels and members do the work. They have coefficients of their own, so that a
little more work may be foreseen to take less where it makes a step one of another kind.

Decode, for one (dop, masters): times over (requests of the busiest master, KV tokens of a member).
A CUDA graph serves a range of batches, products of few rows have steps, and attention over little
KV is all latency, so times are looked up, bilinear between their neighbours.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import msgspec

Table = tuple[tuple[int, float], ...]


def look_up(table: Table, at: float, beyond: float = 0.0) -> float:
    """Linear between the rows of (place, seconds), in ascending order; constant before the first,
    `beyond` more for each step after the last."""
    high = bisect_left(table, at, key=_place)
    if high == len(table):
        return table[-1][1] + beyond * (at - table[-1][0])
    place, seconds = table[high]
    if high == 0 or place == at:
        return seconds
    low_place, low_seconds = table[high - 1]
    return low_seconds + (seconds - low_seconds) * (at - low_place) / (place - low_place)


def _place(row: tuple[int, float]) -> int:
    return row[0]


def padded(sizes: Sequence[int], tokens: int) -> int:
    """The smallest of the ascending `sizes` that is not below `tokens`; `tokens` beyond them."""
    at = bisect_left(sizes, tokens)
    return sizes[at] if at < len(sizes) else tokens


def tiled(tokens: int, tile_tokens: int, half_tokens: int = 0) -> int:
    """`tokens` rounded up to whole tiles; half a tile or less is as good as `half_tokens`, unless
    that is 0."""
    if half_tokens and 2 * tokens <= tile_tokens:
        return half_tokens
    return -(-tokens // tile_tokens) * tile_tokens


LONG_NEW_TOKENS = 512
LONG_CACHED_TOKENS = 2048
"""New and cached tokens of each member from which a chunk is long."""
EARLY_CACHED_TOKENS = 16384
"""Cached tokens of each member of which the keys are attended to in small pieces."""


SMALL_ITEMS = 32
SMALL_PAIRS = 32 << 20
SMALL_GROUP_PAIRS = 96 << 20
SMALL_LEAST_PAIRED = 320
SMALL_DEALT_TOKENS = 257
"""Limits of steps that the workers replay: on one instance `worker.prefill_layout`, on a group
`worker.striped_layout` and for few tokens `worker.group_layout`, there the pairs of each member.
Steps of `SMALL_DEALT_TOKENS` new tokens or more are dealt out to the members of a group."""


def dealt_to(dealt: int, items: Sequence[tuple[int, int]]) -> int:
    """Members that share the new tokens of (cached, new) `items`, where larger steps are `dealt` to
    so many and smaller ones are computed by all."""
    return dealt if sum([new for _, new in items]) >= SMALL_DEALT_TOKENS else 1


class HostCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What the host needs to launch a prefill step, in seconds; a chunk that is long by both
    numbers of tokens (of the whole group) costs `long_s` more."""

    step_s: float
    item_s: float
    chunk_s: float
    long_s: float = 0.0
    long_new_tokens: int = LONG_NEW_TOKENS
    long_cached_tokens: int = LONG_CACHED_TOKENS

    def time_s(self, items: Sequence[tuple[int, int]]) -> float:
        """Seconds to launch a step; `items` are (cached, new) tokens."""
        chunks = long = 0
        for cached, new in items:
            chunks += cached > 0
            long += new >= self.long_new_tokens and cached >= self.long_cached_tokens
        return self.step_s + self.item_s * len(items) + self.chunk_s * chunks + self.long_s * long


class PrefillDetail(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill time of one degree of parallelism; the module says what each number means. `host`
    is None where the device was always the slower one; `padded_sizes` (ascending) are the numbers
    of new tokens to which steps are padded, and queries of chunks come in `tile_tokens`, of each
    member where they are `dealt` to so many; half of that or fewer count as `half_tokens`, unless
    it is 0."""

    step_s: float
    item_s: float
    many_s: float
    chunk_s: float
    chunk_token_s: float
    cached_s: float
    square_s: float
    cross_s: float
    token_s: float
    rows: Table
    host: HostCosts | None = None
    padded_sizes: tuple[int, ...] = ()
    few_s: float = 0.0
    few_tokens: int = LONG_NEW_TOKENS
    early_s: float = 0.0
    early_tokens: int = EARLY_CACHED_TOKENS
    tile_tokens: int = 1
    half_tokens: int = 0
    dealt: int = 1

    def time_s(self, items: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step; `items` are (cached_tokens, new_tokens)."""
        members = dealt_to(self.dealt, items)
        new = square = cross = few = early = chunks = chunk_tokens = cached_tokens = 0
        for cached, count in items:
            new += count
            square += count * count
            if cached:
                chunks += 1
                chunk_tokens += count
                cached_tokens += cached
                queries = tiled(count, members * self.tile_tokens, members * self.half_tokens)
                cross += 2 * cached * queries
                few += 2 * cached * min(queries, self.few_tokens)
                early += 2 * min(cached, self.early_tokens) * count
        device_s = (
            self.step_s
            + self.item_s * len(items)
            + (self.many_s if len(items) > 1 else 0.0)
            + self.chunk_s * chunks
            + self.chunk_token_s * chunk_tokens
            + self.cached_s * cached_tokens
            + look_up(self.rows, padded(self.padded_sizes, new), self.token_s)
            + self.square_s * square
            + self.cross_s * cross
            + self.few_s * few
            + self.early_s * early
        )
        return device_s if self.host is None else max(device_s, self.host.time_s(items))

    def fault(self) -> str:
        """What makes a prediction fall when work is added; empty when nothing does."""
        numbers = msgspec.structs.asdict(self)
        numbers.pop("rows")
        sizes = numbers.pop("padded_sizes")
        host = numbers.pop("host")
        if host is not None:
            numbers |= {f"host {name}": s for name, s in msgspec.structs.asdict(host).items()}
        bad = [name for name, value in numbers.items() if not 0 <= value < float("inf")]
        if bad:
            return f"{bad} must not be negative"
        if self.tile_tokens < 1:
            return "tile_tokens must be 1 or more"
        if self.half_tokens > self.tile_tokens:
            return "half_tokens must not be above tile_tokens"
        if 0 < 2 * self.half_tokens < self.tile_tokens:
            return "half_tokens must be half of tile_tokens or more, or 0"
        if sizes and (sizes[0] < 1 or not _rises(sizes, strictly=True)):
            return "padded_sizes must be ascending"
        return "" if self.rows and is_rising(self.rows) else "rows must be ascending"


class SmallLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Which prefill steps are replayed in one way: those of at most `most_items` requests,
    `most_tokens` new tokens, and `most_pairs` pairs of a new token and a cached one (a new one too
    if `own_paired`); requests of fewer than `least_paired` new tokens count none. Without
    `prompts` only those with cached tokens. Where new tokens are `dealt` to so many members, each
    request counts as a multiple of that, as many as the first of them has."""

    most_items: int
    most_tokens: int
    most_pairs: int
    least_paired: int
    own_paired: bool
    prompts: bool = True
    dealt: int = 1

    def covers(self, items: Sequence[tuple[int, int]]) -> bool:
        """Whether a step of (cached, new) tokens is one of them."""
        new = pairs = most_cached = 0
        for cached, count in items:
            new += tiled(count, self.dealt)
            most_cached = max(most_cached, cached)
            if count >= self.least_paired:
                pairs += count * (cached + count if self.own_paired else cached)
        few = len(items) <= self.most_items and new <= self.most_tokens
        return few and pairs <= self.most_pairs and (self.prompts or most_cached > 0)


def small_limits(dop: int, most_prompt: int, most_chunk: int) -> tuple[SmallLimits, ...]:
    """Of each way in which the workers replay steps, for the largest sizes of new prompts and of
    steps with older tokens: on one instance there is one way; the members of a group deal out new
    tokens, and of a chunk each looks at its older tokens for all."""
    if dop == 1:
        alone = SmallLimits(
            most_items=SMALL_ITEMS,
            most_tokens=most_prompt,
            most_pairs=SMALL_PAIRS,
            least_paired=SMALL_LEAST_PAIRED,
            own_paired=True,
        )
        return (alone,)
    prompts = SmallLimits(
        most_items=SMALL_ITEMS - 1,
        most_tokens=most_prompt,
        most_pairs=0,
        least_paired=1,
        own_paired=False,
        dealt=dop,
    )
    chunks = SmallLimits(
        most_items=SMALL_ITEMS - 1,
        most_tokens=most_chunk,
        most_pairs=SMALL_GROUP_PAIRS * dop,
        least_paired=1,
        own_paired=False,
        prompts=False,
        dealt=dop,
    )
    return prompts, chunks


class SmallSteps(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill steps that are replayed in one way, and their times."""

    limits: SmallLimits
    detail: PrefillDetail

    @property
    def most_s(self) -> float:
        """Seconds of the largest new prompt of them, 0 if there is none: no larger one takes
        less."""
        largest = [(0, self.limits.most_tokens)]
        return self.detail.time_s(largest) if self.limits.prompts else 0.0


class DecodeGrid(msgspec.Struct, frozen=True, kw_only=True):
    """Measured decode times: `times_s[i][j]` with `batches[i]` requests of the busiest master and
    `kv_tokens[j]` tokens read by each member."""

    batches: tuple[int, ...]
    kv_tokens: tuple[int, ...]
    times_s: tuple[tuple[float, ...], ...]

    def clamp(self, busiest: int, kv_tokens: float) -> tuple[int, float]:
        """The nearest place inside the grid."""
        most = min(max(busiest, self.batches[0]), self.batches[-1])
        return most, min(max(kv_tokens, self.kv_tokens[0]), self.kv_tokens[-1])

    def has(self, busiest: int, least_kv: float, most_kv: float) -> bool:
        """Whether all places of this batch from `least_kv` to `most_kv` are inside the grid."""
        least, most = self.kv_tokens[0], self.kv_tokens[-1]
        inside = least <= least_kv and most_kv <= most
        return inside and self.batches[0] <= busiest <= self.batches[-1]

    def time_s(self, busiest: int, kv_tokens: float) -> float:
        """Seconds at a place inside the grid."""
        row, right = _between(self.batches, busiest)
        column, below = _between(self.kv_tokens, kv_tokens)
        first = self._mixed(row, column, right)
        if below == 0.0:
            return first
        return first + (self._mixed(row, column + 1, right) - first) * below

    def times_of(self, busiest: int, kv_tokens: Sequence[float]) -> list[float]:
        """`time_s` at several places of one batch, to the last bit."""
        row, right = _between(self.batches, busiest)
        line = [self._mixed(row, column, right) for column in range(len(self.kv_tokens))]
        times = []
        for at in kv_tokens:
            column, below = _between(self.kv_tokens, at)
            first = line[column]
            times.append(first if below == 0.0 else first + (line[column + 1] - first) * below)
        return times

    def _mixed(self, row: int, column: int, right: float) -> float:
        """Seconds between a row and the next, at one number of tokens."""
        first = self.times_s[row][column]
        if right == 0.0:
            return first
        return first + (self.times_s[row + 1][column] - first) * right

    def fault(self) -> str:
        """What makes a prediction fall when work is added; empty when nothing does."""
        axes = (self.batches, self.kv_tokens)
        if not all(axis and axis[0] >= 0 and _rises(axis, strictly=True) for axis in axes):
            return "batches and kv_tokens must be ascending"
        wanted = [len(self.kv_tokens)] * len(self.batches)
        if [len(row) for row in self.times_s] != wanted:
            return "times_s must have a time for each batch and kv_tokens"
        lines = [*self.times_s, *zip(*self.times_s, strict=True)]
        if not all(line[0] > 0 and _rises(line) for line in lines):
            return "times_s must be above 0 and not fall"
        return ""


def is_rising(table: Table) -> bool:
    """Whether places are in ascending order, none below 0, and seconds never fall."""
    places, seconds = zip(*table, strict=True)
    return places[0] >= 0 and seconds[0] >= 0 and _rises(places, strictly=True) and _rises(seconds)


def _rises(values: Sequence[float], *, strictly: bool = False) -> bool:
    return all(a < b or (a == b and not strictly) for a, b in pairwise(values)) and (
        values[-1] < float("inf")
    )


def _between(places: Sequence[int], at: float) -> tuple[int, float]:
    """The index of the place at or before `at`, and how far `at` is towards the next, 0 to 1."""
    high = bisect_left(places, at)
    if high == len(places):
        return high - 1, 0.0
    if high == 0 or places[high] == at:
        return high, 0.0
    low = places[high - 1]
    return high - 1, (at - low) / (places[high] - low)
