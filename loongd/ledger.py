"""What the engine counts: requests, tokens, steps and slots, into metrics.

Knows: which milestone of a request or step feeds which metric, so that
started = finished + cancelled + rejected + failed + in flight at all times. A request that is
rejected is counted where its answer is made (`rest.generate`), whoever refused it.
Does not know: why anything happens.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Any, Literal

from loongd.metrics import Metrics
from loongd.sched.plan import MigratePlan, PrefillPlan
from loongd.sched.snapshot import Snapshot, TotalsStatus
from loongd.steps import LiveRequest, StepReports
from loongd.wire import Audit

_log = logging.getLogger(__name__)


class Ledger:
    """The one writer of the engine's metrics."""

    def __init__(self, metrics: Metrics, *, log_requests: bool) -> None:
        """`log_requests` writes one line for each request that has ended."""
        self._metrics = metrics
        self._log_requests = log_requests
        self._seen: TotalsStatus | None = None
        self._refused: Counter[str] = Counter()

    def started(self, live: LiveRequest) -> None:
        """The request was accepted."""
        submission = live.submission
        self._metrics.request_started(len(submission.prompt), submission.max_tokens)

    def refused(self, code: str) -> None:
        """The scheduler has refused a request on arrival, and counts it with those that failed."""
        self._refused[code] += 1

    def complete(self, totals: dict[str, Any]) -> None:
        """Bring the scheduler's totals into accord with the metrics, where `started` are all
        requests that came and `failed` only accepted ones."""
        totals["started"] = self._metrics.num_started
        totals["rejected"] = self._metrics.num_rejected
        totals["failed_by_code"] = dict(Counter(totals["failed_by_code"]) - self._refused)
        totals["failed"] = sum(totals["failed_by_code"].values())

    def cancelled(self, live: LiveRequest, cause: str) -> None:
        """The accepted request was stopped from outside."""
        self._metrics.request_cancelled(cause)
        self._say(live, f"cancelled ({cause})")

    def token(self, live: LiveRequest, now: float) -> None:
        """The request has drawn one more token; notes the time in it."""
        timings = live.stream.timings
        if live.last_token_s is None:
            timings.first_token_s = now
            self._metrics.first_token(now - timings.arrived_s)
        else:
            self._metrics.inter_token(now - live.last_token_s)
        live.last_token_s = now

    def finished(self, live: LiveRequest, reason: str) -> None:
        """The accepted request has ended; `reason` is stop, length or error."""
        timings = live.stream.timings
        ended = timings.finished_s or time.monotonic()
        started, first = timings.prefill_started_s, timings.first_token_s
        self._metrics.request_finished(
            reason,
            prompt_tokens=len(live.submission.prompt),
            generated_tokens=len(live.generated),
            queue_s=None if started is None else started - timings.arrived_s,
            ttft_s=None if first is None else first - timings.arrived_s,
            e2e_s=ended - timings.arrived_s,
            decode_s=None if first is None else ended - first,
        )
        self._say(live, reason)

    def _say(self, live: LiveRequest, how: str) -> None:
        if not self._log_requests:
            return
        timings = live.stream.timings
        ended = timings.finished_s or time.monotonic()
        first = timings.first_token_s
        _log.info(
            "%s ended: %s; %d prompt and %d generated tokens, first after %s, all in %.3f s",
            live.submission.request_id,
            how,
            len(live.submission.prompt),
            len(live.generated),
            "-" if first is None else f"{first - timings.arrived_s:.3f} s",
            ended - timings.arrived_s,
            extra={"request_id": live.submission.request_id},
        )

    def step_done(self, reports: StepReports) -> None:
        """All members have reported the step."""
        plan = reports.plan
        if isinstance(plan, MigratePlan):
            self._metrics.migrated(plan.num_tokens, reports.elapsed_s)
            return
        phase: Literal["prefill", "decode"] = (
            "prefill" if isinstance(plan, PrefillPlan) else "decode"
        )
        self._metrics.step(phase, plan.dop, reports.num_new_tokens, reports.elapsed_s)

    def audited(self, audit: Audit) -> bool:
        """Whether a worker's account agrees that nothing is in use; says loudly if not."""
        right = audit.used == 0 and audit.free == audit.total
        self._metrics.pool_audit(right)
        if not right:
            _log.error(
                "instance %d holds %d of %d KV slots in %d segments while nothing runs; freeing",
                audit.instance,
                audit.used,
                audit.total,
                audit.num_segments,
            )
        return right

    def instances(self, ready: int, total: int) -> None:
        """So many instances are ready."""
        self._metrics.set_instances(ready, total)

    def restarted(self) -> None:
        """All workers start again, as one was lost."""
        self._metrics.engine_restarted()

    def refresh(self, snapshot: Snapshot) -> None:
        """Gauges, and counters that the scheduler keeps, as they are now."""
        pool, totals = snapshot.pool, snapshot.totals
        self._metrics.set_pool(pool.total, pool.used, pool.free, pool.reserved)
        self._metrics.set_queue(snapshot.num_running, snapshot.num_waiting)
        before = self._seen or replace(
            totals, num_preemptions=0, num_lost=0, num_scale_downs=0, num_scale_ups=0
        )
        self._metrics.preempted(totals.num_preemptions - before.num_preemptions)
        self._metrics.requests_restarted(totals.num_lost - before.num_lost)
        self._metrics.scale_event("down", totals.num_scale_downs - before.num_scale_downs)
        self._metrics.scale_event("up", totals.num_scale_ups - before.num_scale_ups)
        self._seen = totals
