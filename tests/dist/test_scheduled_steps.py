"""What the scheduler plans, carried out by real runners in one process: steps queued ahead of the
tokens that they need, and chunks over a short prefix that another member holds."""

from __future__ import annotations

from array import array
from collections import deque
from pathlib import Path

import pytest
import torch
from cluster_kit import Cluster
from transformers import LlamaForCausalLM

from loongd.errors import PlanError
from loongd.sched.events import (
    Action,
    Arrived,
    Cancelled,
    Emit,
    Event,
    Fail,
    Finish,
    FreeSegments,
    InstanceJoined,
    Migrate,
    RunDecode,
    RunPrefill,
    StepDone,
)
from loongd.sched.policies import make_policy
from loongd.sched.policy import Decisions, Limits, Placed, Policy, StartPrefill, View
from loongd.sched.scheduler import Scheduler
from loongd.steps import LiveRequest, Plan, arrival, step_message
from loongd.submission import Submission, Timings, TokenStream
from loongd.wire import RunStep, Sampling
from loongd.worker.geometry import lay_out
from loongd.worker.layout import RowBytes

NUM_SLOTS = 40


class Rig:
    """A scheduler whose steps are run one after the other, each worker's messages in order."""

    def __init__(self, cluster: Cluster, policy: Policy, limits: Limits) -> None:
        self.cluster = cluster
        self.scheduler = Scheduler(policy, limits)
        self.live: dict[str, LiveRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.sent: deque[tuple[Plan, RunStep] | FreeSegments] = deque()
        slots = cluster.pools[0].total
        self.handle(*(InstanceJoined(0.0, i, slots) for i in range(len(cluster.pools))))

    def submit(self, *submissions: Submission) -> None:
        arrivals: list[Arrived] = []
        for submission in submissions:
            name = submission.request_id
            stream = TokenStream(name, Timings(0.0), lambda *_: None)
            self.live[name] = LiveRequest(submission, stream)
            self.answers[name] = []
            arrivals.append(arrival(submission, 0.0))
        self.handle(*arrivals)

    def handle(self, *events: Event) -> None:
        for action in self.scheduler.handle(*events):
            self._perform(action)
        self.scheduler.check()

    def _perform(self, action: Action) -> None:
        match action:
            case RunPrefill() | RunDecode() | Migrate():
                message = step_message(action.plan, 1, self.live)
                assert isinstance(message, RunStep)
                self.sent.append((action.plan, message))
            case Emit(name, token):
                self.live[name].generated.append(token)
                self.answers[name].append(token)
            case Finish(name, how) | Fail(name, how, _, _):
                del self.live[name]
                self.ended[name] = how
            case FreeSegments():
                self.sent.append(action)

    def run_one(self) -> None:
        """Run up to the end of the oldest step."""
        while isinstance(oldest := self.sent.popleft(), FreeSegments):
            self._free(oldest)
        plan, message = oldest
        results = self.cluster._all(list(message.members), message)
        tokens = tuple((one.request_id, one.token) for part in results for one in part)
        self.handle(StepDone(0.0, plan.step_id, 0.01, tokens))

    def run(self) -> None:
        """Run until all is done and freed; all pools are empty then."""
        while any(not isinstance(one, FreeSegments) for one in self.sent):
            self.run_one()
        while self.sent:
            freed = self.sent.popleft()
            assert isinstance(freed, FreeSegments)
            self._free(freed)
        self.cluster.check()

    def _free(self, freed: FreeSegments) -> None:
        for instance in freed.instances:
            self.cluster.runners[instance].free(list(freed.segments))


def _submission(name: str, prompt: list[int], max_tokens: int, **more: object) -> Submission:
    more = {"sampling": Sampling(), **more}
    return Submission(name, array("i", prompt), max_tokens=max_tokens, reserve_tokens=8, **more)


def _greedy(model_dir: Path, prompt: list[int], count: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("queue_ahead", [False, True])
def test_tokens_are_transformers_whether_steps_are_queued_ahead_or_not(
    queue_ahead: bool, llama_dir: Path
) -> None:
    """Three requests on three small instances, so with several holders and masters that change;
    one stops at a token, one must not stop there yet, one is cancelled."""
    prompts = [[i * 7 % 199 for i in range(n)] for n in (50, 9, 4)]
    expected = [_greedy(llama_dir, prompt, 20) for prompt in prompts]
    stop = expected[1][6]
    first = expected[1].index(stop)
    cluster = Cluster(llama_dir, 3, num_slots=NUM_SLOTS)
    limits = Limits(prefill_tokens_per_instance=20, queue_ahead=queue_ahead)
    rig = Rig(cluster, make_policy("fcfs"), limits)
    rig.submit(
        _submission("a", prompts[0], 20),
        _submission("b", prompts[1], 20, stop_token_ids=frozenset({stop})),
        _submission("c", prompts[2], 20),
    )
    while len(rig.answers["c"]) < 3:
        rig.run_one()
    rig.handle(Cancelled(0.0, "c", "client"))
    rig.run()
    assert rig.answers["a"] == expected[0]
    assert rig.answers["b"] == expected[1][: first + 1]
    assert rig.answers["c"] == expected[2][: len(rig.answers["c"])]
    assert rig.ended == {"a": "length", "b": "stop", "c": "cancelled"}
    assert (rig.scheduler.snapshot().totals.num_queued_ahead > 5) == queue_ahead


@pytest.mark.parametrize("min_tokens", [3, 4, 5, 6])
def test_stop_tokens_are_banned_for_as_long_when_steps_are_queued_ahead(
    min_tokens: int, llama_dir: Path
) -> None:
    """Every token is a stop token, so that all but two are banned until enough are drawn."""
    answers = []
    for queue_ahead in (False, True):
        cluster = Cluster(llama_dir, 1, num_slots=NUM_SLOTS)
        rig = Rig(cluster, make_policy("fcfs"), Limits(queue_ahead=queue_ahead))
        stops = frozenset(range(2, 199))
        rig.submit(_submission("a", [5, 6, 7], 20, stop_token_ids=stops, min_tokens=min_tokens))
        rig.run()
        answers.append(rig.answers["a"])
        assert set(rig.answers["a"][:min_tokens]) <= {0, 1}
    assert answers[0] == answers[1]


class TwoChunks:
    """Tokens 0 to 3 on instance 0 alone, then all others on both, kept by 1."""

    def decide(self, view: View) -> Decisions:
        waiting = list(view.waiting)
        between = [r for r in view.running.values() if r.between_chunks]
        if waiting:
            placed = Placed(waiting[0], ((0, 4),), 0)
            return Decisions(prefills=(StartPrefill((0,), (placed,), "first"),))
        if between:
            placed = Placed(between[0], ((1, between[0].left_tokens),), 1)
            return Decisions(prefills=(StartPrefill((0, 1), (placed,), "rest"),))
        return Decisions()


def test_a_chunk_over_a_short_prefix_held_elsewhere_passes_keys(llama_dir: Path) -> None:
    prompt = [i * 5 % 199 for i in range(40)]
    cluster = Cluster(llama_dir, 2, num_slots=NUM_SLOTS)
    rig = Rig(cluster, TwoChunks(), Limits())
    rig.submit(_submission("a", prompt, 1))
    rig.run_one()
    (sent,) = rig.sent
    assert isinstance(sent, tuple)
    _, message = sent
    assert (message.batch[0].holders, message.batch[0].holder_tokens) == ((0,), (4,))
    spec, pool = cluster.spec, cluster.pools[1]
    row_bytes = RowBytes.of(spec.num_heads, spec.num_kv_heads, spec.head_dim, 4)
    layout = lay_out(message, 1, pool, row_bytes=row_bytes, windowed=False)
    for segment, count in layout.grown:
        pool.truncate(segment, count)
    (only,) = layout.rounds
    assert [(member, count) for member, count, _ in only.keys_in] == [(0, 4)]
    assert not layout.queries_out
    rig.run()
    assert rig.answers["a"] == _greedy(llama_dir, prompt, 1)


def test_a_step_that_follows_another_than_the_last_is_refused(llama_dir: Path) -> None:
    cluster = Cluster(llama_dir, 1, num_slots=NUM_SLOTS)
    rig = Rig(cluster, make_policy("fcfs"), Limits(queue_ahead=True))
    rig.submit(_submission("a", [1, 2, 3], 9))
    rig.run_one()
    (_, first), (_, second) = rig.sent
    runner, pool = cluster.runners[0], cluster.pools[0]
    assert isinstance(second, RunStep)
    assert second.follows == first.step_id
    with pytest.raises(PlanError, match=f"follows step {first.step_id}"):
        runner.run(second)
    assert pool.num_used == 3
    runner.run(first)
    runner.run(second)
    assert pool.num_used == 5
