"""Which decode groups step now, with which masters, and when they scale up or preempt.

LoongServe section 4.3: adding an instance to a decode group moves no KV; the newcomer is simply
master of some requests from now on. When no instance at all has a free slot, the request that
loses the least work gives its slots back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from loongd.sched.components import Component
from loongd.sched.draft import Draft
from loongd.sched.policy import Preempt, StartDecode, View
from loongd.sched.request import Phase, Request
from loongd.sched.sib import Sib
from loongd.sched.words import describe_decode, name_instances, plural

# From about this batch size on, the linear layers of one master are bound by compute.
SPREAD_THRESHOLD = 128
# An instance joins as one more master if the step then takes less than this share.
LEAST_GAIN = 0.9
_LONGEST_WAITING = attrgetter("last_step_id", "order")


@dataclass(slots=True)
class _Group:
    """A decode step in the making."""

    instances: list[int]
    quota: int | None
    items: list[tuple[Request, int]] = field(default_factory=list)
    load: dict[int, int] = field(default_factory=dict)
    joined: list[int] = field(default_factory=list)
    num_for_slots: int = 0
    num_left_out: int = 0
    why: list[str] = field(default_factory=list)


class Scaling:
    """One round: fills `wanted` and `preempt`."""

    def __init__(
        self,
        view: View,
        draft: Draft,
        *,
        sib: Sib | None = None,
        foretells: Sib | None = None,
        starved: Request | None = None,
    ) -> None:
        """Without a SIB, masters are spread over all members from `SPREAD_THRESHOLD` on; times
        are told by `foretells`, or else by `sib`.
        `starved` is a prefill that cannot go on for want of a slot."""
        self.wanted: list[tuple[Request, int | None]] = []
        self.preempt: Preempt | None = None
        self._view = view
        self._draft = draft
        self._sib = sib
        self._foretells = foretells or sib
        self._held = draft.held | (set(draft.hold.instances) if draft.hold else set())
        self._starved = starved
        self._started: set[int] = set()

    def run(self) -> list[StartDecode]:
        """All decode steps that start now, longest waiting first."""
        steps: list[StartDecode] = []
        # Idle instances only become fewer, so that who may not step now may not later.
        components = [*filter(self._may_step, self._draft.components)]
        if len(components) > 1:
            components.sort(key=lambda c: (min(r.last_step_id for r in c.requests), c.instances))
        for component in components:
            if self._may_step(component):
                group = self._assign(component)
                if group.items:
                    step = self._finish(group, component)
                    steps.append(step)
                    self._started.update(step.members)
                    self._draft.idle -= set(step.members)
        # A decode step that runs will soon free slots, or leave more requests to choose from.
        if self._starved is not None and not self._decoding():
            self._choose_victim(self._starved)
        return steps

    def _may_step(self, component: Component) -> bool:
        if not self._draft.idle.issuperset(component.instances):
            return False
        return self._held.isdisjoint(component.instances) or self._draft.owes_decode(component)

    def _decoding(self) -> set[int]:
        """Instances that run a decode step, those of steps that start now included."""
        return self._started.union(filter(self._draft.runs_decode, self._draft.free))

    def _assign(self, component: Component) -> _Group:
        """Give each request a master with a free slot; those without one are left out."""
        batch = sorted(component.requests, key=_LONGEST_WAITING)
        batch = batch[: self._view.limits.max_num_seqs]
        free = self._draft.free
        group = _Group(list(component.instances), None)
        self._spread(group, batch)
        if len(group.instances) == 1 and free[group.instances[0]] >= len(batch):
            (only,) = group.instances
            free[only] -= len(batch)
            group.load[only] = len(batch)
            group.items = [(request, only) for request in batch]
            return group
        for request in batch:
            master = self._choose_master(request, group)
            if master is None:
                group.num_left_out += 1
                self._wait_for_slot(request)
                continue
            free[master] -= 1
            group.load[master] = group.load.get(master, 0) + 1
            group.items.append((request, master))
        return group

    def _spread(self, group: _Group, batch: list[Request]) -> None:
        """Choose how many members are masters, and let an idle instance join if that pays."""
        draft, sib = self._draft, self._sib
        possible = sum(draft.free[i] > 0 for i in group.instances)
        threshold = SPREAD_THRESHOLD if sib is None else sib.compute_bound_batch
        if len(batch) <= threshold:
            return
        if sib is None:
            group.quota = -(-len(batch) // possible) if possible > 1 else None
            return
        kv_tokens = sum(request.kv_tokens for request in batch)

        def step_s(dop: int, num_masters: int) -> float:
            return sib.decode_s(
                dop=dop, num_masters=num_masters, batch=len(batch), kv_tokens=kv_tokens
            )

        dop = len(group.instances)
        num_masters = min(range(1, max(1, possible) + 1), key=lambda m: (step_s(dop, m), m))
        now_s = step_s(dop, num_masters)
        newcomer = self._newcomer(group)
        if newcomer is not None and step_s(dop + 1, num_masters + 1) < LEAST_GAIN * now_s:
            group.instances.append(newcomer)
            group.joined.append(newcomer)
            num_masters += 1
            group.why.append(
                f"for {len(batch):,} requests pass the {threshold:,} of one master: predicted "
                f"{step_s(dop + 1, num_masters):.4f} s instead of {now_s:.4f} s"
            )
        group.quota = -(-len(batch) // num_masters) if num_masters > 1 else None

    def _newcomer(self, group: _Group) -> int | None:
        """An idle instance that nobody decodes on and no prompt waits for."""
        draft = self._draft
        if next(iter(self._view.waiting), None) is not None:
            return None
        choices = draft.idle - set(group.instances) - self._held - draft.component_of.keys()
        open_to = [i for i in choices if draft.room(i) > 0]
        return min(open_to, key=lambda i: (-draft.free[i], i), default=None)

    def _choose_master(self, request: Request, group: _Group) -> int | None:
        """Its last master, another holder, another member, or (scale-up) one more instance."""
        free, last = self._draft.free, request.master
        if last is not None and last in group.instances and free[last] > 0:
            is_open = group.quota is None or group.load.get(last, 0) < group.quota
            if is_open:
                return last
        open_to = [i for i in group.instances if free[i] > 0]
        if not open_to:
            return self._scale_up(group, request)
        if group.quota is not None:
            return min(open_to, key=lambda i: (group.load.get(i, 0), i))
        own = [i for i in open_to if i in request.holders]
        return min(own or open_to, key=lambda i: (-free[i], i))

    def _scale_up(self, group: _Group, request: Request) -> int | None:
        """An idle instance outside the component; one without its own or held work if possible."""
        draft = self._draft
        choices = [i for i in draft.idle if draft.free[i] > 0 and i not in group.instances]
        if not choices:
            return None
        best = min(
            choices, key=lambda i: (i in self._held, i in draft.component_of, -draft.free[i], i)
        )
        full = f"{name_instances(sorted(group.instances))} ran out of slots"
        was = "" if request.master is None else f" from master {request.master}"
        group.why.append(
            f"for {full}: {request.request_id} goes{was} to {best}, where {draft.free[best]:,} of "
            f"{self._view.instances[best].slots:,} are free"
        )
        group.instances.append(best)
        group.joined.append(best)
        group.num_for_slots += 1
        return best

    def _wait_for_slot(self, request: Request) -> None:
        """Remember a busy instance with a free slot, or that the pool is full."""
        draft = self._draft
        if request.wanted is not None and draft.free.get(request.wanted, 0) > 0:
            self.wanted.append((request, request.wanted))
            return
        busy = [i for i in draft.free if draft.free[i] > 0]
        if busy:
            decoding = self._decoding()
            best = min(busy, key=lambda i: (i not in decoding, -draft.free[i], i))
            self.wanted.append((request, best))
            return
        self.wanted.append((request, None))
        self._starved = self._starved or request

    def _choose_victim(self, starved: Request) -> None:
        victims = [
            r
            for r in self._view.running.values()
            if r.step_id is None and (r.phase is Phase.DECODE or r.between_chunks)
            if r.request_id not in self._draft.started
        ]
        if not victims:
            return
        victim = min(victims, key=_least_lost)
        self.preempt = Preempt(victim, self._explain_victim(victim, victims, starved))

    def _explain_victim(self, victim: Request, victims: list[Request], starved: Request) -> str:
        age_s = self._view.now - victim.arrived_s
        again = ""
        if self._foretells is not None:
            again_s = self._foretells.prefill_s(1, [(0, victim.kv_tokens)])
            again = f", predicted {again_s:.3f} s to prefill again"
        others = [request for request in victims if request is not victim]
        rest = ""
        if others:
            second = min(others, key=_least_lost)
            rest = f"; {second.request_id} would lose {second.kv_tokens:,}"
        return (
            f"preempt {victim.request_id}: all {self._draft.total_slots:,} slots of the pool are "
            f"used and {starved.request_id} needs one; of {plural(len(victims), 'request')} it "
            f"loses the least work, {victim.kv_tokens:,} tokens{again}, and arrived {age_s:.3f} s "
            f"ago{rest}"
        )

    def _finish(self, group: _Group, component: Component) -> StartDecode:
        members = component.instances
        if len(group.instances) > 1:
            holders = {i for request, _ in group.items for i in request.holders}
            members = tuple(sorted(holders | set(group.load)))
        masters = ", ".join(f"{i} ({n})" for i, n in sorted(group.load.items()))
        reason = (
            f"decode {plural(len(group.items), 'request')} on {name_instances(members)}"
            f"{self._foretell(group, len(members))}; masters {masters}"
        )
        if group.joined:
            reason += f"; {name_instances(group.joined)} joined, {' and '.join(group.why)}"
        if group.num_left_out:
            reason += f"; {plural(group.num_left_out, 'request')} left out for want of a slot"
        return StartDecode(members, tuple(group.items), tuple(sorted(group.joined)), reason)

    def _foretell(self, group: _Group, dop: int) -> str:
        """The step's time, and what it would be without those that joined for their slots."""
        sib, batch = self._foretells, len(group.items)
        if sib is None:
            return ""
        kv_tokens = sum([request.kv_tokens for request, _ in group.items]) + batch
        text = describe_decode(sib, dop, group.load, batch, kv_tokens)
        if group.num_for_slots:
            before = max(1, dop - group.num_for_slots)
            masters = max(1, len(group.load) - group.num_for_slots)
            time_s = sib.decode_s(dop=before, num_masters=masters, batch=batch, kv_tokens=kv_tokens)
            text += f" ({time_s:.4f} s on {plural(before, 'instance')}, had it room)"
        return text


def _least_lost(request: Request) -> tuple[int, int]:
    """Sorts victims: least work first, of equal ones the youngest."""
    return request.kv_tokens, -request.order
