"""One request as the scheduler sees it: lengths, phase, where its KV is.

Knows: what may follow what (`LEGAL`), and every length that derives from the three numbers a
request really has (prompt, generated, limit).
Does not know: token ids, slots of other requests, why it is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from types import MappingProxyType

from loongd.sched.plan import PrefillPlan


class Phase(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


LEGAL: Mapping[Phase, frozenset[Phase]] = MappingProxyType(
    {
        Phase.WAITING: frozenset({Phase.PREFILL, Phase.ENDED}),
        Phase.PREFILL: frozenset({Phase.DECODE, Phase.WAITING, Phase.ENDED}),
        Phase.DECODE: frozenset({Phase.WAITING, Phase.ENDED}),
        Phase.ENDED: frozenset(),
    }
)


@dataclass(slots=True, eq=False)
class Request:
    """State of one accepted request.

    Args:
        order: arrival number; smaller is older.
        needs_history: no step is planned for it before all its tokens so far are known.
        segments: ids of the segments with its KV, in position order.
        open_segment: the last of `segments` once decode has begun; new tokens join it.
        kv_tokens: tokens whose KV has slots, those of a running step and its follow-up included.
            The newest generated token gets its slot in its decode step.
        num_migrating: slots that a running migration has charged a second time, on its target.
        holders: instances with any token of the request, ascending.
        master: the instance that kept its newest token, or will keep the next one.
        wanted: a busy instance whose free slot the next token waits for.
        step_id: the step that it takes part in now.
        part: of a chunk that runs in parts, the last one that was started, unless that ends the
            chunk.
        chunk_began_s, chunk_s: when the first of its parts began, and what they have taken so far.
        last_step_id: the step that it was put into last; 0 before the first.
        run_order: grows from one request that begins to run to the next; 0 before.
        limit_tokens: the most tokens that the request may ever have.
        num_tokens: prompt and generated tokens: what a (new) prefill must compute.
        committed_tokens: slots that admission counts for it: its reserved growth, or one more
            than it has.
        growth_tokens: slots of its reservation that it has yet to use, once all of `num_tokens`
            is kept.
        broken: why a part of its KV is gone while a migration of another part still runs.
        num_losses: running steps that it lost because an instance died.
        num_passed: requests behind it that started while it was the head of the queue.
        arrived_s, first_token_s: when that was; the latter None before.
        queued_s: when it began to wait, the last time.
        migrated_s: when its KV was last moved; minus infinity when never.
    """

    request_id: str
    order: int
    prompt_tokens: int
    max_tokens: int
    reserve_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    needs_history: bool = False
    phase: Phase = Phase.WAITING
    num_generated: int = 0
    segments: tuple[int, ...] = ()
    open_segment: int | None = None
    kv_tokens: int = 0
    num_migrating: int = 0
    holders: tuple[int, ...] = ()
    master: int | None = None
    wanted: int | None = None
    step_id: int | None = None
    part: PrefillPlan | None = None
    chunk_began_s: float = 0.0
    chunk_s: float = 0.0
    last_step_id: int = 0
    run_order: int = 0
    broken: str = ""
    num_losses: int = 0
    num_preemptions: int = 0
    num_passed: int = 0
    arrived_s: float = 0.0
    queued_s: float = field(init=False)
    first_token_s: float | None = None
    migrated_s: float = -inf
    # These follow from the lengths above; `generate` keeps them right, for they are read far more
    # often than a token is generated.
    limit_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    committed_tokens: int = field(init=False)
    growth_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        reserved = self.prompt_tokens + self.reserve_tokens
        self.queued_s = self.arrived_s
        self.limit_tokens = self.prompt_tokens + self.max_tokens
        self.num_tokens = self.prompt_tokens + self.num_generated
        self.committed_tokens = max(reserved, self.num_tokens + 1)
        self.growth_tokens = max(0, reserved - self.num_tokens)

    def generate(self, num_tokens: int) -> None:
        """So many more tokens have been drawn."""
        self.num_generated += num_tokens
        self.num_tokens += num_tokens
        if num_tokens < self.growth_tokens:
            self.growth_tokens -= num_tokens
        else:
            self.growth_tokens = 0
            self.committed_tokens = self.num_tokens + 1

    @property
    def left_tokens(self) -> int:
        """Tokens of its prefill that no chunk has computed or computes yet."""
        return 0 if self.phase is Phase.DECODE else self.num_tokens - self.kv_tokens

    @property
    def is_unfinished(self) -> bool:
        """A part of its prefill is yet to be started."""
        return self.left_tokens > 0 or self.part is not None

    @property
    def done_tokens(self) -> int:
        """Tokens of its prefill that are computed, or are by the step that it is in: those of a
        chunk in parts by the share of its layers."""
        part = self.part
        if part is None or part.layers is None:
            return self.kv_tokens
        chunk = sum(item.num_tokens for item in part.items)
        return self.kv_tokens - chunk + chunk * part.layers.end // part.layers.total

    @property
    def undone_tokens(self) -> int:
        """The others of its prefill."""
        return 0 if self.phase is Phase.DECODE else self.num_tokens - self.done_tokens

    @property
    def needed(self) -> tuple[int, ...]:
        """Instances that its next step cannot do without: those with its KV, and of a chunk in
        parts all of its group."""
        if self.part is None:
            return self.holders
        return tuple(sorted({*self.holders, *self.part.members}))

    @property
    def between_chunks(self) -> bool:
        """A part of its prefill is done and the rest may start."""
        return self.phase is Phase.PREFILL and self.step_id is None

    def move(self, phase: Phase) -> None:
        """Enter `phase`. Raises AssertionError when that is not legal from the present one."""
        assert phase in LEGAL[self.phase], f"{self.request_id}: {self.phase} -> {phase}"
        self.phase = phase

    def wait_again(self, now: float) -> None:
        """It has lost its KV."""
        self.move(Phase.WAITING)
        self.queued_s = now

    def is_last(self, token: int) -> bool:
        """Whether `token`, when it is drawn next, may be the last one."""
        return token in self.stop_token_ids or self.num_generated + 1 >= self.max_tokens

    def stops_at(self, token: int) -> str | None:
        """The finish reason if the newest generated token, `token`, is the last one."""
        if token in self.stop_token_ids and self.num_generated >= self.min_tokens:
            return "stop"
        return "length" if self.num_generated >= self.max_tokens else None

    def forget_kv(self) -> tuple[int, ...]:
        """Drop all KV; the ids of the segments to free."""
        segments, self.segments = self.segments, ()
        self.open_segment = self.master = self.wanted = self.step_id = self.part = None
        self.holders = ()
        self.kv_tokens = self.num_migrating = 0
        self.broken = ""
        return segments
