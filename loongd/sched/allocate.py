"""Step 2 of LoongServe: which instances prefill, and whose KV moves out of the way for it.

Idle instances without decoding requests come first; they cost nothing. Another one joins a long
prefill only while it pays: an empty one when it saves a fair share of the time left, one that
decodes when the time saved exceeds the time of moving its KV to another decode group.
Knows: what each instance is used for, gains and costs. Does not know: the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf

from loongd.sched.components import Component
from loongd.sched.draft import Draft
from loongd.sched.policy import StartMigrate, View
from loongd.sched.request import Request
from loongd.sched.sib import Sib
from loongd.sched.words import plural

# A newcomer must save this share of what a perfect one would: T / (dop + 1).
LEAST_EFFICIENCY = 0.3
# Moving KV must save so many times what it costs, and happens to a request so often at most.
LEAST_RETURN = 2.0
COOL_DOWN_S = 1.0
# Nobody knows how long an answer will be; a group is taken to decode so many more steps at most.
EXPECTED_STEPS = 256


@dataclass(frozen=True, slots=True)
class Move:
    """A migration that pays; its source or its target may still be busy."""

    start: StartMigrate
    instances: tuple[int, int]


class Allocate:
    """One round's view of the instances.

    Attributes:
        unfinished: requests with a part of their prefill to come, in a step or not.
        pinned: instances that they need.
        is_quiet: nobody waits or prefills.
    """

    def __init__(self, view: View, draft: Draft, sib: Sib, *, forced: bool = False) -> None:
        """`forced`: nothing runs, so that nobody is worth waiting for."""
        self.forced = forced
        self._view = view
        self._draft = draft
        self._sib = sib
        self._instances = view.instances
        # What is found of an instance holds for the round.
        self._interruptions: dict[int, float] = {}
        self.unfinished = tuple(view.tally.unfinished.values())
        self.pinned = {i for r in self.unfinished for i in r.needed}
        self._paused = [r.part.members for r in self.unfinished if r.part is not None]
        self.is_quiet = not view.tally.prefilling and next(iter(view.waiting), None) is None

    # ---- what an instance is good for ----------------------------------------------------------

    def is_open(self, instance: int) -> bool:
        """A prefill may start there now."""
        draft = self._draft
        return instance not in draft.held and draft.is_prefills_turn(instance)

    def is_any_open(self) -> bool:
        """A prefill may start somewhere now."""
        return any(map(self._draft.is_prefills_turn, self._draft.idle))

    def is_paid(self, instance: int) -> bool:
        """Decode has had its share of the last prefill's time there, or nobody decodes there."""
        if self.forced or instance not in self._draft.component_of:
            return True
        return self._instances[instance].decode_debt_s <= 0.0

    def paid_s(self, instance: int) -> float:
        """Before when decode will not have had its time there; minus infinity when it has, and
        infinity when it does not run."""
        if self.is_paid(instance):
            return -inf
        view = self._instances[instance]
        if view.step is None or not view.step.is_decode:
            return inf
        return view.step.started_s + view.decode_debt_s

    def empty(self) -> list[int]:
        """Open instances that nobody decodes on and no unfinished prefill needs; most room first.

        Equal ones are taken in ascending order, so that low numbers are used first."""
        draft = self._draft
        found = [i for i in draft.idle if i not in self.pinned and i not in draft.component_of]
        open_to = [i for i in found if self.is_open(i)]
        if len(open_to) > 1:
            open_to.sort(key=lambda i: (-draft.free[i], i))
        return open_to

    def lent(self) -> list[int]:
        """Open instances of decode groups, least cost of an interruption first."""
        return sorted(self._lent(), key=lambda i: (self.interruption(i), i))

    def _lent(self) -> list[int]:
        draft = self._draft
        found = [i for i in draft.idle if i not in self.pinned and i in draft.component_of]
        return [i for i in found if self.is_open(i)]

    def between_chunks(self, *, again: bool = False) -> list[int]:
        """Open instances where an unfinished prefill has just had its turn; most room first.

        With `again`, also those where others have had theirs, but decode not its time yet.
        """
        draft = self._draft
        found = (
            i
            for i in draft.idle & self.pinned
            if not self._instances[i].chunk_turn or (again and not self.is_paid(i))
        )
        return sorted(filter(self.is_open, found), key=lambda i: (-draft.room(i), i))

    def is_beside_part(self, group: Iterable[int]) -> bool:
        """A chunk of another prompt is paused, or runs in parts, on an instance of the group: its
        hidden states take a part of the memory for steps there."""
        return bool(self._held_by_parts(group))

    def _held_by_parts(self, group: Iterable[int]) -> set[int]:
        """Instances of the chunks in parts that need one of the group."""
        wanted = set(group)
        return {i for members in self._paused if not wanted.isdisjoint(members) for i in members}

    def stalled(self, group: Sequence[int]) -> list[int]:
        """Open instances that have nothing to do while the group runs: the rest of those on which
        a chunk is paused that needs an instance of the group too. Most room first."""
        draft, found = self._draft, self._held_by_parts(group)
        open_to = [i for i in found if i not in group and i not in draft.component_of]
        return sorted(filter(self.is_open, open_to), key=lambda i: (-draft.free[i], i))

    def has_other_home(self, num_tokens: int) -> bool:
        """Some instance, busy or not, has room and no unfinished prefill."""
        draft = self._draft
        others = (i for i in draft.free if i not in self.pinned)
        return any(draft.room(i) >= num_tokens for i in others)

    def batch(self, instance: int) -> Sequence[Request]:
        """Requests that cannot decode while the instance prefills."""
        component = self._draft.component_of.get(instance)
        return component.requests if component else ()

    def interruption(self, instance: int) -> float:
        """Cost of a second's prefill there, by the paper's formula."""
        found = self._interruptions.get(instance)
        if found is None:
            found = sum(1.0 / (r.num_generated or 1) for r in self.batch(instance))
            self._interruptions[instance] = found
        return found

    # ---- growing a group -----------------------------------------------------------------------

    def extend(self, group: list[int], cached: int, left: int, candidates: Iterable[int]) -> None:
        """Add candidates to a long prefill's group while each saves a fair share of its time."""
        lengths = [(cached, left)]
        time_s = self._sib.prefill_s(len(group), lengths)
        for instance in candidates:
            with_s = self._sib.prefill_s(len(group) + 1, lengths)
            if time_s - with_s < LEAST_EFFICIENCY * time_s / (len(group) + 1):
                return
            group.append(instance)
            time_s = with_s

    # ---- moving KV -----------------------------------------------------------------------------

    def vacate(self, request: Request, dop: Callable[[], int]) -> Move | None:
        """Free an instance of its decoding requests for a long prefill that has `dop()` now.

        LoongServe section 4.2: the instance with the fewest used slots joins when the prefill
        time saved exceeds the time of moving its KV; the KV goes to the decode group with most
        room. Both per input token of the same request, so times are compared.
        """
        draft = self._draft
        sources = [i for i in self._lent() if not self._is_cooling(i)]
        if not sources or any(i.step and i.step.is_migration for i in self._instances.values()):
            return None
        source = max(sources, key=lambda i: (draft.free[i] - self._instances[i].slots, -i))
        moved = [r for r in self.batch(source) if source in r.holders]
        num_tokens = sum(self._view.tokens_on(r, source) for r in moved)
        cost_s = self._sib.migrate_s(num_tokens)
        gain_s = self._gain_s(request, dop())
        if not self._pays(gain_s, cost_s):
            return None
        needed = num_tokens + sum(r.growth_tokens for r in moved if r.master == source)
        targets = [i for i in draft.component_of if self._can_take(i, source, needed)]
        if not moved or not targets:
            return None
        target = min(targets, key=lambda i: (i not in draft.idle, -draft.room(i), i))
        reason = (
            f"move {num_tokens:,} tokens of {plural(len(moved), 'request')} from instance "
            f"{source} to {target}: {cost_s:.3f} s, and the prefill of {request.request_id} "
            f"({request.undone_tokens:,} tokens left) gains {gain_s:.3f} s from instance {source}"
        )
        return Move(StartMigrate(source, target, tuple(moved), reason), (source, target))

    def stays_s(self, instance: int, request: Request, dop: int) -> float:
        """Until when its decoding requests would not be moved for `request` while all decoding
        ones only grow: then the move costs more and needs more room, and no target has more.
        Infinity when it does not pay; minus infinity when they would be moved now."""
        if instance in self.pinned:
            return inf
        moved = [r for r in self.batch(instance) if instance in r.holders]
        num_tokens = sum([self._view.tokens_on(r, instance) for r in moved])
        if not self._pays(self._gain_s(request, dop), self._sib.migrate_s(num_tokens)):
            return inf
        # When their step has ended, each reserves one slot less.
        needed = num_tokens + sum([r.growth_tokens - 1 for r in moved if r.master == instance])
        if not any(self._can_take(i, instance, needed) for i in self._draft.component_of):
            return inf
        cool_s = max(r.migrated_s for r in moved) + COOL_DOWN_S
        return cool_s if cool_s > self._view.now else -inf

    def _gain_s(self, request: Request, dop: int) -> float:
        """What one more instance than `dop` saves a prefill, beyond its present chunk."""
        if not request.left_tokens:
            return 0.0
        lengths = [(request.kv_tokens, request.left_tokens)]
        gain_s = self._sib.prefill_s(max(1, dop), lengths)
        return gain_s - self._sib.prefill_s(dop + 1, lengths) if dop else gain_s

    def _pays(self, gain_s: float, cost_s: float) -> bool:
        bound_s = self._view.limits.max_prefill_wait_s
        return gain_s > LEAST_RETURN * cost_s and cost_s <= bound_s

    def consolidate(self, avoid: set[int]) -> Move | None:
        """Draw a decode group together when its own speed pays for the move.

        Only when nothing waits or prefills; then the group's instance with the least KV moves it
        to the one with most room, if the faster steps save a multiple of the move's time over the
        steps to be expected.
        """
        if not self.is_quiet:
            return None
        for component in self._draft.components:
            if len(component.instances) > 1 and avoid.isdisjoint(component.instances):
                move = self._draw_together(component)
                if move is not None:
                    return move
        return None

    def _draw_together(self, component: Component) -> Move | None:
        draft, batch = self._draft, len(component.requests)
        members = component.instances
        if not draft.idle.issuperset(members) or any(self._is_cooling(i) for i in members):
            return None
        source = max(members, key=lambda i: (draft.free[i] - self._instances[i].slots, -i))
        others = [i for i in members if i != source]
        target = min(others, key=lambda i: (-draft.room(i), i))
        moved = [r for r in component.requests if source in r.holders]
        num_tokens = sum(self._view.tokens_on(r, source) for r in moved)
        needed = num_tokens + sum(r.growth_tokens for r in moved if r.master == source)
        if not moved or not self._can_take(target, source, needed):
            return None
        kv_tokens = sum(r.kv_tokens for r in component.requests)
        wide_s, narrow_s = (
            self._sib.decode_s(dop=dop, num_masters=1, batch=batch, kv_tokens=kv_tokens)
            for dop in (len(members), len(members) - 1)
        )
        left = max(r.max_tokens - r.num_generated for r in component.requests)
        num_steps = min(left, EXPECTED_STEPS)
        gain_s, cost_s = (wide_s - narrow_s) * num_steps, self._sib.migrate_s(num_tokens)
        if gain_s <= LEAST_RETURN * cost_s:
            return None
        reason = (
            f"move {num_tokens:,} tokens of {plural(len(moved), 'request')} from instance "
            f"{source} to {target}: {cost_s:.3f} s, and up to {num_steps:,} decode steps gain "
            f"{gain_s:.3f} s from one instance less"
        )
        return Move(StartMigrate(source, target, tuple(moved), reason), (source, target))

    def _is_cooling(self, instance: int) -> bool:
        """A request there is in a step, or was moved a moment ago."""
        now = self._view.now
        return any(
            r.step_id is not None or now - r.migrated_s < COOL_DOWN_S
            for r in self.batch(instance)
            if instance in r.holders
        )

    def _can_take(self, target: int, source: int, num_tokens: int) -> bool:
        draft = self._draft
        if target == source or target in self.pinned or target in draft.held:
            return False
        ours, theirs = self.batch(source), self.batch(target)
        num_requests = len(ours) if ours is theirs else len(ours) + len(theirs)
        fits = num_requests <= self._sib.compute_bound_batch
        return fits and draft.room(target) >= num_tokens
