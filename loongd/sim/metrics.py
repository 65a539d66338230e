"""What a run was like for its clients: latencies, percentiles, attainment of an SLO.

Definitions: TTFT is arrival to first token. TPOT is the mean time per token after the first;
single-token requests count as 0 for the SLO and for the normalised output latency (as in
LoongServe's client) and are left out of the percentiles (as in vLLM's). Normalised latencies are
means over requests of latency / (input + output), TTFT / input and TPOT. Failed requests miss the
SLO and are in no latency.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

import numpy as np

from loongd.sim.outcome import Outcome, Run

MOST_FAILURES = 3
"""Failed requests that a summary names."""

# Prompt tokens, from (inclusive) and below.
CLASSES: tuple[tuple[str, float, float], ...] = (
    ("all", 0, inf),
    ("< 4K", 0, 4096),
    ("4K to 32K", 4096, 32768),
    ("32K to 128K", 32768, 131072),
    (">= 128K", 131072, inf),
)


@dataclass(frozen=True, slots=True)
class Slo:
    """LoongServe's Figure 12: good iff TTFT <= max(factor * T(len), floor) and TPOT <= tpot_s.

    Args:
        predict_s: seconds of an undisturbed prefill of so many tokens on the reference system; the
            paper judges all systems by its own profile at sp 4, tp 2.
    """

    predict_s: Callable[[int], float]
    ttft_factor: float = 25.0
    ttft_floor_s: float = 15.0
    tpot_s: float = 0.050

    def is_good(self, outcome: Outcome) -> bool:
        """Both limits kept; False for a failed request."""
        if not outcome.ok or outcome.tpot_s > self.tpot_s:
            return False
        limit_s = self.ttft_factor * self.predict_s(outcome.input_tokens)
        return outcome.ttft_s <= max(limit_s, self.ttft_floor_s)


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and percentiles of a set of `num` times in seconds; all 0 when it is empty."""

    num: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One class of prompt lengths.

    Args:
        total_s_per_token, input_s_per_token, output_s_per_token: the paper's normalised latencies.
        longest_gap_s: of each request, the longest wait between two tokens.
        slo_attainment: share of requests that kept the SLO, 0 to 1; None without one.
    """

    name: str
    num_requests: int
    num_failed: int
    ttft_s: Spread
    tpot_s: Spread
    longest_gap_s: Spread
    total_s_per_token: float
    input_s_per_token: float
    output_s_per_token: float
    slo_attainment: float | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A run judged.

    Args:
        offered_rps: requests over the time of arrivals.
        achieved_rps: requests that did not fail, over the whole run.
        busy: for each kind of step, its share of all instance time.
        failures: the first few requests that failed, each with why.
    """

    num_requests: int
    end_s: float
    offered_rps: float
    achieved_rps: float
    busy: dict[str, float]
    num_prefill_steps: int
    num_decode_steps: int
    num_preemptions: int
    num_scale_ups: int
    num_scale_downs: int
    classes: tuple[ClassSummary, ...]
    failures: tuple[str, ...] = ()

    def of(self, name: str) -> ClassSummary:
        """The class called `name`. Raises KeyError when no request is in it."""
        for summary in self.classes:
            if summary.name == name:
                return summary
        raise KeyError(name)


def summarise(run: Run, slo: Slo | None = None) -> Summary:
    """Judge a finished run; classes without requests are left out.

    A run that ends as it starts, all its requests refused, has rates and shares of 0.
    """
    totals = run.totals
    assert totals is not None, "the run has not finished"
    outcomes = run.outcomes
    last_arrival_s = outcomes[-1].arrival_s
    instance_s = run.num_instances * run.end_s
    return Summary(
        num_requests=len(outcomes),
        end_s=run.end_s,
        offered_rps=len(outcomes) / last_arrival_s if last_arrival_s else 0.0,
        achieved_rps=sum(o.ok for o in outcomes) / run.end_s if run.end_s else 0.0,
        busy={kind: busy_s / (instance_s or 1.0) for kind, busy_s in run.busy_s.items()},
        num_prefill_steps=totals.num_prefill_steps,
        num_decode_steps=totals.num_decode_steps,
        num_preemptions=totals.num_preemptions,
        num_scale_ups=totals.num_scale_ups,
        num_scale_downs=totals.num_scale_downs,
        classes=tuple(
            _summarise_class(name, members, slo)
            for name, low, high in CLASSES
            if (members := [o for o in outcomes if low <= o.input_tokens < high])
        ),
        failures=tuple(
            f"{o.request_id}: {o.failure}"
            for o in islice((o for o in outcomes if o.failure is not None), MOST_FAILURES)
        ),
    )


def attainment(outcomes: Sequence[Outcome], slo: Slo) -> float:
    """Share of requests that kept the SLO, 0 to 1."""
    return sum(map(slo.is_good, outcomes)) / len(outcomes)


def _summarise_class(name: str, outcomes: Sequence[Outcome], slo: Slo | None) -> ClassSummary:
    done = [o for o in outcomes if o.ok]
    several = [o for o in done if o.num_tokens > 1]
    return ClassSummary(
        name=name,
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(done),
        ttft_s=_spread([o.ttft_s for o in done]),
        tpot_s=_spread([o.tpot_s for o in several]),
        longest_gap_s=_spread([o.longest_gap_s for o in several]),
        total_s_per_token=_mean([o.latency_s / (o.input_tokens + o.num_tokens) for o in done]),
        input_s_per_token=_mean([o.ttft_s / o.input_tokens for o in done]),
        output_s_per_token=_mean([o.tpot_s for o in done]),
        slo_attainment=None if slo is None else attainment(outcomes, slo),
    )


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (float(p) for p in np.percentile(values, [50, 90, 99]))
    return Spread(len(values), _mean(values), p50, p90, p99, max(values))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
