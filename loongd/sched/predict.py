"""What would become of a prompt that came now: place, waiting time, prefill time.

Knows: the policy's own answer when an instance is free, else an estimate from the steps that run
and the work ahead in the queue. Does not know: the future; nothing that arrives later is counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, islice

from loongd.sched.chunks import left_s
from loongd.sched.instance import Step
from loongd.sched.plan import DecodePlan, PrefillPlan
from loongd.sched.policy import Decisions, Policy, View
from loongd.sched.request import Phase, Request
from loongd.sched.sib import Sib
from loongd.sched.words import plural

# The queue is added up request by request as far as this, then by its mean.
MAX_DEPTH = 256
# A prediction is rough beyond so many times the work that was ever measured.
FAR = 16.0
# A step is never taken to be nearer to its end than this share of its time so far or predicted.
OVERDUE_SHARE = 0.1
# No client can have this id: ids of real requests have no blanks.
PROMPT_ID = "this prompt"
LAST_ORDER = 1 << 62


@dataclass(frozen=True, slots=True)
class Prediction:
    """TTFT is `queue_s + prefill_s`; `members` is empty when the prompt would wait.

    `rough`: the times come from no measurement of these workers, or from far outside its range.
    """

    dop: int
    members: tuple[int, ...]
    queue_s: float
    prefill_s: float
    reason: str
    rough: bool = False


def predict(
    policy: Policy, sib: Sib, view: View, prompt_tokens: int, max_tokens: int
) -> Prediction:
    """Ask `policy` about a prompt at the end of the queue; nothing is changed."""
    found = _ask(policy, sib, view, prompt_tokens, max_tokens)
    rough = found.dop > 0 and _is_rough(sib, found.dop, prompt_tokens)
    return replace(found, rough=rough)


def _is_rough(sib: Sib, dop: int, num_tokens: int) -> bool:
    return not sib.profile.measured or sib.prefill_reach(dop, [(0, num_tokens)]) > FAR


def _ask(policy: Policy, sib: Sib, view: View, prompt_tokens: int, max_tokens: int) -> Prediction:
    request = Request(
        request_id=PROMPT_ID,
        order=LAST_ORDER,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        reserve_tokens=max_tokens,
        arrived_s=view.now,
    )
    waiting = list(islice(view.waiting, MAX_DEPTH))
    is_seen = len(waiting) < MAX_DEPTH and any(i.idle for i in view.instances.values())
    decisions = (
        policy.decide(replace(view, waiting=[*waiting, request])) if is_seen else Decisions()
    )
    for start in decisions.prefills:
        for item in start.items:
            if item.request is request:
                lengths = [(0, i.num_tokens) for i in start.items]
                prefill_s = sib.prefill_s(len(start.members), lengths)
                if not item.is_last:
                    prefill_s = _alone_s(sib, view, len(start.members), prompt_tokens)
                return Prediction(len(start.members), start.members, 0.0, prefill_s, start.reason)
    for give_up in decisions.give_ups:
        if give_up.request is request:
            return Prediction(0, (), 0.0, 0.0, give_up.message)
    return _after_others(sib, view, request)


def _after_others(sib: Sib, view: View, request: Request) -> Prediction:
    """An estimate: the earliest end of a step, then an equal share of the work ahead of it."""
    alive = [i for i in view.instances.values() if i.alive]
    if not alive:
        return Prediction(0, (), 0.0, 0.0, "no instance is ready")
    steps = {i.step.step_id: i.step for i in alive if i.step is not None}
    step_s = min((_left_of(sib, step, view.now) for step in steps.values()), default=0.0)
    is_short = sib.prefill_s(1, [(0, request.num_tokens)]) <= view.limits.max_prefill_wait_s
    ahead_s, num_ahead = _ahead(sib, view, request, is_short=is_short)
    dop = 1 if is_short else len(alive)
    share_s = ahead_s / len(alive)
    prefill_s = _alone_s(sib, view, dop, request.num_tokens)
    free, needed = sum(view.free.values()), request.committed_tokens
    reason = (
        f"wait {step_s:.3f} s for an instance and {share_s:.3f} s for "
        f"{plural(num_ahead, 'request')} ahead, then prefill {request.num_tokens:,} tokens on "
        f"{plural(dop, 'instance')}, predicted {prefill_s:.3f} s"
    )
    if free < needed:
        reason += f"; it also waits for KV slots: {needed:,} needed, {free:,} free"
    return Prediction(dop, (), step_s + share_s, prefill_s, reason)


def _ahead(sib: Sib, view: View, request: Request, *, is_short: bool) -> tuple[float, int]:
    """Prefill seconds on one instance, and number, of the requests that go first."""
    total_s, counted, num_requests = 0.0, 0, 0
    unfinished = (r for r in view.running.values() if r.phase is Phase.PREFILL and r.left_tokens)
    for other in chain(unfinished, view.waiting):
        if other is request:
            continue
        num_requests += 1
        if counted == MAX_DEPTH or (is_short and other.left_tokens > request.num_tokens * 4):
            continue
        counted += 1
        total_s += sib.prefill_s(1, [(other.kv_tokens, other.left_tokens)])
    if counted == MAX_DEPTH:
        total_s *= num_requests / counted
        counted = num_requests
    return total_s, counted


def _alone_s(sib: Sib, view: View, dop: int, num_tokens: int) -> float:
    return left_s(sib, dop, cached=0, left=num_tokens, limits=view.limits)


def _left_of(sib: Sib, step: Step, now: float) -> float:
    """Predicted seconds until a step ends; one that is overdue does not end at once."""
    match step.plan:
        case PrefillPlan(items=prefills):
            lengths = [(item.start, item.num_tokens) for item in prefills]
            time_s = sib.prefill_s(step.plan.dop, lengths)
        case DecodePlan(items=decodes):
            time_s = sib.decode_s(
                dop=step.plan.dop,
                num_masters=len(step.plan.masters),
                batch=len(decodes),
                kv_tokens=sum(item.position + 1 for item in decodes),
            )
        case plan:
            time_s = sib.migrate_s(plan.num_tokens)
    spent_s = now - step.started_s
    return max(time_s - spent_s, OVERDUE_SHARE * max(time_s, spent_s))
