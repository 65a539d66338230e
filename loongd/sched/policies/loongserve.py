"""LoongServe's four steps for asynchronous groups, with preemptible prefill; the default policy.

Nothing here waits for all groups: the policy is asked at every event and looks at the instances
that are idle then. Dispatch (`sched.dispatch`) admits; allocation (`sched.allocate`) ranks and
frees instances; batching (`sched.batching`) splits prompts over empty instances; long prompts run
in chunks (`sched.elastic`); decode takes what is left (`sched.scaling`).

Order of a round: a long prompt that was passed for long enough; short prompts and the best long
one on empty instances; short ones where a decode group has had its share of the time, or where
interrupting it gains; the best long prompt elsewhere; next chunks; decode steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loongd.sched.allocate import Allocate
from loongd.sched.batching import Plan, Problem, best_plan
from loongd.sched.chunks import beside_part
from loongd.sched.dispatch import AloneTimes, Dispatch
from loongd.sched.draft import Draft
from loongd.sched.elastic import ElasticPrefill
from loongd.sched.outlook import Outlook
from loongd.sched.plan import DecodePlan
from loongd.sched.policy import (
    Decisions,
    GiveUp,
    Settled,
    StartMigrate,
    StartPart,
    StartPrefill,
    View,
    same_masters,
)
from loongd.sched.prefilling import describe_kept, put
from loongd.sched.request import Request
from loongd.sched.scaling import Scaling
from loongd.sched.sib import Sib
from loongd.sched.words import describe_prefill, name_instances, plural

# Sizes of one dynamic programme: at most so many requests, and cells (requests x instances) or
# the first few instances; what is left over has its turn in the next of a few.
MAX_REQUESTS = 48
MAX_CELLS = 400
MIN_WINDOW = 16
MAX_PROGRAMMES = 4


class LoongServe:
    """Decides from the view and the SIB's predictions alone."""

    def __init__(self, sib: Sib) -> None:
        self._sib = sib
        self._alone = AloneTimes(sib)
        # Compiles, where numba is there: not in the first request's time.
        best_plan(Problem([1], [1], [1], [sib.prefill_coefficients(1)]))

    # Those of several instances may be drawn together.
    steady_groups = False
    pays_decode = True

    @property
    def steady_requests(self) -> int:
        """From more on, a second master may pay."""
        return self._sib.compute_bound_batch

    def settled(self, view: View, groups: Sequence[Sequence[int]]) -> list[Settled]:
        """See `sched.outlook`."""
        outlook = Outlook(view, self._sib, self._alone)
        return [outlook.of(members) for members in groups]

    def masters(
        self, plan: DecodePlan, free: Mapping[int, int], num_steps: int
    ) -> Sequence[tuple[int, ...]]:
        """Each request keeps its own."""
        return same_masters(plan, num_steps)

    def decide(self, view: View) -> Decisions:
        """Everything that is to start now."""
        decisions = _Round(view, self._sib, self._alone, forced=False).run()
        if _starts(decisions) or any(i.step is not None for i in view.instances.values()):
            return decisions
        return _Round(view, self._sib, self._alone, forced=True).run()


def _starts(decisions: Decisions) -> bool:
    steps = decisions.decodes or decisions.prefills or decisions.migrations or decisions.parts
    return bool(steps) or decisions.preempt is not None


