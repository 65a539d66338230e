"""Step 1 of LoongServe: which waiting requests may prefill now, and whose decode they interrupt.

First come, first served, on two conditions. Slots: a request is admitted when what all running
and admitted requests may still grow to leaves room for it. Order: two kinds may pass.
- While the first request without room waits, short and cheap ones behind it may start if room for
  it remains once every request older than it has ended. So it waits for those at most, never for
  who passed; after `max_passes` of them nobody passes any more.
- A long prompt that has room but no instance is passed by short ones, and by cheaper long ones
  (least predicted time x length first), until it has waited `URGENT_WAITS` times the configured
  bound or its own prefill time on one instance, whichever is longer: then an instance is held
  for it, and such prompts go in order of arrival, those with some chunks done too. (A bound in
  seconds alone would turn every overload into first come, first served, where a document waits
  for a library.)

A prompt is short when one instance computes it within the bound and one has room for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from math import inf

from loongd.sched.admission import never_fits
from loongd.sched.chunks import largest_within, longest_short
from loongd.sched.draft import Draft
from loongd.sched.plan import PrefillPlan
from loongd.sched.policy import GiveUp, View
from loongd.sched.request import Request
from loongd.sched.sib import Sib

# How far behind the head requests are looked at in one round, and how many are taken from there.
MAX_DEPTH = 256
MAX_SHORTS = 64
MAX_LONGS = 128
# The batch leaves the memory-bound regime when its fixed time is less than this share.
FIXED_SHARE = 0.1
URGENT_WAITS = 10
# What passes the head takes at most this share of the head's own prefill time.
PASS_SHARE = 0.25
# What passes a chunk in parts takes at most this share of what is left of it.
PART_PASS_SHARE = 0.5
# Others make it at most so many times as long as it takes alone, but for decode steps and short
# prompts, which have their turns between all its parts.
PART_PATIENCE = 2.0
# Lengths whose times are kept between rounds.
MAX_KNOWN = 65536
# Before any request has finished: the decode time of so many tokens alone.
PRIOR_DECODE_TOKENS = 256


class AloneTimes:
    """Predicted times of whole prompts alone on one instance, computed once for each length while
    predictions stay what they are: a queue is looked at again and again."""

    def __init__(self, sib: Sib) -> None:
        self._sib = sib
        self._known: dict[int, float] = {}
        self._longest: dict[float, int] = {}
        self.costs = sib.prefill_coefficients(1)

    def refresh(self) -> None:
        """Forget what was computed from other coefficients than those in force now."""
        costs = self._sib.prefill_coefficients(1)
        if costs is not self.costs or len(self._known) > MAX_KNOWN:
            self.costs = costs
            self._known.clear()
            self._longest.clear()

    def alone_s(self, num_tokens: int) -> float:
        """Seconds of a whole prompt alone on one instance."""
        found = self._known.get(num_tokens)
        if found is None:
            found = self._known[num_tokens] = self.costs.alone_s(0, num_tokens)
        return found

    def longest_short(self, bound_s: float) -> int:
        """See `chunks.longest_short`."""
        found = self._longest.get(bound_s)
        if found is None:
            found = self._longest[bound_s] = longest_short(self.costs, bound_s)
        return found


class Dispatch:
    """One round: fills `shorts` and `longs` (both in order of the queue), and `give_ups`.

    Attributes:
        blocked: the first request of the queue that the pool has no room for.
        is_short_of_room: no instance has room for the longest prompt that is quick enough.
    """

    def __init__(self, view: View, draft: Draft, sib: Sib, alone: AloneTimes) -> None:
        self.shorts: list[Request] = []
        self.longs: list[Request] = []
        self.give_ups: list[GiveUp] = []
        self.blocked: Request | None = None
        self._view = view
        self._draft = draft
        self._sib = sib
        self._bound_s = view.limits.max_prefill_wait_s
        alone.refresh()
        self._costs = alone.costs
        self._alone_s = alone.alone_s
        largest = alone.longest_short(self._bound_s)
        reserved = draft.reserved
        most_room = max([slots - reserved[i] for i, slots in draft.free.items()], default=0)
        self._short_tokens = min(largest, most_room, view.limits.max_step_tokens)
        self.is_short_of_room = self._short_tokens == most_room

    # ---- admission -----------------------------------------------------------------------------

    def admit(self) -> None:
        """Go through the queue as far as anything there may start.

        Of long prompts one starts at a time. The oldest counts as admitted, so that nobody takes
        its room; each other is a candidate when it fits beside those before it that count, and
        `fit_now` is asked again when it starts.
        """
        limits, shorts, longs = self._view.limits, self.shorts, self.longs
        total_slots, known_slots = self._draft.total_slots, self._draft.known_slots
        committed, num_running = self._draft.committed, self._draft.num_running
        slack = num_behind = 0
        head: Request | None = None
        if num_running >= limits.max_num_seqs:
            return
        fitting = (
            request
            for request in self._within_sight()
            if (request.committed_tokens <= total_slots and request.limit_tokens <= known_slots)
            or self._can_fit(request)
        )
        for request in fitting:
            need = request.committed_tokens
            if head is None:
                head = request
            elif head.num_passed + num_behind >= limits.max_passes:
                return
            is_short = self.is_short(request)
            kind, most = (shorts, MAX_SHORTS) if is_short else (longs, MAX_LONGS)
            if committed + need > total_slots:
                if self.blocked is None:
                    self.blocked = request
                    slack = total_slots - need - self._younger(request)
                continue
            may_pass = self.blocked is None or (need <= slack and self._is_cheap(request))
            if not may_pass or len(kind) == most:
                continue
            kind.append(request)
            if is_short or len(longs) == 1:
                num_behind += request is not head
                committed += need
                slack -= need
                num_running += 1
            is_enough = len(shorts) == MAX_SHORTS and len(longs) == MAX_LONGS
            if is_enough or num_running >= limits.max_num_seqs:
                return

    def _within_sight(self) -> Iterator[Request]:
        """The front of the queue, and the first short ones behind it: a queue of documents hides
        no short prompt."""
        front = list(islice(self._view.waiting, MAX_DEPTH))
        return chain(front, self._shorts_behind(front))

    def _shorts_behind(self, front: Sequence[Request]) -> Iterator[Request]:
        if len(front) < MAX_DEPTH or len(self.shorts) == MAX_SHORTS:
            return
        last = front[-1].order
        for request in islice(self._view.shorter(self._short_tokens), MAX_DEPTH):
            if request.order > last:
                yield request

    def would_be_short(self, more_tokens: int) -> bool:
        """With so many slots more some prompt that waits would be short, for want of which it is
        long."""
        if not self.is_short_of_room:
            return False
        least, most = self._short_tokens, self._short_tokens + more_tokens
        front = islice(self._view.waiting, MAX_DEPTH)
        behind = islice(self._view.shorter(most), MAX_DEPTH)
        return any(least < request.num_tokens <= most for request in chain(front, behind))

    def _is_cheap(self, request: Request) -> bool:
        """It may pass the first request without room."""
        assert self.blocked is not None
        num_tokens = request.num_tokens
        return num_tokens <= self._short_tokens or (
            self._alone_s(num_tokens) <= PASS_SHARE * self._alone_s(self.blocked.num_tokens)
        )

    def _can_fit(self, request: Request) -> bool:
        """False also for a request that has to wait until a lost instance returns."""
        give_up = never_fits(request, self._draft.known_slots)
        if give_up is not None:
            self.give_ups.append(give_up)
            return False
        return request.committed_tokens <= self._draft.total_slots

    def fit_now(self, *requests: Request) -> bool:
        """They are admitted beside all that runs or starts in this round."""
        draft = self._draft
        committed = draft.committed + sum([request.committed_tokens for request in requests])
        num_running = draft.num_running + len(requests)
        return committed <= draft.total_slots and num_running <= self._view.limits.max_num_seqs

    def _younger(self, head: Request) -> int:
        """What running requests that are younger than `head` may grow to."""
        running = self._view.running.values()
        return sum(r.committed_tokens for r in running if r.order > head.order)

    def is_short(self, request: Request) -> bool:
        """One instance computes it within the bound, or soon after, and one has room for it."""
        return request.num_tokens <= self._short_tokens

    # ---- order ---------------------------------------------------------------------------------

    def waited_s(self, request: Request) -> float:
        """Seconds since it began to wait."""
        return self._view.now - request.queued_s

    def late_s(self, request: Request) -> float:
        """When it has waited for as long as its prefill takes, or for the bound: from then on a
        long one may interrupt a decode group that has had its time, and a short one need not wait
        for an instance without an unfinished prefill."""
        own_s = self._alone_s(request.num_tokens)
        return request.arrived_s + min(self._bound_s, own_s)

    def is_late(self, request: Request) -> bool:
        """See `late_s`."""
        return self._view.now >= self.late_s(request)

    def is_urgent(self, request: Request) -> bool:
        """A long prompt was passed for long enough, before its first chunk or after it."""
        return self._view.now >= self.urgent_s(request)

    def urgent_s(self, request: Request) -> float:
        """When a long prompt becomes urgent, if it is not done by then."""
        return self._urgent_s(request, self._alone_s(request.num_tokens))

    def _urgent_s(self, request: Request, time_s: float) -> float:
        return request.arrived_s + URGENT_WAITS * max(self._bound_s, time_s)

    def rank(self, request: Request) -> tuple[int, float, int]:
        """Sorts long prompts: urgent ones by age, others by predicted time x length.

        A chunk in parts is finished before prompts begin that take more than a share of what is
        left of it, and before all when it has come less far than `due_s` allows: while it is paused
        it holds its instances, slots and memory.
        """
        if request.part is not None and self._view.now >= self.due_s(request):
            return (-1, 0.0, request.order)
        return self._rank(request, request.part)

    def ahead_s(self, other: Request, request: Request) -> float:
        """Seconds, of one instance, of an unfinished prefill that go before a waiting one: all that
        is left of it, or what is left of its chunk in parts, or none."""
        rank = self.rank(request)
        if self._rank(other, None) < rank:
            return self._costs.alone_s(other.done_tokens, other.undone_tokens)
        if other.part is not None and self.rank(other) < rank:
            return other.part.dop * self._part_s(other.part)[1]
        return 0.0

    def _rank(self, request: Request, part: PrefillPlan | None) -> tuple[int, float, int]:
        time_s = self._alone_s(request.num_tokens)
        if self._view.now >= self._urgent_s(request, time_s):
            return (0, 0.0, request.order)
        if part is not None:
            passed_s = PART_PASS_SHARE * self._part_s(part)[1]
            passed = largest_within(self._costs, cached=0, time_s=passed_s)
            return (1, passed_s * passed, request.order)
        cached, left = request.done_tokens, request.undone_tokens
        left_s = time_s if cached == 0 else self._costs.alone_s(cached, left)
        return (1, left_s * left, request.order)

    def due_s(self, request: Request) -> float:
        """When the next part of its chunk is due: others may make it `PART_PATIENCE` times as long
        as the parts before take alone. Minus infinity without one."""
        if request.part is None:
            return -inf
        return request.chunk_began_s + PART_PATIENCE * self._part_s(request.part)[0]

    def _part_s(self, part: PrefillPlan) -> tuple[float, float]:
        """What a chunk takes up to the end of one of its parts, and what behind it."""
        lengths = [(item.start, item.num_tokens) for item in part.items]
        done = 1.0 if part.layers is None else part.layers.end / part.layers.total
        chunk_s = self._sib.prefill_s(part.dop, lengths)
        return chunk_s * done, chunk_s * (1.0 - done)

    def best_long(self) -> Request | None:
        """The waiting long prompt of least rank."""
        return min(self.longs, key=self.rank, default=None)

    # ---- batches of short prompts --------------------------------------------------------------

    @property
    def tipping_s(self) -> float:
        """How long a batch may take: then its fixed time is a tenth, and nobody waits longer."""
        fixed_s = max(self._costs.alpha_s + self._costs.item_s, self._costs.floor_s)
        return min(fixed_s / FIXED_SHARE, self._bound_s)

    def take(self, requests: Iterable[Request], instances: Sequence[int]) -> list[Request]:
        """The first requests that the instances compute, one each, up to the tipping point.

        A request without room is left out; the first with room always goes. Each counts for what
        it adds to a step: the least time of a step is a batch's, not that of each of its requests.
        """
        costs = self._costs
        rooms = [max(0, self._draft.room(i)) for i in instances]
        room, most = sum(rooms), max(rooms)
        left_s = (self.tipping_s - costs.alpha_s) * len(instances)
        left_tokens = self._view.limits.max_num_batched_tokens * len(instances)
        taken: list[Request] = []
        for request in requests:
            num_tokens = request.num_tokens
            if num_tokens > min(room, most):
                continue
            left_s -= costs.added_s(num_tokens)
            left_tokens -= num_tokens
            room -= num_tokens
            if taken and (left_s < 0 or left_tokens < 0):
                break
            taken.append(request)
        return taken

    def batches(self, requests: Iterable[Request]) -> list[list[Request]]:
        """How `take` cuts a queue, again and again, for one instance with room for all."""
        found: list[list[Request]] = []
        left_s = left_tokens = 0.0
        for request in requests:
            num_tokens = request.num_tokens
            added_s = self._costs.added_s(num_tokens)
            if not found or left_s < added_s or left_tokens < num_tokens:
                found.append([])
                left_s = self.tipping_s - self._costs.alpha_s
                left_tokens = self._view.limits.max_num_batched_tokens
            found[-1].append(request)
            left_s -= added_s
            left_tokens -= num_tokens
        return found

    def weigh(self, taken: Sequence[Request], batch: Sequence[Request]) -> tuple[float, float]:
        """Gain and cost (seconds per token) of prefilling `taken` where `batch` decodes.

        LoongServe section 4.1. Cost: what the batch is delayed, by its tokens so far. Gain: the
        decode time that would have to pass before the batch ends, by the prompts' lengths.
        """
        now = self._view.now
        time_s = self._costs.time_s([(0, request.num_tokens) for request in taken])
        cost = sum([time_s / (request.num_generated or 1) for request in batch])
        exec_s = min([now - (r.first_token_s or now) for r in batch], default=0.0)
        wait_s = max(0.0, self.avg_decode_s() - exec_s)
        return sum([wait_s / request.num_tokens for request in taken]), cost

    def avg_decode_s(self) -> float:
        """How long answers take, as far as is known."""
        if self._view.avg_decode_s is not None:
            return self._view.avg_decode_s
        step_s = self._sib.decode_s(dop=1, num_masters=1, batch=1, kv_tokens=1)
        return step_s * PRIOR_DECODE_TOKENS
