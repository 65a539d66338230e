"""What would become of a prompt that came now: place, waiting time, prefill time.

Knows: the policy's own answer when an instance is free, else an estimate from the steps that run,
the turns of the work ahead in the queue (`sched.turns`) and the slots that admission counts. Does
not know: the future; nothing that arrives later is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from msgspec import structs

from loongd.sched.admission import never_fits
from loongd.sched.chunks import alone, in_one_step, left_s
from loongd.sched.dispatch import AloneTimes, Dispatch
from loongd.sched.draft import Draft
from loongd.sched.policy import Decisions, Policy, View
from loongd.sched.request import Request
from loongd.sched.sib import Sib
from loongd.sched.sib_profile import NOISY
from loongd.sched.slot_wait import SlotWait, wait_for_slots
from loongd.sched.turns import Turns
from loongd.sched.words import plural

# The queue is added up request by request as far as this, then by its mean.
MAX_DEPTH = 256
# A short prompt passes prompts of more than so many times its length.
PASSED_LENGTHS = 4
# A prediction is rough beyond so many times the work that was ever measured.
FAR = 4.0
# No client can have this id: ids of real requests have no blanks.
PROMPT_ID = "this prompt"
LAST_ORDER = 1 << 62


@dataclass(frozen=True, slots=True)
class Prediction:
    """TTFT is `queue_s + prefill_s`; `members` is empty when the prompt would wait.

    `rough`: the times come from no measurement of these workers, from one on a busy machine, or
    from far outside its range, or are `at_most`: `queue_s` is an upper bound, for nobody knows when
    running answers end.
    """

    dop: int
    members: tuple[int, ...]
    queue_s: float
    prefill_s: float
    reason: str
    rough: bool = False
    at_most: bool = False


def predict(
    policy: Policy,
    sib: Sib,
    view: View,
    prompt_tokens: int,
    max_tokens: int,
    reserve_tokens: int | None = None,
) -> Prediction:
    """Ask `policy` about a prompt at the end of the queue; nothing is changed.

    `reserve_tokens` is the growth that admission counts on; default: `max_tokens`.
    """
    request = Request(
        request_id=PROMPT_ID,
        order=LAST_ORDER,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        reserve_tokens=max_tokens if reserve_tokens is None else min(reserve_tokens, max_tokens),
        arrived_s=view.now,
    )
    found = _ask(policy, sib, view, request)
    rough = found.dop > 0 and (found.at_most or _is_rough(sib, found.dop, prompt_tokens))
    return replace(found, rough=rough)


def _is_rough(sib: Sib, dop: int, num_tokens: int) -> bool:
    profile = sib.profile
    if not profile.measured or profile.noise > NOISY:
        return True
    return sib.prefill_reach(dop, [(0, num_tokens)]) > FAR


def _ask(policy: Policy, sib: Sib, view: View, request: Request) -> Prediction:
    waiting = list(islice(view.waiting, MAX_DEPTH))
    is_seen = len(waiting) < MAX_DEPTH and any(i.idle for i in view.instances.values())
    decisions = (
        policy.decide(structs.replace(view, waiting=[*waiting, request]))
        if is_seen
        else Decisions()
    )
    for start in decisions.prefills:
        for item in start.items:
            if item.request is request:
                lengths = [(0, i.num_tokens) for i in start.items]
                prefill_s = sib.prefill_s(len(start.members), lengths)
                if not item.is_last:
                    prefill_s = _alone_s(sib, view, len(start.members), request.num_tokens)
                return Prediction(len(start.members), start.members, 0.0, prefill_s, start.reason)
    for give_up in decisions.give_ups:
        if give_up.request is request:
            return Prediction(0, (), 0.0, 0.0, give_up.message)
    return _after_others(sib, view, request, pays_decode=policy.pays_decode)


def _after_others(sib: Sib, view: View, request: Request, *, pays_decode: bool) -> Prediction:
    """An estimate: its turn, or when those end whose slots it needs and what is ahead then."""
    draft = Draft(view)
    alive = [i for i in view.instances.values() if i.alive]
    if not alive:
        return Prediction(0, (), 0.0, 0.0, "no instance is ready; it would wait until some are")
    give_up = never_fits(request, draft.known_slots)
    if give_up is not None:
        return Prediction(0, (), 0.0, 0.0, give_up.message)
    if request.committed_tokens > draft.total_slots:
        return Prediction(0, (), 0.0, 0.0, _describe_lost(request, draft))
    dispatch = Dispatch(view, draft, sib, AloneTimes(sib))
    is_short = dispatch.is_short(request)
    queue = _Queue(view, request, dispatch)
    turns = Turns(view, draft, sib, dispatch, queue.before, pays_decode=pays_decode)
    dop = 1 if is_short else len(alive)
    if is_short:
        turn = turns.of_short(request, queue.num_more)
    else:
        alone_s = _alone_s(sib, view, dop, request.num_tokens)
        turn = turns.of_long(queue.started_s, alone_s, queue.num_more)
    before, num_more = queue.admitted_first(draft)
    slots = wait_for_slots(view, draft, sib, request, before, num_more)
    wait_s = max(turn.first_s, slots.time_s if slots else 0.0)
    share_s = turn.begins_s - turn.first_s
    num_ahead = len(queue.before) + queue.num_more + sum(map(bool, queue.started_s))
    beside = f" beside {turn.num_beside:,} of them" if turn.num_beside else ""
    reason = (
        f"wait {_describe_wait(turn.first_s, slots)} and {share_s:.3f} s for "
        f"{plural(num_ahead, 'request')} ahead, then prefill {request.num_tokens:,} tokens{beside} "
        f"on {plural(dop, 'instance')}, predicted {turn.time_s:.3f} s"
    )
    return Prediction(dop, (), wait_s + share_s, turn.time_s, reason, at_most=slots is not None)


def _describe_wait(first_s: float, slots: SlotWait | None) -> str:
    if slots is None:
        return f"{first_s:.3f} s for an instance"
    return f"at most {max(first_s, slots.time_s):.3f} s for {slots.describe()}"


def _describe_lost(request: Request, draft: Draft) -> str:
    return (
        f"it needs {request.committed_tokens:,} KV slots, but the instances that are up have "
        f"{draft.total_slots:,} of {draft.known_slots:,}; it would wait until the others return"
    )


class _Queue:
    """Who goes before `request`, as far as is looked at: all, or, before a short one, those that
    are not much longer.

    Attributes:
        before: those that wait.
        num_more: like these, but not looked at.
        started_s: seconds, of one instance, of unfinished prefills that go before a long one.
    """

    def __init__(self, view: View, request: Request, dispatch: Dispatch) -> None:
        self._view = view
        self._request = request
        is_short = dispatch.is_short(request)
        self._most = request.num_tokens * PASSED_LENGTHS if is_short else 1 << 62
        self._seen = list(islice(view.waiting, MAX_DEPTH))
        self.before = [other for other in self._seen if other.left_tokens <= self._most]
        self._num_unseen = 0
        if len(self._seen) == MAX_DEPTH:
            self._num_unseen = len([*view.waiting]) - MAX_DEPTH
        self.num_more = self._more_like(self.before)
        self.started_s: list[float] = []
        if not is_short:  # which has its turn between two of their chunks, or parts of them
            unfinished = islice(view.tally.unfinished.values(), MAX_DEPTH)
            self.started_s = [dispatch.ahead_s(other, request) for other in unfinished]

    def _more_like(self, seen: Sequence[Request]) -> int:
        """How many are like these among those that are not looked at."""
        return len(seen) * self._num_unseen // max(1, len(self._seen))

    def admitted_first(self, draft: Draft) -> tuple[Sequence[Request], int]:
        """Those that get their slots first, and how many more like them. A short request passes
        longer ones if that leaves room for the first of them once all older ones have ended."""
        before = self.before
        free = draft.total_slots - draft.committed
        passed = (other for other in self._seen if other.left_tokens > self._most)
        head = next((other for other in passed if other.committed_tokens > free), None)
        if head is not None:
            running = self._view.running.values()
            younger = sum(r.committed_tokens for r in running if r.order > head.order)
            slack = draft.total_slots - head.committed_tokens - younger
            before = self._seen if self._request.committed_tokens > slack else before
        return before, self._more_like(before)


def _alone_s(sib: Sib, view: View, dop: int, num_tokens: int) -> float:
    pace = in_one_step(view.limits)
    if dop == len(view.free):
        pace = alone(sib, dop, cached=0, left=num_tokens, limits=view.limits)
    return left_s(sib, dop, cached=0, left=num_tokens, pace=pace)
