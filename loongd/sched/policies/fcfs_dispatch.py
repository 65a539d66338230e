"""Which waiting requests prefill now, on which instances (first come, first served).

Short prompts (DoP 1) take an idle instance each, then share; a long prompt takes as many as its
length asks for. The head of the queue cannot starve: what it needs is held for it, its slots count
as admitted, and requests behind it may only use the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from loongd.sched.admission import never_fits
from loongd.sched.draft import Draft
from loongd.sched.policy import GiveUp, Hold, Placed, StartPrefill, View
from loongd.sched.prefilling import describe_kept, describe_part, put, put_chunk
from loongd.sched.request import Request
from loongd.sched.sib import Sib
from loongd.sched.words import describe_prefill, name_instances, plural

# How far behind the head requests are looked at in one round.
MAX_DEPTH = 64


@dataclass(slots=True)
class _Batch:
    members: list[int]
    num_idle: int
    is_short: bool
    items: list[Placed] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.request.num_tokens for item in self.items)


class Dispatch:
    """One round: fills `prefills`, `give_ups` and the draft's `hold`."""

    def __init__(self, view: View, draft: Draft, sib: Sib | None = None) -> None:
        self.give_ups: list[GiveUp] = []
        self._sib = sib
        self._limits = view.limits
        self._view = view
        self._draft = draft
        self._batches: list[_Batch] = []
        self._available = [i for i in sorted(draft.idle - draft.held) if draft.is_prefills_turn(i)]

    def run(self) -> list[StartPrefill]:
        """Go through the queue until one cannot start; all prefills that start now."""
        depth = 0
        for request in self._view.waiting:
            if not self._can_ever_fit(request):
                continue
            if not self._is_admitted(request) or depth == MAX_DEPTH:
                break
            is_head = depth == 0
            depth += 1
            if not (self._start(request, is_head=is_head) or self._share(request)):
                if not is_head:
                    break
                self._hold(request)
        return [self._finish(batch) for batch in self._batches]

    def _can_ever_fit(self, request: Request) -> bool:
        """False also for a request that has to wait until a lost instance returns."""
        give_up = never_fits(request, self._draft.known_slots)
        if give_up is not None:
            self.give_ups.append(give_up)
            return False
        return request.committed_tokens <= self._draft.total_slots

    def _is_admitted(self, request: Request) -> bool:
        draft = self._draft
        fits = draft.committed + request.committed_tokens <= draft.total_slots
        return fits and draft.num_running < self._limits.max_num_seqs

    def _wanted_dop(self, request: Request) -> int:
        by_length = -(-request.num_tokens // self._limits.prefill_tokens_per_instance)
        return min(by_length, len(self._draft.free))

    def _soon(self) -> list[int]:
        """Busy instances that will be free within one decode step."""
        return [i for i in self._draft.free if self._draft.runs_decode(i)]

    def _start(self, request: Request, *, is_head: bool) -> bool:
        """Start a batch of its own, if available instances suffice."""
        want = self._wanted_dop(request)
        patience = self._patience(request, want) if is_head else 0
        if len(self._available) < max(1, min(want, patience)):
            return False
        group = self._choose_group(request, want)
        if group is None:
            return False
        batch = _Batch(group, len(self._available), is_short=want == 1)
        self._batches.append(batch)
        self._available = [i for i in self._available if i not in group]
        self._draft.idle -= set(group)
        self._add(batch, request)
        return True

    def _patience(self, request: Request, want: int) -> int:
        """How many instances the head waits for, counting those that only finish a decode step."""
        held = self._held_for(request)
        return len(held) or min(want, len(self._available) + len(self._soon()))

    def _held_for(self, request: Request) -> list[int]:
        hold = self._view.hold
        if hold is None or hold.request_id != request.request_id:
            return []
        return [i for i in hold.instances if i in self._draft.free]

    def _choose_group(self, request: Request, want: int) -> list[int] | None:
        """The `want` with most room, and more while they lack slots; None when all do."""
        draft = self._draft
        num_tokens = request.num_tokens
        ranked = sorted(self._available, key=lambda i: (-draft.room(i), i))
        if draft.room(ranked[0]) < num_tokens + request.growth_tokens:
            ranked.sort(key=lambda i: (-draft.free[i], i))
        return self._take(ranked, want, num_tokens)

    def _take(self, ranked: Iterable[int], size: int, num_tokens: int) -> list[int] | None:
        chosen: list[int] = []
        free = 0
        for instance in ranked:
            if len(chosen) >= size and free >= num_tokens:
                break
            if len(chosen) < size or self._draft.free[instance] > 0:
                chosen.append(instance)
                free += self._draft.free[instance]
        return chosen if free >= num_tokens else None

    def _share(self, request: Request) -> bool:
        """Join the lightest batch of short prompts with room, if this one is short too."""
        if self._wanted_dop(request) > 1:
            return False
        most = self._limits.max_num_batched_tokens - request.num_tokens
        fitting = [
            batch
            for batch in self._batches
            if batch.is_short
            and batch.num_tokens <= most
            and sum(self._draft.free[i] for i in batch.members) >= request.num_tokens
        ]
        if not fitting:
            return False
        self._add(min(fitting, key=lambda b: (b.num_tokens, b.members[0])), request)
        return True

    def _add(self, batch: _Batch, request: Request) -> None:
        dop = len(batch.members)
        most = self._limits.max_step_tokens * dop
        if request.num_tokens <= most:
            placed = put(self._draft, request, batch.members)
        else:
            placed = put_chunk(self._draft, request, batch.members, dop=dop, most=most)
        batch.items.append(placed)

    def _hold(self, request: Request) -> None:
        """Reserve what the head needs: available instances, then those that are soon free."""
        draft = self._draft
        held = self._held_for(request)
        soon = set(self._soon())
        rank = {i: 1 if i in soon else 2 for i in draft.free}
        rank.update(dict.fromkeys(self._available, 0))
        rank.update(dict.fromkeys(held, -1))
        ranked = sorted(draft.free, key=lambda i: (rank[i], -draft.room(i), i))
        size = max(1, self._patience(request, self._wanted_dop(request)))
        needed = self._take(ranked, size, request.num_tokens)
        assert needed is not None, f"{request.request_id} was admitted without room"
        draft.hold = Hold(request.request_id, tuple(sorted(needed)))
        draft.num_running += 1
        draft.committed += request.committed_tokens
        self._available = [i for i in self._available if i not in needed]

    def _finish(self, batch: _Batch) -> StartPrefill:
        members = tuple(sorted(batch.members))
        return StartPrefill(members, tuple(batch.items), self._explain(batch, members))

    def _explain(self, batch: _Batch, members: tuple[int, ...]) -> str:
        head = batch.items[0]
        what, names = describe_part(head), head.request.request_id
        if len(batch.items) > 1:
            what = f"{batch.num_tokens:,} tokens"
            names = f"{plural(len(batch.items), 'request')} ({names} first)"
        where = f"prefill {what} of {names} on {name_instances(members)}"
        share = self._limits.prefill_tokens_per_instance
        dop = f"DoP {len(members)}: {share:,} tokens per instance, {batch.num_idle} idle"
        keep = describe_kept(batch.items)
        reserved = sum(item.request.growth_tokens for item in batch.items)
        fewest = f"the fewest that hold {batch.num_tokens:,} + {reserved:,} reserved"
        lengths = [(item.request.kv_tokens, item.num_tokens) for item in batch.items]
        time = describe_prefill(self._sib, len(members), lengths)
        return f"{where} ({dop}){time}; {keep}, {fewest}"
