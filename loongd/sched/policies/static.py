"""Fixed parallelism, to compare with: instances in groups that never change.

Static tensor parallelism is one group of one (large) instance, static sequence parallelism one
group of all instances, replicas are groups of one instance each, with requests dealt in turn.
In a group: first come, first served; a prefill step, then a decode step, in turn; whole prompts,
batched up to `max_num_batched_tokens`, or chunked prefill: so many tokens at most in every step. KV
stays where the group is, so a prompt longer than its group's free slots waits while other groups
may have room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from loongd.sched.plan import DecodePlan
from loongd.sched.policy import (
    ALWAYS_SETTLED,
    NOT_SETTLED,
    Decisions,
    GiveUp,
    Placed,
    Preempt,
    Settled,
    StartDecode,
    StartPrefill,
    View,
)
from loongd.sched.prefilling import describe_kept, describe_part
from loongd.sched.request import Phase, Request
from loongd.sched.scaling import SPREAD_THRESHOLD
from loongd.sched.sib import Sib
from loongd.sched.words import describe_decode, describe_prefill, name_instances, plural


@dataclass(slots=True)
class _Group:
    """A group and what it runs. `free` and `committed` are as after the decisions so far."""

    members: tuple[int, ...]
    slots: int
    free: dict[int, int]
    idle: bool
    owes_decode: bool
    committed: int = 0
    running: list[Request] = field(default_factory=list)

    @property
    def decoding(self) -> list[Request]:
        return [r for r in self.running if r.phase is Phase.DECODE]


@dataclass(slots=True)
class _Round:
    prefills: list[StartPrefill] = field(default_factory=list)
    decodes: list[StartDecode] = field(default_factory=list)
    give_ups: list[GiveUp] = field(default_factory=list)
    preempt: Preempt | None = None


class FixedGroups:
    """Groups of one instance each, or `together` one group of all.

    Stateless: a request belongs to the group that holds its KV, or else to one by its number.
    """

    steady_requests = 1 << 62
    steady_groups = True
    pays_decode = False

    def __init__(self, *, together: bool, chunked: bool = False, sib: Sib | None = None) -> None:
        """`chunked`: a prompt is cut where a step has `max_num_batched_tokens`. `sib` decides
        nothing; it tells times in reasons."""
        self._together = together
        self._chunked = chunked
        self._sib = sib

    def settled(self, view: View, groups: Sequence[Sequence[int]]) -> list[Settled]:
        """While its group is too full for the next prompt: it only becomes fuller."""
        found = _Round()
        all_groups = self._groups(view)
        queues = _Queues(view.waiting, len(all_groups), found)
        full = {
            group.members: self._is_full(view, group, next(queues.of(number, group.slots), None))
            for number, group in enumerate(all_groups)
        }
        return [
            NOT_SETTLED if found.give_ups or not full.get(tuple(members)) else ALWAYS_SETTLED
            for members in groups
        ]

    def masters(
        self, plan: DecodePlan, free: Mapping[int, int], num_steps: int
    ) -> Sequence[tuple[int, ...]]:
        """The member with most room takes the next step, and so on in turn."""
        left = {i: free[i] for i in plan.members}
        return [tuple(_deal(left, len(plan.items))) for _ in range(num_steps)]

    def _is_full(self, view: View, group: _Group, request: Request | None) -> bool:
        """`request`, the first of the group's queue, cannot start there, nor can anything else."""
        if any(r.between_chunks for r in group.running):
            return False
        limits = view.limits
        if request is None or len(group.running) >= limits.max_num_seqs:
            return True
        num_tokens = request.num_tokens
        if self._chunked:
            num_tokens = min(num_tokens, limits.max_num_batched_tokens)
        is_full = group.committed + request.committed_tokens > group.slots
        return is_full or num_tokens > sum(group.free.values())

    def decide(self, view: View) -> Decisions:
        """Every idle group starts a step, if it has any work."""
        groups = self._groups(view)
        if not groups:
            return Decisions()
        found = _Round()
        queues = _Queues(view.waiting, len(groups), found)
        for number, group in enumerate(groups):
            if not group.idle:
                continue
            batch = self._batch(view, group, queues.of(number, group.slots))
            if batch:
                found.prefills.append(_prefill(group, batch, self._sib))
            elif group.running and found.preempt is None:
                self._decode(view, group, found)
        return Decisions(
            prefills=tuple(found.prefills),
            decodes=tuple(found.decodes),
            preempt=found.preempt,
            give_ups=tuple(found.give_ups),
        )

    def _groups(self, view: View) -> list[_Group]:
        alive = tuple(view.free)
        sets = [alive] if self._together else [(i,) for i in alive]
        groups: list[_Group] = []
        of_instance: dict[int, _Group] = {}
        for members in sets if alive else ():
            views = [view.instances[i] for i in members]
            group = _Group(
                members=members,
                slots=sum(v.slots for v in views),
                free={i: view.free[i] for i in members},
                idle=all(v.idle for v in views),
                owes_decode=any(v.owes_decode for v in views),
            )
            groups.append(group)
            of_instance.update(dict.fromkeys(members, group))
        for request in view.running.values():
            group = of_instance[request.holders[0]]
            group.running.append(request)
            group.committed += request.committed_tokens
        return groups

    def _batch(
        self, view: View, group: _Group, queue: Iterator[Request]
    ) -> list[tuple[Request, int]]:
        """The next prompts, or parts, if it is their turn and their growth fits too."""
        if group.owes_decode and group.decoding:
            return []
        limits = view.limits
        left_tokens, free = limits.max_num_batched_tokens, sum(group.free.values())
        batch: list[tuple[Request, int]] = []
        for request in group.running:
            num_tokens = min(request.left_tokens, left_tokens, free)
            if request.between_chunks and num_tokens > 0:
                batch.append((request, num_tokens))
                left_tokens -= num_tokens
                free -= num_tokens
        committed = group.committed
        for request in queue:
            committed += request.committed_tokens
            num_tokens = request.num_tokens
            if self._chunked:
                num_tokens = min(num_tokens, left_tokens)
            elif batch and num_tokens > left_tokens:
                break
            is_full = committed > group.slots or num_tokens > free
            if is_full or num_tokens == 0 or len(group.running) == limits.max_num_seqs:
                break
            batch.append((request, num_tokens))
            group.running.append(request)
            left_tokens -= num_tokens
            free -= num_tokens
        return batch

    def _decode(self, view: View, group: _Group, found: _Round) -> None:
        """All decoding requests take one step; masters are spread only when that pays."""
        batch = sorted(group.decoding, key=lambda r: (r.last_step_id, r.order))
        batch = batch[: view.limits.max_num_seqs]
        items = list(zip(batch, _deal(group.free, len(batch)), strict=False))
        if items:
            reason = _explain_decode(group, items, self._sib)
            found.decodes.append(StartDecode(group.members, tuple(items), (), reason))
        elif batch:
            idle = [r for r in group.running if r.between_chunks]
            victims = batch + idle
            newest = max(victims, key=lambda r: r.order)
            reason = _explain_victim(group, newest, len(victims), view.now, self._sib)
            found.preempt = Preempt(newest, reason)


