"""Long prefills in elastic chunks: between two of them anything may happen to the instances.

Beyond the paper. A long prompt is computed in chunks, and one that takes longer than the bound in
parts of so many layers (`sched.chunks`). KV of finished chunks stays where it is, so those
instances are in the group of every later chunk; any other instance may join for one chunk and
leave after it. After a chunk, and after each part of one, the decoding requests there get their
share of the time that it took, and short prompts their turn, before the next; but a chunk's group
stays to its end.

The best long prompt (`Dispatch.rank`) goes first. One that waits finds its first instance in this
order: an empty one, one whose decoding requests can move, then, once it has waited for the bound,
the one where it interrupts least. Instances that it needs but that are busy are held for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from loongd.sched.allocate import Allocate
from loongd.sched.chunks import (
    Pace,
    alone,
    beside_part,
    first_layers,
    in_one_step,
    in_parts,
    left_s,
    next_chunk,
    next_layers,
)
from loongd.sched.dispatch import Dispatch
from loongd.sched.draft import Draft
from loongd.sched.plan import Layers, PrefillPlan
from loongd.sched.policy import Hold, Placed, StartMigrate, StartPart, StartPrefill, View
from loongd.sched.prefilling import (
    describe_kept,
    describe_part,
    find_keepers,
    fit_keepers,
    put_chunk,
)
from loongd.sched.request import Request
from loongd.sched.sib import Sib
from loongd.sched.words import name_instances, plural


class ElasticPrefill:
    """One round: fills `started`, `parts` and `migrations`, and holds instances in the draft.

    Attributes:
        starved: an unfinished prefill for which the whole pool has no free slot.
    """

    def __init__(
        self, view: View, draft: Draft, sib: Sib, *, dispatch: Dispatch, allocate: Allocate
    ) -> None:
        self.started: list[StartPrefill] = []
        self.parts: list[StartPart] = []
        self.migrations: list[StartMigrate] = []
        self.starved: Request | None = None
        self._view = view
        self._draft = draft
        self._sib = sib
        self._dispatch = dispatch
        self._allocate = allocate
        self._first = dispatch.best_long()
        self._unfinished: Sequence[Request] = allocate.unfinished
        if len(self._unfinished) > 1:
            self._unfinished = sorted(self._unfinished, key=dispatch.rank)

    # ---- a prompt that waits -------------------------------------------------------------------

    @property
    def first(self) -> Request | None:
        """The waiting long prompt that is next, if it goes before all unfinished ones."""
        if self._first is None or not self._dispatch.fit_now(self._first):
            return None
        return None if self._is_behind(self._first) else self._first

    @property
    def is_first_behind(self) -> bool:
        """No long prompt waits, or an unfinished prefill goes before the best of them."""
        return self._first is None or self._is_behind(self._first)

    def is_held_for(self, hold: Hold) -> bool:
        """An instance is held for the best long prompt that waits, which has been passed for long
        enough."""
        first = self._first
        if first is None or first.request_id != hold.request_id:
            return False
        return self._dispatch.is_urgent(first) and not self._is_behind(first)

    @property
    def starts_beside(self) -> bool:
        """The best long prompt that waits starts beside unfinished ones if an instance is
        empty, though they go before it: none of them runs."""
        first = self._first
        return first is not None and not self._is_running() and self._dispatch.fit_now(first)

    def _is_behind(self, request: Request) -> bool:
        """An unfinished prefill goes before it."""
        rank = self._dispatch.rank
        return bool(self._unfinished) and rank(self._unfinished[0]) <= rank(request)

    def start_urgent(self) -> None:
        """Start a prompt that was passed for long enough, or hold an instance for it."""
        first = self._first
        if first is None or not self._dispatch.is_urgent(first) or self._is_behind(first):
            return
        if self._start_on_empty(first):
            return
        instance = self._choose_for_urgent(first)
        if instance is None:
            return
        if self._allocate.is_open(instance):
            self.start(first, [instance], [], self._describe_interruption(instance))
        else:
            self._draft.held.add(instance)
            self._draft.hold = Hold(first.request_id, (instance,))

    def _choose_for_urgent(self, request: Request) -> int | None:
        draft, hold = self._draft, self._view.hold
        if hold is not None and hold.request_id == request.request_id:
            held = hold.instances[0]
            if draft.free.get(held, 0) > 0:
                return held
        choices = [i for i in draft.free if draft.free[i] > 0]
        pinned, interruption = self._allocate.pinned, self._allocate.interruption
        return min(choices, key=lambda i: (i in pinned, interruption(i), i), default=None)

    def start(
        self, request: Request, group: list[int], candidates: Sequence[int], why: str = ""
    ) -> None:
        """Start the first chunk of a waiting prompt on `group` and those that pay beside it."""
        self._allocate.extend(group, 0, request.num_tokens, candidates)
        self._start(request, keepers=group, group=group, why=self._describe_wait(request) + why)
        if request is self._first:
            self._first = None

    def _start_on_empty(self, request: Request) -> bool:
        empty = self._allocate.empty()
        if not empty or self._draft.free[empty[0]] == 0:
            return False
        self.start(request, [empty[0]], empty[1:])
        return True

    def start_first(self) -> None:
        """Find an instance for the best waiting prompt where none is empty."""
        first = self.first
        if first is None:
            return
        lent = self._allocate.lent()
        if self._move_away(first, int):
            return
        is_late = self._allocate.forced or self._dispatch.is_late(first)
        open_to = [i for i in lent if self._allocate.is_paid(i)] if is_late else []
        if not self._draft.free.keys() - self._allocate.pinned:
            open_to += self._allocate.between_chunks()
        open_to = [i for i in open_to if self._draft.free[i] > 0]
        if open_to:
            group = open_to[:1]
            candidates = self._allocate.stalled(group)
            self.start(first, group, candidates, self._describe_interruption(open_to[0]))

    # ---- prefills that go on -------------------------------------------------------------------

    def go_on(self) -> None:
        """Next chunks, best prefill first; then what is left over goes to one that waits."""
        for request in self._unfinished:
            if request.between_chunks:
                self._go_on(request)
        if self.starts_beside:
            assert self._first is not None
            self._start_on_empty(self._first)

    def _is_running(self) -> bool:
        return any(request.step_id is not None for request in self._unfinished)

    def move_away(self) -> None:
        """Let the best unfinished prefill have another instance for its next chunk, if it pays."""
        if not self._unfinished or self.migrations:
            return
        self._move_away(self._unfinished[0], self._next_dop)

    def stays_s(self, instance: int) -> float:
        """Until when the decoding requests there would not be moved for the best unfinished
        prefill; see `Allocate.stays_s`."""
        if not self._unfinished:
            return inf
        return self._allocate.stays_s(instance, self._unfinished[0], self._next_dop())

    def _next_dop(self) -> int:
        """Instances that the best unfinished prefill has, or may have for its next chunk."""
        best = self._unfinished[0]
        group = set(best.needed) | set(self._allocate.empty())
        if best.step_id is not None and best.master is not None:
            step = self._view.instances[best.master].step
            group |= set(step.members) if step is not None else set()
        return len(group)

    def _move_away(self, request: Request, dop: Callable[[], int]) -> bool:
        """Move a decode group's KV now, or hold both instances until they are idle."""
        move = self._allocate.vacate(request, dop)
        if move is None:
            return False
        draft = self._draft
        if draft.idle.issuperset(move.instances):
            self.migrations.append(move.start)
            draft.idle -= set(move.instances)
        else:
            draft.held |= set(move.instances)
        return True

    def _go_on(self, request: Request) -> None:
        draft, allocate = self._draft, self._allocate
        if request.part is not None:
            self._go_on_with(request, request.part)
            return
        is_paid = all(map(allocate.is_paid, request.holders))
        if not is_paid and max(draft.free.values()) > 0:
            return
        keepers = self._keepers(request)
        if keepers is None:
            self.starved = self.starved or request
            return
        if not self._are_free(keepers):
            return
        group = list(keepers)
        others = [i for i in allocate.empty() if i not in group] + allocate.stalled(group)
        allocate.extend(group, request.kv_tokens, request.left_tokens, others)
        keepers = fit_keepers(draft, request, keepers, group)
        self._start(request, keepers=keepers, group=group)

    def _are_free(self, instances: Sequence[int]) -> bool:
        """A prefill may start on all of them; they are held for it where only some are busy."""
        draft, allocate = self._draft, self._allocate
        if not draft.held.isdisjoint(instances) or not all(map(allocate.is_paid, instances)):
            return False
        idle = draft.idle.intersection(instances)
        if not all(map(draft.is_prefills_turn, idle)):
            return False
        if len(idle) < len(instances):
            draft.held |= set(instances)
            return False
        return True

    def _go_on_with(self, request: Request, before: PrefillPlan) -> None:
        """The next part of its chunk, on the same instances."""
        assert before.layers is not None, request
        if not self._are_free(before.members):
            return
        self._draft.idle -= set(before.members)
        self._draft.started.add(request.request_id)
        layers, (item,) = next_layers(before.layers), before.items
        chunk_s = self._sib.prefill_s(before.dop, [(item.start, item.num_tokens)])
        part_s = chunk_s * layers.share
        reason = (
            f"layers {layers.first} to {layers.end} of {layers.total} for tokens {item.start:,} to "
            f"{item.start + item.num_tokens:,} of {request.request_id} on "
            f"{name_instances(before.members)}, predicted {part_s:.3f} s of {chunk_s:.3f} s"
        )
        self.parts.append(StartPart(request, layers, reason))

    def _keepers(self, request: Request) -> list[int] | None:
        """Its holders, and others while they lack room for the next chunk."""
        draft, allocate = self._draft, self._allocate
        wanted = next_chunk(
            self._sib,
            len(request.holders),
            cached=request.kv_tokens,
            left=request.left_tokens,
            pace=self._pace(request, request.holders),
        )
        return find_keepers(
            draft,
            request,
            wanted,
            rank=lambda i: (i in allocate.pinned, not allocate.is_open(i), -draft.room(i), i),
        )

    # ---- one chunk -----------------------------------------------------------------------------

    def _start(
        self, request: Request, *, keepers: Sequence[int], group: Sequence[int], why: str = ""
    ) -> None:
        dop, cached, left = len(group), request.kv_tokens, request.left_tokens
        pace = self._pace(request, group)
        most = next_chunk(self._sib, dop, cached=cached, left=left, pace=pace)
        placed = put_chunk(self._draft, request, keepers, dop=dop, most=most)
        self._draft.idle -= set(group)
        members = tuple(sorted(group))
        layers = self._cut(members, placed.num_tokens, cached)
        reason = self._explain(placed, members, pace, layers, cached=cached, left=left) + why
        self.started.append(StartPrefill(members, (placed,), reason, layers))

    def _cut(self, members: tuple[int, ...], num_tokens: int, cached: int) -> Layers | None:
        """The first part of a chunk that takes longer than the bound, where memory allows parts."""
        limits, dop = self._view.limits, len(members)
        if self._allocate.is_beside_part(members):
            return None
        if num_tokens > in_parts(limits).most_tokens * dop:
            return None
        return first_layers(self._sib.prefill_s(dop, [(cached, num_tokens)]), limits)

    def _pace(self, request: Request, group: Sequence[int]) -> Pace:
        """How long its next chunk on this group may take."""
        limits, first = self._view.limits, self._first
        if self._allocate.is_beside_part(group):
            return beside_part(limits)
        others = [r for r in (*self._unfinished, first) if r is not request and r is not None]
        if others or len(group) < len(self._draft.free):
            return in_one_step(limits)
        cached, left = request.kv_tokens, request.left_tokens
        return alone(self._sib, len(group), cached=cached, left=left, limits=limits)

    def _explain(
        self,
        placed: Placed,
        members: tuple[int, ...],
        pace: Pace,
        layers: Layers | None,
        *,
        cached: int,
        left: int,
    ) -> str:
        request, num_tokens, dop = placed.request, placed.num_tokens, len(members)
        what = f"prefill {describe_part(placed)}"
        step_s = self._sib.prefill_s(dop, [(cached, num_tokens)])
        where = f"of {request.request_id} on {name_instances(members)} (DoP {dop})"
        kept = describe_kept([placed])
        all_s = left_s(self._sib, dop, cached=cached, left=left, pace=pace)
        fewer = ""
        if dop > 1:
            one = in_one_step(self._view.limits)
            fewer_s = left_s(self._sib, dop - 1, cached=cached, left=left, pace=one)
            but = ""
            if fewer_s < all_s:
                # chosen by whole steps, which a poor profile may tell another tale of
                whole_s = [self._sib.prefill_s(n, [(cached, left)]) for n in (dop, dop - 1)]
                but = f", but in one step {whole_s[0]:.3f} s against {whole_s[1]:.3f} s"
                if {*request.holders, *(i for i, _ in placed.keep)} == set(members):
                    but = ", had it the slots"
            fewer = f" ({fewer_s:.3f} s with one instance less{but})"
        num_parts = 1 if layers is None else -(-layers.total // layers.end)
        if num_tokens == left and not cached and num_parts == 1:
            return f"{what} {where}, predicted {step_s:.3f} s{fewer}; {kept}"
        cut = f" in {num_parts} parts" if num_parts > 1 else ""
        rest = "" if num_tokens == left else f", {all_s:.3f} s for all that is left"
        return (
            f"{what} {where}, predicted {step_s:.3f} s{cut}{rest}{fewer}, so that others get "
            f"in between; {kept}"
        )

    def _describe_wait(self, request: Request) -> str:
        """How long it has waited, if at all, and since when it may not be passed any more."""
        dispatch = self._dispatch
        waited_s = dispatch.waited_s(request)
        if not waited_s:
            return ""
        text = f"; it has waited for {waited_s:.3f} s"
        if dispatch.is_urgent(request):
            patience_s = dispatch.urgent_s(request) - request.arrived_s
            text += f" and is not passed after {patience_s:.3f} s"
        return text

    def _describe_interruption(self, instance: int) -> str:
        """Whom a prefill there keeps from decoding."""
        batch = self._allocate.batch(instance)
        if not batch:
            return ""
        cost = self._allocate.interruption(instance)
        return (
            f"; {plural(len(batch), 'decoding request')} there must wait, which costs {cost:.2e} "
            "s/token for each second"
        )
