"""Between the scheduler's plans and the workers' messages.

Knows: how a plan (lengths) and the live requests (token ids) make one `RunStep`, and when all
members of a step have reported.
Does not know: sockets, why a plan was made, what becomes of the tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from loongd.sched.events import Arrived
from loongd.sched.plan import DecodeItem, DecodePlan, MigratePlan, PrefillItem, PrefillPlan
from loongd.submission import Submission, Token, TokenStream
from loongd.wire import (
    Extend,
    RunMigrate,
    RunStep,
    Sampled,
    Sampling,
    StepDone,
    pack_tokens,
    unpack_tokens,
)


def is_penalised(sampling: Sampling) -> bool:
    """Whether all earlier tokens must be known before the next one can be drawn."""
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )


@dataclass(slots=True)
class LiveRequest:
    """An accepted request with the tokens it has so far."""

    submission: Submission
    stream: TokenStream
    generated: array[int] = field(default_factory=lambda: array("i"))
    last_token_s: float | None = None
    accepted: bool = False
    penalised: bool = field(init=False)

    def __post_init__(self) -> None:
        self.penalised = is_penalised(self.submission.sampling)

    def sampling(self, *, num_in_flight: int = 0) -> Sampling:
        """How the next token is drawn, with what depends on the tokens so far filled in.

        `num_in_flight` tokens are still to be drawn before it; must be 0 with a penalty.
        """
        submission, penalised = self.submission, self.penalised
        too_early = len(self.generated) + num_in_flight < submission.min_tokens
        if not too_early and not penalised:
            return submission.sampling
        assert not (penalised and num_in_flight), "a penalty needs all tokens before"
        return msgspec.structs.replace(
            submission.sampling,
            banned=sorted(submission.stop_token_ids) if too_early else (),
            history=pack_tokens(submission.prompt + self.generated) if penalised else b"",
            num_prompt_tokens=len(submission.prompt),
        )

    def tokens(self, start: int, count: int) -> bytes:
        """Ids at positions `start` .. `start + count - 1` of prompt and answer, packed."""
        prompt = self.submission.prompt
        if start >= len(prompt):
            first = start - len(prompt)
            return pack_tokens(self.generated[first : first + count])
        head = prompt[start : start + count]
        return pack_tokens(head + self.generated[: count - len(head)])


Plan = PrefillPlan | DecodePlan | MigratePlan


def step_message(
    plan: Plan, epoch: int, live: Mapping[str, LiveRequest], *, verify: bool = False
) -> RunStep | RunMigrate:
    """The message that all members of the plan's group receive.

    `verify` makes migrations carry checksums.
    """
    if isinstance(plan, MigratePlan):
        return RunMigrate(
            step_id=plan.step_id,
            epoch=epoch,
            source=plan.source,
            target=plan.target,
            moves=list(plan.moves),
            verify=verify,
        )
    if isinstance(plan, DecodePlan):
        follows = plan.follows
        return RunStep(
            step_id=plan.step_id,
            epoch=epoch,
            members=list(plan.members),
            batch=[_decode(i, live[i.request_id], follows=follows > 0) for i in plan.items],
            follows=follows,
        )
    items = () if plan.resumes else plan.items
    return RunStep(
        step_id=plan.step_id,
        epoch=epoch,
        members=list(plan.members),
        batch=[_prefill(item, live[item.request_id]) for item in items],
        until_layer=plan.layers.end if plan.layers is not None and plan.pauses else 0,
        resumes=plan.resumes,
    )


def _prefill(item: PrefillItem, request: LiveRequest) -> Extend:
    return Extend(
        request_id=item.request_id,
        tokens=request.tokens(item.start, item.num_tokens),
        start=item.start,
        master=None,
        segment=item.segment,
        keep=item.keep,
        cached=item.cached,
        holders=item.holders,
        sampling=request.sampling() if item.samples else None,
        holder_tokens=item.holder_tokens,
    )


def _decode(item: DecodeItem, request: LiveRequest, *, follows: bool) -> Extend:
    """`follows`: the token is still to be drawn, by the step in flight."""
    # by position, since names cost as much as all the rest
    return Extend(
        item.request_id,
        b"" if follows else request.tokens(item.position, 1),
        item.position,
        item.master,
        item.segment,
        (),
        item.cached,
        item.holders,
        request.sampling(num_in_flight=follows),
    )


@dataclass(slots=True)
class StepReports:
    """Reports of one step's members; the step is done when none is missing."""

    plan: Plan
    missing: set[int]
    elapsed_s: float = 0.0
    sampled: dict[str, Sampled] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> StepReports:
        return cls(plan, set(plan.members))

    def add(self, report: StepDone) -> bool:
        """Take one member's report; True when it was the last."""
        self.missing.discard(report.instance)
        self.elapsed_s = max(self.elapsed_s, report.elapsed_s)
        self.sampled.update([(sampled.request_id, sampled) for sampled in report.sampled])
        return not self.missing

    @property
    def tokens(self) -> tuple[tuple[str, int], ...]:
        """(request, token) in the plan's order; ended requests may be among them."""
        if isinstance(self.plan, MigratePlan):
            return ()
        found = map(self.sampled.get, [item.request_id for item in self.plan.items])
        return tuple([(one.request_id, one.token) for one in found if one is not None])

    @property
    def num_new_tokens(self) -> int:
        if isinstance(self.plan, MigratePlan):
            return self.plan.num_tokens
        if isinstance(self.plan, PrefillPlan):
            return sum(self.plan.finished_tokens)
        return len(self.plan.items)


def arrival(submission: Submission, now: float) -> Arrived:
    """What the scheduler is told of a new request."""
    return Arrived(
        now=now,
        request_id=submission.request_id,
        prompt_tokens=len(submission.prompt),
        max_tokens=submission.max_tokens,
        reserve_tokens=submission.reserve_tokens,
        stop_token_ids=submission.stop_token_ids,
        min_tokens=submission.min_tokens,
        needs_history=is_penalised(submission.sampling),
    )


def drawn_token(sampled: Sampled) -> Token:
    """What a worker has drawn, as the front end sees it."""
    if not sampled.top_ids:
        return Token(sampled.token, sampled.logprob)
    ids, logprobs = unpack_tokens(sampled.top_ids), array("f")
    logprobs.frombytes(sampled.top_logprobs)
    return Token(sampled.token, sampled.logprob, tuple(zip(ids, logprobs, strict=True)))
