"""Why a request of the queue waits, and stories that say it.

Knows: what admission counts, and the order of the queue. Does not know: how long it will be, or
which short prompts a policy lets pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from loongd.sched.request import Phase, Request
from loongd.sched.state import State
from loongd.sched.story import Story, Wait
from loongd.sched.words import name_instances


def tell(state: State, request_id: str) -> Story | None:
    """A copy of a story, up to what a waiting request waits for; None when unknown."""
    story, request = state.stories.get(request_id), state.waiting.get(request_id)
    if story is None or request is None:
        return story
    return replace(story, wait=_Queue(state).why(request))


def waited_for(state: State, request: Request) -> str:
    """`; it waited for ...` when it waits now, else nothing."""
    if request.phase is not Phase.WAITING:
        return ""
    return f"; it waited {_Queue(state).why(request).describe()}"


def first_wait(state: State) -> Wait | None:
    """Why the first of the queue waits; None when nobody does."""
    first = next(iter(state.waiting), None)
    return None if first is None else _Queue(state).why(first)


class _Queue:
    """`spare` slots of `total` are left by admission's count."""

    def __init__(self, state: State) -> None:
        self._state = state
        # Not from the tally, which may wait for the next round.
        committed = sum(request.committed_tokens for request in state.running.values())
        ending = sum(r.kv_tokens + r.num_migrating for r in state.ending.values())
        self._total = state.pool.total
        self._spare = max(0, self._total - committed - ending)

    def why(self, request: Request) -> Wait:
        """What a waiting request waits for."""
        ahead: list[Request] = []
        for other in self._state.waiting:
            if other is request:
                break
            ahead.append(other)
        kind, what = self._find(request, ahead)
        return Wait(
            request_id=request.request_id,
            kind=kind,
            what=what,
            since_s=request.queued_s,
            num_ahead=len(ahead),
            needed_slots=request.committed_tokens,
            prompt_tokens=request.prompt_tokens,
            answer_tokens=request.committed_tokens - request.prompt_tokens,
            spare_slots=self._spare,
            total_slots=self._total,
        )

    def _find(self, request: Request, ahead: Sequence[Request]) -> tuple[str, str]:
        state, total, most = self._state, self._total, self._state.limits.max_num_seqs
        if total == 0:
            return "workers", "the workers: no instance is ready"
        if request.committed_tokens > total:
            known = state.known_slots
            lost = f"{total:,} of {known:,} are there until the lost instances return"
            return "workers", f"{_describe_need(request)}; {lost}"
        if len(state.running) >= most:
            running = f"{len(state.running):,} of at most {most:,} are running"
            return "places", f"a place; {running} (max_num_seqs)"
        if request.committed_tokens > self._spare:
            return "slots", self._describe_slots(request)
        # Who waits for a lost instance is not waited for.
        first = next((other for other in ahead if other.committed_tokens <= total), None)
        if first is not None and first.committed_tokens > self._spare:
            return "turn", f"its turn; the first waits for {self._describe_slots(first)}"
        return "instance", self._describe_instance(request)

    def _describe_slots(self, request: Request) -> str:
        spare = f"{self._spare:,} of {self._total:,} are neither used nor reserved"
        return f"{_describe_need(request)}; {spare}"

    def _describe_instance(self, request: Request) -> str:
        hold = self._state.hold
        if hold is not None and hold.request_id == request.request_id:
            held = "which is" if len(hold.instances) == 1 else "which are"
            return f"{name_instances(hold.instances)}, {held} held for it"
        alive = [instance for instance in self._state.instances.values() if instance.alive]
        num_busy = sum(instance.step is not None for instance in alive)
        return f"an instance; {num_busy:,} of {len(alive):,} are in a step"


def _describe_need(request: Request) -> str:
    """Its slots, and which option has reserved them."""
    answer = request.committed_tokens - request.prompt_tokens
    by = "default_reserve_tokens"
    if request.reserve_tokens == request.max_tokens:
        # A request without max_tokens may have whatever fits, and that may be less.
        by = f"max_tokens or {by}"
    text = f"{answer:,} reserved for its answer by {by}"
    if request.num_generated >= request.reserve_tokens:
        text = f"{answer:,} for its answer"
    if request.num_generated:
        text += f", of which it has {request.num_generated:,}"
    return f"{request.committed_tokens:,} slots ({request.prompt_tokens:,} prompt tokens, {text})"
