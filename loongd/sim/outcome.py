"""What a simulated run leaves behind: one outcome per request and, if wanted, every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from loongd.sched.snapshot import TotalsStatus


@dataclass(slots=True)
class Outcome:
    """The life of one request as its client sees it; times in seconds of virtual time.

    Args:
        num_tokens: tokens received so far.
        longest_gap_s: longest wait between two successive tokens.
        failure: the message when it failed.
    """

    request_id: str
    arrival_s: float
    input_tokens: int
    output_tokens: int
    num_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    longest_gap_s: float = 0.0
    end_s: float | None = None
    failure: str | None = None

    @property
    def ok(self) -> bool:
        return self.end_s is not None and self.failure is None

    @property
    def ttft_s(self) -> float:
        """Arrival to first token."""
        assert self.first_token_s is not None, f"{self.request_id} has no token"
        return self.first_token_s - self.arrival_s

    @property
    def latency_s(self) -> float:
        """Arrival to last token."""
        assert self.end_s is not None, f"{self.request_id} has not ended"
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for a single token, as in LoongServe's client."""
        if self.num_tokens < 2:
            return 0.0
        assert self.end_s is not None, f"{self.request_id} has not ended"
        assert self.first_token_s is not None, f"{self.request_id} has no token"
        return (self.end_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step that ran: `kind` is prefill, decode or migrate; `items` pairs requests with tokens."""

    kind: str
    started_s: float
    ended_s: float
    members: tuple[int, ...]
    items: tuple[tuple[str, int], ...]
    reason: str


@dataclass(slots=True)
class Run:
    """All outcomes in order of arrival.

    Args:
        end_s: virtual time of the last event.
        busy_s: for each kind of step, seconds of instance time spent in it.
        steps: every step, when recorded.
    """

    outcomes: list[Outcome]
    num_instances: int
    end_s: float = 0.0
    num_events: int = 0
    busy_s: dict[str, float] = field(default_factory=dict)
    steps: list[StepRecord] = field(default_factory=list)
    totals: TotalsStatus | None = None
