"""Prometheus metrics of one daemon.

Knows: the name, help and buckets of each metric, and the identity that they keep: every request is
started once and ends once, so started = finished + aborted + rejected + failed + in flight.
Does not know: who calls it or when; it never raises for odd values, since numbers about the work
must not stop the work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LATENCY_BUCKETS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 300, 600, 1200,
)  # fmt: skip
TOKEN_LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.4, 0.8, 1.6, 5,
    20, 80, 300, 1200,
)  # fmt: skip
TOKEN_BUCKETS = (
    1, 4, 16, 64, 256, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576,
    2097152,
)  # fmt: skip
DEGREE_BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)

# Understood by every Prometheus, unlike the 1.0.0 that the library names by default.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "loongd:"
_LABELS = ("model_name", "engine")


class Metrics:
    """All metrics, in a registry of their own.

    A request begins with exactly one of `request_started` (accepted) and `request_rejected`
    (never accepted). An accepted one ends with exactly one of `request_finished` and
    `request_cancelled`. Counters of tokens: prompts when accepted, answers as they are drawn.
    `num_started` and `num_rejected` are two of the counters, for who shows them elsewhere.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._refresh: Callable[[], None] | None = None
        self._labels = {"model_name": model_name, "engine": "0"}
        self.num_started = 0
        self.num_rejected = 0
        self._add_requests()
        self._add_latencies()
        self._add_tokens()
        self._add_pool()
        self._add_elasticity()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        metric = Counter(_PREFIX + name, text, (*_LABELS, *labels), registry=self._registry)
        return metric if labels else metric.labels(**self._labels)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        metric = Gauge(_PREFIX + name, text, (*_LABELS, *labels), registry=self._registry)
        return metric if labels else metric.labels(**self._labels)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        metric = Histogram(
            _PREFIX + name, text, (*_LABELS, *labels), registry=self._registry, buckets=buckets
        )
        return metric if labels else metric.labels(**self._labels)

    def _add_requests(self) -> None:
        self._started = self._counter("requests_started", "Requests that came, refused or not.")
        self._success = self._counter(
            "request_success", "Requests that ended well.", "finished_reason"
        )
        self._failed = self._counter("requests_failed", "Accepted requests that loongd gave up.")
        self._aborted = self._counter(
            "requests_aborted", "Accepted requests that were cancelled.", "cause"
        )
        self._rejected = self._counter(
            "admission_rejections", "Requests that were never accepted.", "reason"
        )
        self._in_flight = self._gauge("requests_in_flight", "Accepted requests without an end.")
        self._running = self._gauge("num_requests_running", "Requests that prefill or decode.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for prefill.")
        self._preemptions = self._counter(
            "num_preemptions",
            "Times that a request gave up its KV for others and was queued again.",
        )
        self._requests_restarted = self._counter(
            "requests_restarted",
            "Times that a request lost its KV with an instance and was queued again.",
        )

    def _add_latencies(self) -> None:
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS_S
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "One token to the next.", TOKEN_LATENCY_BUCKETS_S
        )
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per token after the first, by request.",
            TOKEN_LATENCY_BUCKETS_S,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "Arrival to end.", LATENCY_BUCKETS_S
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "Arrival to start of prefill.", LATENCY_BUCKETS_S
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "Start of prefill to first token.", LATENCY_BUCKETS_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First token to end.", LATENCY_BUCKETS_S
        )

    def _add_tokens(self) -> None:
        self._prompt_total = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self._generation_total = self._counter(
            "generation_tokens", "Tokens drawn, stop tokens included."
        )
        self._prompt_size = self._histogram(
            "request_prompt_tokens", "Prompt tokens by request.", TOKEN_BUCKETS
        )
        self._generation_size = self._histogram(
            "request_generation_tokens", "Tokens drawn by finished request.", TOKEN_BUCKETS
        )
        self._max_tokens = self._histogram(
            "request_params_max_tokens", "Limit on new tokens by request.", TOKEN_BUCKETS
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "New tokens by step.", TOKEN_BUCKETS
        )

    def _add_pool(self) -> None:
        self._pool_usage = self._gauge("kv_cache_usage_perc", "Used share of the KV pool, 0 to 1.")
        self._pool_tokens = self._gauge("kv_pool_tokens", "Slots of the KV pool.", "state")
        self._audits = self._counter(
            "kv_pool_audits", "Comparisons of the daemon's and the workers' slots.", "result"
        )

    def _add_elasticity(self) -> None:
        self._degree = self._histogram(
            "esp_degree", "Instances in the group of a step.", DEGREE_BUCKETS, "phase"
        )
        self._step_time = self._histogram(
            "esp_step_seconds", "Wall time of a step.", TOKEN_LATENCY_BUCKETS_S, "phase"
        )
        self._scale_events = self._counter(
            "esp_scale_events", "Groups that grew or shrank.", "direction"
        )
        self._migrated_tokens = self._counter(
            "kv_migrated_tokens", "Tokens whose KV moved between instances."
        )
        self._migration_time = self._histogram(
            "kv_migration_seconds", "Wall time of a migration.", TOKEN_LATENCY_BUCKETS_S
        )
        self._instances = self._gauge("esp_instances", "Elastic instances.", "state")
        self._restarts = self._counter(
            "engine_restarts", "Times that all workers had to start again, as one was lost."
        )

    # -- a request's life

    def request_started(self, prompt_tokens: int, max_tokens: int) -> None:
        """A request was accepted."""
        self.num_started += 1
        self._started.inc()
        self._in_flight.inc()
        self._prompt_total.inc(max(prompt_tokens, 0))
        self._prompt_size.observe(prompt_tokens)
        self._max_tokens.observe(max_tokens)

    def request_rejected(self, reason: str) -> None:
        """A request came and was not accepted; `request_started` was not called for it."""
        self.num_started += 1
        self.num_rejected += 1
        self._started.inc()
        self._rejected.labels(**self._labels, reason=reason).inc()

    def request_cancelled(self, cause: str) -> None:
        """An accepted request was stopped from outside: client, timeout, shutdown.

        One that a stop string ended is not cancelled but finished, with reason stop.
        """
        self._in_flight.dec()
        self._aborted.labels(**self._labels, cause=cause).inc()

    def request_finished(
        self,
        reason: str,
        *,
        prompt_tokens: int,
        generated_tokens: int,
        queue_s: float | None,
        ttft_s: float | None,
        e2e_s: float,
        decode_s: float | None,
    ) -> None:
        """An accepted request ended by itself; `reason` is stop, length or error.

        The durations may be None for milestones that an unsuccessful request did not reach.
        """
        self._in_flight.dec()
        if reason == "error":
            self._failed.inc()
            return
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._generation_size.observe(generated_tokens)
        _observe(self._e2e, e2e_s)
        _observe(self._queue, queue_s)
        _observe(self._decode, decode_s)
        if ttft_s is not None and queue_s is not None:
            _observe(self._prefill, ttft_s - queue_s)
        if decode_s is not None and generated_tokens > 1:
            _observe(self._tpot, decode_s / (generated_tokens - 1))

    def first_token(self, seconds: float) -> None:
        """A request drew its first token, so many seconds after it came."""
        self._generation_total.inc()
        _observe(self._ttft, seconds)

    def inter_token(self, seconds: float) -> None:
        """A request drew one more token, so many seconds after the one before."""
        self._generation_total.inc()
        _observe(self._itl, seconds)

    def preempted(self, times: int = 1) -> None:
        """Requests gave up their KV for others and were queued again."""
        self._preemptions.inc(times)

    def requests_restarted(self, times: int) -> None:
        """Requests lost their KV with an instance and were queued again."""
        self._requests_restarted.inc(times)

    # -- the engine's work

    def step(
        self, phase: Literal["prefill", "decode"], dop: int, num_tokens: int, elapsed_s: float
    ) -> None:
        """A step of a group of `dop` instances over `num_tokens` new tokens is done."""
        self._degree.labels(**self._labels, phase=phase).observe(dop)
        _observe(self._step_time.labels(**self._labels, phase=phase), elapsed_s)
        self._step_tokens.observe(num_tokens)

    def migrated(self, num_tokens: int, elapsed_s: float) -> None:
        """KV of so many tokens has moved from one instance to another."""
        self._migrated_tokens.inc(num_tokens)
        _observe(self._migration_time, elapsed_s)

    def set_pool(self, total: int, used: int, free: int, reserved: int) -> None:
        """Slots of the whole pool: used and free sum to total; reserved is promised growth."""
        for state, slots in (
            ("total", total), ("used", used), ("free", free), ("reserved", reserved),
        ):  # fmt: skip
            self._pool_tokens.labels(**self._labels, state=state).set(slots)
        self._pool_usage.set(used / total if total > 0 else 0.0)

    def set_queue(self, running: int, waiting: int) -> None:
        """Requests that run and that wait."""
        self._running.set(running)
        self._waiting.set(waiting)

    def set_instances(self, ready: int, total: int) -> None:
        """Instances that are ready, of all that are configured."""
        self._instances.labels(**self._labels, state="ready").set(ready)
        self._instances.labels(**self._labels, state="lost").set(max(total - ready, 0))

    def engine_restarted(self) -> None:
        """All workers start again; one more for each such start that fails."""
        self._restarts.inc()

    def scale_event(self, direction: Literal["up", "down"], times: int = 1) -> None:
        """Groups grew or shrank."""
        self._scale_events.labels(**self._labels, direction=direction).inc(times)

    def pool_audit(self, ok: bool) -> None:
        """Daemon and worker compared their slots."""
        self._audits.labels(**self._labels, result="ok" if ok else "mismatch").inc()

    def on_render(self, refresh: Callable[[], None]) -> None:
        """Call `refresh` before each rendering, to set the gauges of pool and queue."""
        self._refresh = refresh

    def render(self) -> tuple[bytes, str]:
        """All metrics in Prometheus text format, and its content type."""
        if self._refresh is not None:
            self._refresh()
        return generate_latest(self._registry), CONTENT_TYPE


def _observe(histogram: Histogram, seconds: float | None) -> None:
    if seconds is not None and math.isfinite(seconds):
        histogram.observe(max(seconds, 0.0))
