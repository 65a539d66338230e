"""What may happen to the scheduler (events) and what it wants done (actions).

Knows: the two closed unions. Every event carries `now` (seconds of a monotonic clock); every
action that starts work carries one English sentence, `reason`, with its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from loongd.sched.plan import DecodePlan, MigratePlan, PrefillPlan

# ---- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A new request. `max_tokens` is the hard limit on new tokens; `reserve_tokens` (at most
    `max_tokens`) is the growth that admission counts on; a token in `stop_token_ids` ends the
    request once `min_tokens` have been produced. With `needs_history` no step is planned for it
    before all its tokens so far are known (penalties count them)."""

    now: float
    request_id: str
    prompt_tokens: int
    max_tokens: int
    reserve_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    needs_history: bool = False


class StepDone(msgspec.Struct, frozen=True):
    """All members of the step's group have finished; one drawn token for each sampling item."""

    now: float
    step_id: int
    elapsed_s: float
    tokens: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step could not run; its requests fail, its instances go on."""

    now: float
    step_id: int
    message: str


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The client went away, or the front end saw a stop string (`cause`: client, stop, ...)."""

    now: float
    request_id: str
    cause: str


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    """An instance is ready with `slots` free slots and no KV."""

    now: float
    instance: int
    slots: int


@dataclass(frozen=True, slots=True)
class InstanceLost:
    """An instance and its KV are gone; steps it took part in will never report."""

    now: float
    instance: int
    message: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Stop (`on`) or resume admitting new requests; those already accepted go on."""

    now: float
    on: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Nothing happened, but time has passed."""

    now: float


Event = Arrived | StepDone | StepFailed | Cancelled | InstanceJoined | InstanceLost | Drain | Tick

# ---- actions ----------------------------------------------------------------------------------


class RunPrefill(msgspec.Struct, frozen=True):
    plan: PrefillPlan
    reason: str


class RunDecode(msgspec.Struct, frozen=True):
    plan: DecodePlan
    reason: str


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move KV between two instances; ends with a `StepDone` without tokens."""

    plan: MigratePlan
    reason: str


class Emit(msgspec.Struct, frozen=True, gc=False):
    """Hand this token to the client; the last token of a request may be a stop token.

    A struct and not a dataclass: made for every token, and that takes a fifth of the time.
    """

    request_id: str
    token: int


class Finish(msgspec.Struct, frozen=True, gc=False):
    """The request ended well: `finish_reason` is stop, length or cancelled."""

    request_id: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """The request cannot be served; `code` is an OpenAI error code, `status` an HTTP status."""

    request_id: str
    message: str
    code: str
    status: int


class FreeSegments(msgspec.Struct, frozen=True, gc=False):
    """These segments are dead on every instance of `instances`."""

    segments: tuple[int, ...]
    instances: tuple[int, ...]
    reason: str


Action = RunPrefill | RunDecode | Migrate | Emit | Finish | Fail | FreeSegments