class _Queues:
    """The waiting requests of each group, read from the common queue only as far as needed."""

    def __init__(self, waiting: Iterable[Request], num_groups: int, found: _Round) -> None:
        self._rest = iter(waiting)
        self._num_groups = num_groups
        self._read: list[list[Request]] = [[] for _ in range(num_groups)]
        self._found = found

    def of(self, number: int, slots: int) -> Iterator[Request]:
        """The queue of one group; requests that can never fit `slots` are given up."""
        at = 0
        while at < len(self._read[number]) or self._read_more(number):
            request = self._read[number][at]
            at += 1
            if request.committed_tokens <= slots:
                yield request
                continue
            self._found.give_ups.append(
                GiveUp(
                    request,
                    f"{request.request_id} needs {request.committed_tokens:,} KV slots, but its "
                    f"group has {slots:,}",
                )
            )

    def _read_more(self, number: int) -> bool:
        for request in self._rest:
            owner = request.order % self._num_groups
            self._read[owner].append(request)
            if owner == number:
                return True
        return False


def _prefill(group: _Group, batch: list[tuple[Request, int]], sib: Sib | None) -> StartPrefill:
    """The group computes the batch together and shares its KV as evenly as slots allow."""
    items: list[Placed] = []
    for request, num_tokens in batch:
        keep = _share(num_tokens, group.free)
        for instance, kept in keep:
            group.free[instance] -= kept
        items.append(Placed(request, keep, max(group.free, key=lambda i: (group.free[i], -i))))
    return StartPrefill(group.members, tuple(items), _explain_prefill(group, items, sib))