class _Round:
    def __init__(self, view: View, sib: Sib, alone: AloneTimes, *, forced: bool) -> None:
        self._view = view
        self._sib = sib
        self._forced = forced
        self._draft = Draft(view)
        self._alone = alone
        self._allocate = Allocate(view, self._draft, sib, forced=forced)
        self._prefills: list[StartPrefill] = []
        self._parts: list[StartPart] = []

    def run(self) -> Decisions:
        draft = self._draft
        if self._allocate.is_quiet:
            if not self._allocate.is_any_open():
                draft.hold = self._view.hold
            return self._decode([])
        self._dispatch = dispatch = Dispatch(self._view, draft, self._sib, self._alone)
        if self._allocate.is_any_open():
            dispatch.admit()
        else:
            draft.hold = self._view.hold
        elastic = ElasticPrefill(
            self._view, draft, self._sib, dispatch=dispatch, allocate=self._allocate
        )
        if dispatch.shorts or dispatch.longs:
            elastic.start_urgent()
            rest = self._on_empty(dispatch.shorts, elastic)
            rest = self._on_lent(rest)
            self._on_chunked(rest)
            elastic.start_first()
        elastic.go_on()
        elastic.move_away()
        self._prefills += elastic.started
        self._parts = elastic.parts
        return self._decode(elastic.migrations, dispatch.give_ups, elastic.starved)

    def _decode(
        self,
        migrations: list[StartMigrate],
        give_ups: Sequence[GiveUp] = (),
        starved: Request | None = None,
    ) -> Decisions:
        """Decode takes what prefills have left."""
        draft = self._draft
        scaling = Scaling(self._view, draft, sib=self._sib, starved=starved)
        if not migrations:
            move = self._allocate.consolidate(draft.held)
            if move is not None:
                migrations.append(move.start)
                draft.idle -= set(move.instances)
        decodes = scaling.run()
        return Decisions(
            prefills=tuple(self._prefills),
            decodes=tuple(decodes),
            preempt=scaling.preempt,
            give_ups=tuple(give_ups),
            hold=draft.hold,
            wanted=tuple(scaling.wanted),
            migrations=tuple(migrations),
            parts=tuple(self._parts),
        )

    # ---- short prompts -------------------------------------------------------------------------

    def _on_empty(self, shorts: list[Request], elastic: ElasticPrefill) -> list[Request]:
        """Split short prompts, and the best long one, over empty instances; those left over."""
        for _ in range(MAX_PROGRAMMES):
            empty = self._allocate.empty()
            if not empty:
                break
            taken = self._dispatch.take(shorts, empty)[:MAX_REQUESTS]
            first = elastic.first if len(empty) > 1 or not taken else None
            if first is not None and not self._dispatch.fit_now(first, *taken):
                first = None
            if not taken and first is None:
                break
            started = self._batch(taken, first, empty, elastic)
            if not started:
                break
            shorts = [request for request in shorts if request.request_id not in started]
        return shorts

    def _batch(
        self,
        taken: list[Request],
        first: Request | None,
        empty: list[int],
        elastic: ElasticPrefill,
    ) -> set[str]:
        """Start the plan of one dynamic programme; ids of the requests in it."""
        requests = taken if first is None else [*taken, first]
        instances = empty[: max(MIN_WINDOW, MAX_CELLS // len(requests))]
        found = self._solve(requests, first, instances)
        if found is None:
            return set()
        requests, plan = found
        started: set[str] = set()
        for run in plan.runs:
            members = instances[run.first_instance : run.end_instance]
            batch = requests[run.first_request : run.end_request]
            shorts = [request for request in batch if request is not first]
            if shorts:
                self._start(shorts, members, f"sum of input latencies {plan.latency:.2e} s/token")
            elif first is not None:
                elastic.start(first, members, ())
            started.update(request.request_id for request in shorts or batch)
        return started

    def _solve(
        self, requests: list[Request], first: Request | None, instances: list[int]
    ) -> tuple[list[Request], Plan] | None:
        """The best plan, with decode head-room or else without; the youngest go when none fits."""
        limits, draft = self._view.limits, self._draft
        costs = [self._sib.prefill_coefficients(w + 1) for w in range(len(instances))]
        while requests:
            # Longest first; equal ones in the order of the queue.
            ordered = sorted(requests, key=lambda r: -r.num_tokens)
            for head_room in (True, False):
                problem = Problem(
                    lengths=[r.num_tokens for r in ordered],
                    needs=[
                        1
                        if r is first and not head_room
                        else r.num_tokens + (r.growth_tokens if head_room else 0)
                        for r in ordered
                    ],
                    slots=[max(0, draft.room(i)) for i in instances],
                    costs=costs,
                    share_tokens=limits.prefill_tokens_per_instance,
                    max_batched_tokens=limits.max_num_batched_tokens,
                )
                plan = best_plan(problem)
                if plan is not None:
                    return ordered, plan
            requests = requests[: len(requests) // 2]
        return None

    def _on_lent(self, shorts: list[Request]) -> list[Request]:
        """Prefill where a decode group has just ended a step, when it has had its share of the
        time since the last prefill there, or when that gains more than it costs.
        """
        allocate, dispatch = self._allocate, self._dispatch
        for instance in allocate.lent() if shorts else ():
            taken = dispatch.take(shorts, [instance])
            if not taken:
                continue
            gain, cost = dispatch.weigh(taken, allocate.batch(instance))
            if gain <= cost and not allocate.is_paid(instance):
                continue
            why = f"gain {gain:.2e} against cost {cost:.2e} s/token of the decode group there"
            if gain <= cost:
                share = self._view.limits.decode_share
                why += f", but that has had {share:g} s for each second of the last prefill"
            self._start(taken, [instance], why)
            shorts = _without(shorts, taken)
        return shorts

    def _on_chunked(self, shorts: list[Request]) -> None:
        """Prefill between two chunks of a long prompt, for want of another instance.

        Once, and again while decode has its share of the time, unless the long prompt is urgent.
        """
        if not shorts:
            return
        allocate, dispatch = self._allocate, self._dispatch
        is_urgent = any(map(dispatch.is_urgent, allocate.unfinished))
        most = beside_part(self._view.limits).most_tokens
        for instance in allocate.between_chunks(again=not is_urgent):
            fitting = shorts
            if allocate.is_beside_part([instance]):
                fitting = [request for request in shorts if request.num_tokens <= most]
            taken = dispatch.take(fitting, [instance])
            if not taken:
                continue
            is_late = self._forced or dispatch.is_late(taken[0])
            if allocate.has_other_home(taken[0].num_tokens) and not is_late:
                continue
            self._start(taken, [instance], self._describe_turn(instance, taken))
            shorts = _without(shorts, taken)

    def _describe_turn(self, instance: int, taken: list[Request]) -> str:
        """Whose next chunk waits, and how long the first of those taken has waited."""
        behind = [r for r in self._allocate.unfinished if instance in r.needed]
        waits = ", ".join(f"{r.request_id} with {r.undone_tokens:,} tokens left" for r in behind)
        waited_s = self._dispatch.waited_s(taken[0])
        return (
            f"between two chunks of a long prefill ({waits}), after {taken[0].request_id} has "
            f"waited for {waited_s:.3f} s"
        )

    def _start(self, requests: Sequence[Request], group: list[int], why: str) -> None:
        draft = self._draft
        members = tuple(sorted(group))
        items = tuple(put(draft, request, group) for request in requests)
        draft.idle -= set(group)
        names = requests[0].request_id
        if len(requests) > 1:
            names = f"{plural(len(requests), 'request')} ({names} first)"
        num_tokens = sum(request.num_tokens for request in requests)
        lengths = [(0, request.num_tokens) for request in requests]
        time = describe_prefill(self._sib, len(members), lengths)
        reason = (
            f"prefill {num_tokens:,} tokens of {names} on {name_instances(members)} (DoP "
            f"{len(members)}){time}: {why}; {describe_kept(items)}"
        )
        self._prefills.append(StartPrefill(members, items, reason))


def _without(requests: list[Request], taken: list[Request]) -> list[Request]:
    ids = {request.request_id for request in taken}
    return [request for request in requests if request.request_id not in ids]
