"""What a scheduling policy sees, decides and may count on.

Knows: the read-only `View`, the decisions, and the `Policy` protocol. A policy is a pure function
of its view; the scheduler carries out what it decides and asks again after every event.
Does not know: segments, step ids, actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from loongd.sched.instance import InstanceView
from loongd.sched.request import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """The scheduler's options; `loongd.config.Config` explains each."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    prefill_tokens_per_instance: int = 512
    max_num_queued_reqs: int = 4096


@dataclass(frozen=True, slots=True)
class Hold:
    """Instances that the head of the queue waits for: nothing else starts there, except decode
    steps that are owed."""

    request_id: str
    instances: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """State of the world, to be read only.

    Args:
        free: free slots of each alive instance, ascending by instance.
        running: requests in prefill or decode.
        waiting: the queue, first come first.
        num_ending_tokens: slots of cancelled requests whose step still runs.
        hold: what the policy held when it was last asked.
    """

    limits: Limits
    instances: Mapping[int, InstanceView]
    free: Mapping[int, int]
    running: Mapping[str, Request]
    waiting: Iterable[Request]
    num_ending_tokens: int = 0
    hold: Hold | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """A request in a prefill: `keep` as in `PrefillItem`; `master` is to keep what it decodes."""

    request: Request
    keep: tuple[tuple[int, int], ...]
    master: int


@dataclass(frozen=True, slots=True)
class StartPrefill:
    members: tuple[int, ...]
    items: tuple[Placed, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class StartDecode:
    """A decode step; `items` pairs requests with their masters, `joined` are new members."""

    members: tuple[int, ...]
    items: tuple[tuple[Request, int], ...]
    joined: tuple[int, ...]
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


@dataclass(frozen=True, slots=True)
class Decisions:
    """All that starts now, and what is waited for; after a preemption the policy is asked again.

    `wanted` pairs requests left out of a decode step with the busy instance whose free slot they
    wait for, None when the pool is full.
    """

    prefills: tuple[StartPrefill, ...] = ()
    decodes: tuple[StartDecode, ...] = ()
    preempt: Preempt | None = None
    give_ups: tuple[GiveUp, ...] = ()
    hold: Hold | None = None
    wanted: tuple[tuple[Request, int | None], ...] = ()


class Policy(Protocol):
    """Chooses what starts. Must be deterministic, and must start something if nothing runs while
    a request can be served (else the scheduler would stand still)."""

    def decide(self, view: View) -> Decisions:
        """Everything that is to start now; at most one step for each instance."""
