"""The global manager: the one writer of scheduling state.

Knows: how events reach the scheduler and how its actions are carried out; every live request.
Does not know: how decisions are made (`sched`), how workers are kept alive (`pool`), text, HTTP.

All methods run on one event loop and none awaits between an event and its actions, so the
scheduler sees one event at a time. Losing a worker loses KV, not requests: the pool is started
again under the next epoch and every request is prefilled from its prompt and the tokens it has so
far, while its client's stream stays open.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from loongd import wire
from loongd.errors import RequestError, WorkerError
from loongd.exclusive import Exclusive
from loongd.ledger import Ledger
from loongd.metrics import Metrics
from loongd.pool import OnProgress, PoolEvent, WorkerLost, WorkerPool
from loongd.sched.events import (
    Action,
    Cancelled,
    Drain,
    Emit,
    Event,
    Fail,
    Finish,
    FreeSegments,
    InstanceJoined,
    InstanceLost,
    Migrate,
    RunDecode,
    RunPrefill,
    StepDone,
    StepFailed,
)
from loongd.sched.scheduler import Scheduler
from loongd.sched.words import plural
from loongd.status import engine_status, node_status, plan_json, story_json
from loongd.steps import LiveRequest, StepReports, arrival, drawn_token, step_message
from loongd.submission import Submission, Timings, TokenStream
from loongd.vigil import RestartLimit

_log = logging.getLogger(__name__)
_RESTARTS_WINDOW_S = 300.0
_MAX_RESTARTS = 5  # more within the window, and the engine gives up

Starts = Callable[[int], list[wire.Start]]
"""Start messages of all instances for an epoch."""


class GlobalManager:
    """Serves submissions on the instances of a pool (`loongd.submission.Engine`)."""

    def __init__(
        self,
        scheduler: Scheduler,
        pool: WorkerPool,
        metrics: Metrics,
        *,
        model_limit_tokens: int,
        node: dict[str, Any],
        log_requests: bool = True,
    ) -> None:
        """`model_limit_tokens` is what the model and the configuration allow a request; `node`
        are facts for the status page (name, version, model, ...)."""
        self._scheduler = scheduler
        self._pool = pool
        self._ledger = Ledger(metrics, log_requests=log_requests)
        metrics.on_render(lambda: self._ledger.refresh(scheduler.snapshot()))
        self._model_limit_tokens = model_limit_tokens
        self.node = node
        self._began_s = time.monotonic()
        self._epoch = 0
        self._started = False
        self._live: dict[str, LiveRequest] = {}
        self._steps: dict[int, StepReports] = {}
        self._drawn: dict[str, wire.Sampled] = {}
        self._instances: dict[int, wire.Ready] = {}
        self._lost: WorkerLost | None = None
        self._restarts = RestartLimit(most=_MAX_RESTARTS, window_s=_RESTARTS_WINDOW_S)
        self._steps_sent = 0
        self._audited_at: int | None = None
        self._exclusive: Exclusive | None = None
        self._failed = False
        self._stopping = False

    # ---- life ----------------------------------------------------------------------------------

    async def start(self, starts: Starts, on_progress: OnProgress) -> None:
        """Start all instances and admit requests. Raises WorkerError."""
        self._epoch += 1
        ready = await self._pool.start(starts(self._epoch), on_progress)
        now = time.monotonic()
        self._instances = {instance.instance: instance for instance in ready}
        self._apply(*(InstanceJoined(now, one.instance, one.pool_tokens) for one in ready))
        self._started, self._lost = True, None
        self._ledger.instances(len(ready), len(ready))

    async def run(self, starts: Starts, on_progress: OnProgress) -> None:
        """Carry events to the scheduler until `stop`, or until the pool cannot be kept alive.

        Raises WorkerError in the second case; every live request has then failed.
        """
        # requests that were given up while this waited have no stream any more
        while (event := await self._pool.receive()) and not self._stopping:
            if isinstance(event, WorkerLost):
                await self._recover(event, starts, on_progress)
            else:
                self._on_report(event)

    async def stop(self) -> None:
        """End the workers; live requests fail with 503."""
        self.give_up()
        await self._pool.stop()

    def give_up(self) -> None:
        """Fail what is live with 503: the server ends before it can finish it."""
        self._stopping, what = True, "the server is shutting down"
        self._fail_all(RequestError(what, status=503, code="shutdown", retry_after_s=5))

    async def _recover(self, lost: WorkerLost, starts: Starts, on_progress: OnProgress) -> None:
        """Start the pool again; requests wait meanwhile and are prefilled again after."""
        words = "instance %d is lost: %s; all start again, then requests go on: %d"
        _log.error(words, lost.instance, lost.message, len(self._live))
        now, num_instances, self._lost = time.monotonic(), len(self._instances), lost
        # Members of a broken exchange may wait for ever, so all workers go.
        await self._pool.kill()
        if self._exclusive is not None:
            self._exclusive.put(lost)
        self._steps.clear()
        self._apply(*(InstanceLost(now, i, lost.words(i)) for i in sorted(self._instances)))
        self._instances.clear()
        self._ledger.instances(0, num_instances)
        why = f"instance {lost.instance}: {lost.message}"
        while not self._restarts.exceeded(time.monotonic()):
            self._ledger.restarted()
            try:
                await self.start(starts, on_progress)
            except WorkerError as error:
                why = str(error)
                _log.error("a restart failed: %s", why)
                await self._pool.kill()
            else:
                return _log.info("all instances are ready again")
        self._failed = True
        message = f"workers were lost over {_MAX_RESTARTS} times in {_RESTARTS_WINDOW_S:g} s: {why}"
        self._fail_all(RequestError(message, status=503, code="engine_dead"))
        raise WorkerError(message)

    # ---- engine --------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """All instances are up and new requests are admitted."""
        busy = self._failed or self.draining or self._stopping or self._exclusive is not None
        return bool(self._instances) and not busy

    @property
    def alive(self) -> bool:
        """The engine makes progress, or restarts its workers."""
        return not self._failed

    @property
    def draining(self) -> bool:
        """New requests are refused."""
        return self._scheduler.draining

    @property
    def a_worker(self) -> wire.Ready:
        """What one of the workers said of itself; they are up."""
        return next(iter(self._instances.values()))

    @property
    def max_model_len(self) -> int:
        """Most tokens of one request that model, configuration and pool allow."""
        slots = sum(ready.pool_tokens for ready in self._instances.values())
        return min(self._model_limit_tokens, slots) if slots else self._model_limit_tokens

    def submit(self, submission: Submission) -> TokenStream:
        """Queue a request. Raises RequestError when it cannot be taken."""
        if self._failed or not self._started:
            raise RequestError("engine not ready", status=503, code="not_ready", retry_after_s=5)
        if self._exclusive is not None:
            what = "the server is measuring its speed (loongctl profile)"
            raise RequestError(what, status=503, code="profiling", retry_after_s=30)
        now = time.monotonic()
        timings = Timings(now)
        lengths = len(submission.prompt), submission.max_tokens
        predicted = self._scheduler.predict(*lengths, now, submission.reserve_tokens)
        if predicted is not None and predicted.dop:
            timings.predicted_ttft_s = predicted.queue_s + predicted.prefill_s
            timings.is_rough_ttft = predicted.rough
        stream = TokenStream(submission.request_id, timings, self._cancel)
        live = LiveRequest(submission, stream)
        self._live[submission.request_id] = live
        self._apply(arrival(submission, now))
        refusal = None if submission.request_id in self._live else stream.refusal()
        if refusal is not None:
            self._ledger.refused(refusal.code or "refused")
            raise refusal
        live.accepted = True
        self._ledger.started(live)
        return stream

    @contextmanager
    def exclusive(self) -> Iterator[Exclusive]:
        """The workers for one caller alone; requests are refused meanwhile.

        Raises RequestError (409) while any request is here or another caller has the workers.
        """
        what = ""
        if self._exclusive is not None:
            what = "a profile is being measured"
        elif not self._instances:
            what = "the workers are not up"
        elif self._live or self._steps:
            left = (plural(len(self._live), "request"), plural(len(self._steps), "step"))
            what = " and ".join(left) + " are not done (loongctl drain --wait waits for them)"
        if what:
            raise RequestError(f"the workers cannot be measured: {what}", status=409, code="busy")
        self._exclusive = Exclusive(self._pool.send, self._instances.values(), self._epoch)
        try:
            yield self._exclusive
        finally:
            self._exclusive = None
            # The next audit frees what a caller that was cut short has left behind.
            self._audited_at = None

    def drain(self) -> None:
        """Refuse new requests from now on; accepted ones go on."""
        self._apply(Drain(time.monotonic(), on=True))

    def undrain(self) -> None:
        """Admit requests again."""
        self._apply(Drain(time.monotonic(), on=False))

    @property
    def num_live(self) -> int:
        """Accepted requests that have not ended."""
        return len(self._live)

    def _cancel(self, request_id: str, cause: str) -> None:
        if request_id in self._live:
            self._apply(Cancelled(time.monotonic(), request_id, cause))

    # ---- events and actions --------------------------------------------------------------------

    def _on_report(self, report: PoolEvent) -> None:
        if self._exclusive is not None:
            self._exclusive.put(report)
            return
        now = time.monotonic()
        match report:
            case wire.StepDone():
                reports = self._steps.get(report.step_id)
                if reports is not None and reports.add(report):
                    self._on_step_done(reports, now)
            case wire.StepFailed():
                if self._steps.pop(report.step_id, None) is not None:
                    self._apply(StepFailed(now, report.step_id, report.message))
            case wire.Audit():
                self._on_audit(report)

    def _on_step_done(self, reports: StepReports, now: float) -> None:
        plan = reports.plan
        del self._steps[plan.step_id]
        self._drawn = reports.sampled
        self._ledger.step_done(reports)
        self._apply(StepDone(now, plan.step_id, reports.elapsed_s, reports.tokens))
        self._drawn = {}

    def _apply(self, *events: Event) -> None:
        for action in self._scheduler.handle(*events):
            self._perform(action, events[-1].now)

    def _perform(self, action: Action, now: float) -> None:
        match action:
            case RunPrefill() | RunDecode() | Migrate():
                self._run(action, now)
            case Emit():
                self._emit(action, now)
            case Finish():
                self._finish(action, now)
            case Fail():
                self._fail(action, now)
            case FreeSegments():
                message = wire.FreeSegments(segments=list(action.segments))
                for instance in action.instances:
                    if instance in self._instances:
                        self._pool.send(instance, message)

    def _run(self, action: RunPrefill | RunDecode | Migrate, now: float) -> None:
        _log.debug("%s", action.reason)
        plan = action.plan
        verify = _log.isEnabledFor(logging.DEBUG)
        message = step_message(plan, self._epoch, self._live, verify=verify)
        self._steps[plan.step_id] = StepReports.of(plan)
        self._steps_sent += 1
        for instance in plan.members:
            self._pool.send(instance, message)
        if isinstance(action, RunPrefill):
            for item in action.plan.items:
                timings = self._live[item.request_id].stream.timings
                if timings.prefill_started_s is None:
                    timings.prefill_started_s = now

    def _emit(self, action: Emit, now: float) -> None:
        live = self._live[action.request_id]
        live.generated.append(action.token)
        stream = live.stream
        stream.num_tokens += 1
        self._ledger.token(live, now)
        if action.token in live.submission.stop_token_ids:
            stream.stop_token = action.token
        else:
            stream.put_token(drawn_token(self._drawn[action.request_id]))

    def _finish(self, action: Finish, now: float) -> None:
        live = self._live.pop(action.request_id)
        live.stream.timings.finished_s = now
        live.stream.put_end(action.finish_reason)
        cause = live.stream.finish_reason
        if action.finish_reason == "cancelled":
            self._ledger.cancelled(live, cause or "client")
        else:
            self._ledger.finished(live, "stop" if cause == "stop" else action.finish_reason)

    def _fail(self, action: Fail, now: float) -> None:
        live = self._live.pop(action.request_id)
        later = 5 if action.status == 503 else None
        error = RequestError(
            action.message, status=action.status, code=action.code, retry_after_s=later
        )
        live.stream.timings.finished_s = now
        live.stream.put_end(error)
        if live.accepted:
            self._ledger.finished(live, "error")

    def _fail_all(self, error: RequestError) -> None:
        for live in self._live.values():
            live.stream.put_end(error)
            self._ledger.finished(live, "error")
        self._live.clear()

    # ---- accounts ------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """A JSON-able snapshot: node, instances, groups, pool, queue, totals."""
        snapshot = self._scheduler.snapshot()
        engine = engine_status(snapshot, self._instances, self._pool.pids, self._lost)
        self._ledger.complete(engine["totals"])
        facts = self.node | {"state": self._state(), "max_model_len": self.max_model_len}
        return {"node": node_status(facts, self._began_s, self._instances), **engine}

    def _state(self) -> str:
        if self._failed:
            return "failed"
        if self.draining or self._stopping:
            return "draining"
        if self._exclusive is not None:
            return "profiling"
        return "ready" if self._instances else "starting"

    def story(self, request_id: str) -> dict[str, Any] | None:
        """A JSON-able account of one request's life; None when unknown."""
        story = self._scheduler.story(request_id)
        return None if story is None else story_json(request_id, story, time.monotonic())

    def story_ids(self) -> tuple[list[str], list[str]]:
        """Ids of the ended and of the live requests that have a story, oldest first."""
        return self._scheduler.story_ids()

    def plan(self, prompt_tokens: int, max_tokens: int) -> dict[str, Any] | None:
        """A JSON-able account of what would become of a prompt now; None without a SIB."""
        found = self._scheduler.predict(prompt_tokens, max_tokens, time.monotonic())
        if found is None:
            return None
        limit, state = self.max_model_len, self._state()
        return plan_json(found, prompt_tokens, max_tokens, limit_tokens=limit, state=state)

    def audit(self) -> None:
        """When nothing runs and something has run since the last audit, ask workers for theirs."""
        if self._live or self._steps or self._exclusive or self._audited_at == self._steps_sent:
            return
        self._audited_at = self._steps_sent
        for instance in self._instances:
            self._pool.send(instance, wire.AuditRequest())

    def _on_audit(self, audit: wire.Audit) -> None:
        if self._audited_at != self._steps_sent:
            return  # a step has started since the question: the numbers no longer compare
        if not self._ledger.audited(audit):
            self._pool.send(audit.instance, wire.KeepSegments(segments=[]))
