"""What a scheduling policy sees, decides and may count on.

What is made for every event is a msgspec struct instead of a frozen dataclass: that takes a fifth
of the time.

Knows: the read-only `View`, the decisions, and the `Policy` protocol. A policy is a pure function
of its view; the scheduler carries out what it decides and asks again after every event.
Does not know: segments, step ids, actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

import msgspec

from loongd.sched.instance import InstanceView
from loongd.sched.plan import DecodePlan, Layers
from loongd.sched.request import Request
from loongd.sched.tally import Tally


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's options; `loongd.config.Config` explains each.

    `decode_share` is seconds of decode for each second of a prefill on the same instance.
    `max_step_tokens` is of each instance: its memory for a step's work is made for so many new
    tokens, so `max_num_batched_tokens` must not be above it. `queue_ahead` needs workers that
    can take a step before the one before it has ended. `num_layers` are the model's, between which
    a chunk may pause; with 1 none does.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_tokens_per_instance: int = 512
    max_step_tokens: int = 131072
    max_num_queued_reqs: int = 4096
    max_prefill_wait_s: float = 0.3
    max_passes: int = 1000
    decode_share: float = 0.5
    queue_ahead: bool = False
    num_layers: int = 1


@dataclass(frozen=True, slots=True)
class Hold:
    """Instances that the head of the queue waits for: nothing else starts there, except decode
    steps that are owed."""

    request_id: str
    instances: tuple[int, ...]


class View(msgspec.Struct, frozen=True):
    """State of the world, to be read only.

    Args:
        free: free slots of each alive instance, ascending by instance.
        running: requests in prefill or decode.
        tally: what these count for.
        waiting: the queue, first come first.
        shorter: those of it that are new and have at most so many tokens.
        num_ending_tokens: slots of cancelled requests whose step still runs.
        hold: what the policy held when it was last asked.
        now: seconds of the events' clock.
        avg_decode_s: mean time that finished requests spent in decode; None before the first.
        tokens_on: tokens of a running request whose KV is on an instance.
    """

    limits: Limits
    instances: Mapping[int, InstanceView]
    free: Mapping[int, int]
    running: Mapping[str, Request]
    tally: Tally
    waiting: Iterable[Request]
    num_ending_tokens: int = 0
    hold: Hold | None = None
    now: float = 0.0
    avg_decode_s: float | None = None
    tokens_on: Callable[[Request, int], int] = lambda _request, _instance: 0
    shorter: Callable[[int], Iterable[Request]] = lambda _most_tokens: ()


class Placed(msgspec.Struct, frozen=True):
    """A request in a prefill: `keep` as in `PrefillItem`; `master` is to keep what it decodes.

    `keep` may hold fewer tokens than the request has left: then the step is a chunk of its
    prefill, and the policy is asked for the next when it is done.
    """

    request: Request
    keep: tuple[tuple[int, int], ...]
    master: int

    @property
    def num_tokens(self) -> int:
        return sum(num_tokens for _, num_tokens in self.keep)

    @property
    def is_last(self) -> bool:
        """No chunk follows."""
        return self.num_tokens == self.request.left_tokens


class StartPrefill(msgspec.Struct, frozen=True):
    """A prefill step; with `layers` the first part of a chunk, which is of one request then."""

    members: tuple[int, ...]
    items: tuple[Placed, ...]
    reason: str
    layers: Layers | None = None


class StartPart(msgspec.Struct, frozen=True):
    """The next part of the chunk that `request` has paused in."""

    request: Request
    layers: Layers
    reason: str


class StartDecode(msgspec.Struct, frozen=True):
    """A decode step; `items` pairs requests with their masters, `joined` are new members."""

    members: tuple[int, ...]
    items: tuple[tuple[Request, int], ...]
    joined: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StartMigrate:
    """Move everything that `requests` (decoding, in no step) have on `source` to `target`."""

    source: int
    target: int
    requests: tuple[Request, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Preempt:
    """Drop the KV of a request that is not in a step; it waits at the front of the queue."""

    request: Request
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A waiting request that can never fit the pool."""

    request: Request
    message: str


class Decisions(msgspec.Struct, frozen=True):
    """All that starts now, and what is waited for; after a preemption the policy is asked again.

    `wanted` pairs requests left out of a decode step with the busy instance whose free slot they
    wait for, None when the pool is full. Migrations start before prefills, these before `parts` of
    chunks that have begun, and these before decodes.
    """

    prefills: tuple[StartPrefill, ...] = ()
    decodes: tuple[StartDecode, ...] = ()
    preempt: Preempt | None = None
    give_ups: tuple[GiveUp, ...] = ()
    hold: Hold | None = None
    wanted: tuple[tuple[Request, int | None], ...] = ()
    migrations: tuple[StartMigrate, ...] = ()
    parts: tuple[StartPart, ...] = ()


class Settled(msgspec.Struct, frozen=True, gc=False):
    """How often, and until when, a decode step is certain to be followed by one just like it."""

    num_steps: int
    until_s: float


NOT_SETTLED = Settled(0, -inf)
ALWAYS_SETTLED = Settled(1 << 62, inf)


class Policy(Protocol):
    """Chooses what starts. Must be deterministic, and must start something if nothing runs while
    a request can be served (else the scheduler would stand still).

    `steady_requests`: a decode group of one instance and at most so many requests, with room,
    steps on unchanged while nothing waits and nothing is half done; with `steady_groups` also one
    of several instances.
    `pays_decode`: behind a prefill, decode has `decode_share` of its time before the next; else it
    has a step.
    """

    @property
    def steady_requests(self) -> int: ...

    @property
    def steady_groups(self) -> bool: ...

    @property
    def pays_decode(self) -> bool: ...

    def settled(self, view: View, groups: Sequence[Sequence[int]]) -> list[Settled]:
        """Of decode groups of these instances, each in a step with all its requests: how long
        nothing else than their next step starts when one ends, if nobody arrives, no prefill or
        migration ends, and no request ends."""

    def masters(
        self, plan: DecodePlan, free: Mapping[int, int], num_steps: int
    ) -> Sequence[tuple[int, ...]]:
        """Who is master of each item of `plan` in each of the next steps just like it, while all
        members have room for them; `free` slots are as when it runs."""

    def decide(self, view: View) -> Decisions:
        """Everything that is to start now; at most one step for each instance."""


def same_masters(plan: DecodePlan, num_steps: int) -> Sequence[tuple[int, ...]]:
    """For `Policy.masters`: each request keeps its own."""
    return [tuple(item.master for item in plan.items)] * num_steps
