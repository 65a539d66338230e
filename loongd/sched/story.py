"""Stories: what happened to each request, in sentences with numbers.

Knows: entries, the merging of equal decode steps, and how much to remember.
Does not know: how a story is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from loongd.sched.request import Phase, Request

MAX_ENDED_STORIES = 1000
# A story longer than this loses its oldest entries after the first few.
MAX_ENTRIES = 256
NUM_FIRST_ENTRIES = 8
NOTHING_KEPT: Mapping[int, int] = MappingProxyType({})


class StoryEntry(msgspec.Struct):
    """One event, or a run of chunks or decode steps with the same group and masters.

    Args:
        at_s: when it happened, or the first step began; seconds of the events' clock.
        event: arrived, prefill, decode, migrated, preempted, lost, finished, cancelled or failed.
        text: one sentence.
        group: members of the step's group; dop is their number.
        masters: members that are master of any request of the step.
        kept: where the request's KV was put by a prefill, instance to tokens.
        num_steps: finished steps in this entry.
        num_chunks: of a prefill, chunks that the entry tells of; the text is of the first.
        num_tokens: tokens computed in them for this request.
        duration_s: time that they took.
    """

    at_s: float
    event: str
    text: str
    group: tuple[int, ...] = ()
    masters: tuple[int, ...] = ()
    kept: Mapping[int, int] = msgspec.field(default_factory=lambda: NOTHING_KEPT)
    num_steps: int = 0
    num_chunks: int = 1
    num_tokens: int = 0
    duration_s: float = 0.0

    @property
    def dop(self) -> int:
        return len(self.group)


@dataclass(frozen=True, slots=True)
class Wait:
    """What a request of the queue waits for.

    Args:
        kind: workers, places, slots, turn (others wait for slots before it) or instance.
        what: that in words, with numbers.
        since_s: when it began to wait, the last time.
        num_ahead: requests before it in the queue.
        needed_slots: slots that admission counts for it: its prompt and `answer_tokens`.
        spare_slots: of `total_slots`, those that are neither used nor reserved.
    """

    request_id: str
    kind: str
    what: str
    since_s: float
    num_ahead: int
    needed_slots: int
    prompt_tokens: int
    answer_tokens: int
    spare_slots: int
    total_slots: int

    def describe(self) -> str:
        """`for ...; 4 ahead of it`."""
        ahead = f"; {self.num_ahead:,} ahead of it" if self.num_ahead else ""
        return f"for {self.what}{ahead}"


@dataclass(frozen=True, slots=True)
class Story:
    """A request's life up to now: its tokens, its entries from the oldest on, and what it waits
    for when it does."""

    prompt_tokens: int
    generated_tokens: int
    entries: tuple[StoryEntry, ...]
    wait: Wait | None = None


@dataclass(frozen=True, slots=True)
class _Tale:
    request: Request
    entries: list[StoryEntry]


class StoryBook:
    """Stories of all live requests and of the last `MAX_ENDED_STORIES` ended ones."""

    def __init__(self) -> None:
        self._live: dict[str, _Tale] = {}
        self._ended: dict[str, _Tale] = {}

    def begin(self, request: Request, entry: StoryEntry) -> None:
        """The first entry of a request."""
        self._live[request.request_id] = _Tale(request, [entry])

    def add(self, request_id: str, entry: StoryEntry) -> None:
        """One more entry of a live request."""
        entries = self._live[request_id].entries
        if len(entries) >= MAX_ENTRIES:
            del entries[NUM_FIRST_ENTRIES]
        entries.append(entry)

    def begin_decode(
        self,
        requests: Iterable[Request],
        *,
        at_s: float,
        reason: str,
        group: tuple[int, ...],
        masters: tuple[int, ...],
    ) -> None:
        """A decode step begins: a new entry for each request, unless its last one has this group
        and these masters."""
        live = self._live
        for request in requests:
            last = live[request.request_id].entries[-1]
            if last.event != "decode" or last.group != group or last.masters != masters:
                entry = StoryEntry(at_s, "decode", reason, group=group, masters=masters)
                self.add(request.request_id, entry)

    def begin_chunk(self, request_id: str, entry: StoryEntry, *, is_part: bool = False) -> None:
        """A later chunk of a prefill begins, or a later part of one: a new entry, unless the last
        one is of this group."""
        last = self._live[request_id].entries[-1]
        if last.event != "prefill" or last.group != entry.group:
            self.add(request_id, entry)
            return
        kept = dict(last.kept)
        for instance, num_tokens in entry.kept.items():
            kept[instance] = kept.get(instance, 0) + num_tokens
        last.kept = kept
        last.num_chunks += not is_part

    def steps_done(
        self,
        requests: Iterable[Request],
        num_tokens: Iterable[int],
        elapsed_s: float,
        num_steps: int = 1,
    ) -> None:
        """The step of the last entry of each request that has not ended is finished, or several;
        `num_tokens` are those that they computed for each request."""
        live = self._live
        for request, count in zip(requests, num_tokens, strict=False):
            if request.phase is not Phase.ENDED:
                last = live[request.request_id].entries[-1]
                last.num_steps += num_steps
                last.num_tokens += count
                last.duration_s += elapsed_s

    def end(self, request_id: str, entry: StoryEntry) -> None:
        """The last entry of a request."""
        self.add(request_id, entry)
        self._ended[request_id] = self._live.pop(request_id)
        if len(self._ended) > MAX_ENDED_STORIES:
            del self._ended[next(iter(self._ended))]

    def get(self, request_id: str) -> Story | None:
        """A copy of a story; None when unknown."""
        tale = self._live.get(request_id) or self._ended.get(request_id)
        if tale is None:
            return None
        request = tale.request
        entries = tuple(copy(entry) for entry in tale.entries)
        return Story(request.prompt_tokens, request.num_generated, entries)

    def ids(self) -> tuple[list[str], list[str]]:
        """Ids of the ended and of the live requests whose stories are kept, oldest first."""
        return list(self._ended), list(self._live)

    @property
    def live(self) -> frozenset[str]:
        return frozenset(self._live)