def _explain_prefill(group: _Group, items: list[Placed], sib: Sib | None) -> str:
    """Which tokens where, how long that takes, and what of the group's slots is then promised."""
    head, dop = items[0], len(group.members)
    what, names = describe_part(head), head.request.request_id
    if len(items) > 1:
        what = f"{sum(item.num_tokens for item in items):,} tokens"
        names = f"{plural(len(items), 'request')} ({names} first)"
    lengths = [(item.request.kv_tokens, item.num_tokens) for item in items]
    new = [item.request for item in items if item.request.phase is Phase.WAITING]
    committed = group.committed + sum(request.committed_tokens for request in new)
    return (
        f"prefill {what} of {names} on {name_instances(group.members)}, the fixed group (DoP "
        f"{dop}){describe_prefill(sib, dop, lengths)}; {describe_kept(items)}; up to "
        f"{committed:,} of its {group.slots:,} slots will be needed"
    )


def _explain_decode(group: _Group, items: list[tuple[Request, int]], sib: Sib | None) -> str:
    """Whose next tokens, how long that takes, and what waits for its turn."""
    batch, load = len(items), Counter(master for _, master in items)
    time = ""
    if sib is not None:
        kv_tokens = sum([request.kv_tokens for request, _ in items]) + batch
        time = describe_decode(sib, len(group.members), load, batch, kv_tokens)
    masters = ", ".join(f"{i} ({n})" for i, n in sorted(load.items()))
    reason = (
        f"decode {plural(batch, 'request')} on {name_instances(group.members)}, the fixed group"
        f"{time}; masters {masters}"
    )
    if group.owes_decode:
        reason += "; a prefill there has just ended, and decode has its turn"
    num_left = len(group.decoding) - batch
    return reason + (f"; {plural(num_left, 'request')} left out" if num_left else "")


def _explain_victim(
    group: _Group, victim: Request, num_victims: int, now: float, sib: Sib | None
) -> str:
    """Why it is this one, and what that costs."""
    again = ""
    if sib is not None:
        again_s = sib.prefill_s(len(group.members), [(0, victim.kv_tokens)])
        again = f", predicted {again_s:.3f} s to prefill again"
    return (
        f"preempt {victim.request_id}: no free slot among {group.slots:,}; the youngest of "
        f"{plural(num_victims, 'request')}, it arrived {now - victim.arrived_s:.3f} s ago and "
        f"loses {victim.kv_tokens:,} tokens{again}"
    )


def _deal(free: dict[int, int], num_requests: int) -> list[int]:
    """Masters of so many requests, as far as there are `free` slots, which are taken: one after
    the other, or, from `SPREAD_THRESHOLD` on, all in equal shares."""
    first = max(free, key=lambda i: (free[i], -i))
    if num_requests <= SPREAD_THRESHOLD and free[first] >= num_requests:
        free[first] -= num_requests
        return [first] * num_requests
    quota = -(-num_requests // len(free)) if num_requests > SPREAD_THRESHOLD else None
    masters: list[int] = []
    load = dict.fromkeys(free, 0)
    for _ in range(num_requests):
        open_to = [i for i in free if free[i] > 0]
        if not open_to:
            break
        if quota is None:
            master = max(open_to, key=lambda i: (load[i] > 0, free[i], -i))
        else:
            under = [i for i in open_to if load[i] < quota]
            master = min(under or open_to, key=lambda i: (load[i], i))
        free[master] -= 1
        load[master] += 1
        masters.append(master)
    return masters


def _share(num_tokens: int, free: dict[int, int]) -> tuple[tuple[int, int], ...]:
    """Runs that sum to `num_tokens`; the fullest instances first, each at most its fair share."""
    keep: list[tuple[int, int]] = []
    left = num_tokens
    order = sorted(free, key=lambda i: (free[i], i))
    for number, instance in enumerate(order):
        fair = -(-left // (len(order) - number))
        taken = min(fair, free[instance])
        if taken:
            keep.append((instance, taken))
            left -= taken
    return tuple(keep)
