"""Workers that answer at once with the times of a formula of their own.

They keep account of slots as real ones do and refuse steps that contradict it.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from loongd.errors import RequestError
from loongd.exclusive import Exclusive
from loongd.pool import WorkerLost
from loongd.profiling import grid
from loongd.profiling.made import Subject
from loongd.profiling.profiler import Profiler
from loongd.sched.sib import ModelFacts, Sib, default_profile
from loongd.wire import (
    Audit,
    AuditRequest,
    Extend,
    FreeSegments,
    PaddedSizes,
    Ready,
    RunMigrate,
    RunStep,
    StepDone,
    StepFailed,
    ToWorker,
)

FACTS = ModelFacts(
    name="tiny",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=300,
)
SHORT = dataclasses.replace(grid.QUICK, max_batch=48, max_rounds=4, point_s=0.5, row_steps=3)
"""Small batches and few rounds: fakes take their time for every request of a step."""
POOL_TOKENS = 20_000
MAX_TOKENS = 8192


class FakeWorkers:
    """Lends itself; `slow` multiplies all times, `spoil` those of every seventh step."""

    def __init__(self, num_instances: int, *, slow: float = 1.0, spoil: float = 1.0) -> None:
        self.slow = slow
        self.spoil = spoil
        self.padded_sizes: dict[int, PaddedSizes] = {}
        self.slots: dict[int, Counter[int]] = {i: Counter() for i in range(num_instances)}
        self.num_steps = 0
        self.most_used = 0
        self.fail_step: int | None = None
        self.lose_at: int | None = None
        self.refuse: RequestError | None = None
        self._exclusive: Exclusive | None = None
        self._waiting: dict[int, set[int]] = {}

    @contextmanager
    def exclusive(self) -> Iterator[Exclusive]:
        if self.refuse is not None:
            raise self.refuse
        ready = [
            Ready(
                instance=i,
                pool_tokens=POOL_TOKENS,
                kv_bytes_per_token=1,
                weights_bytes=1,
                device_name="cpu",
                attention_backend="x",
                padded_sizes=self.padded_sizes,
            )
            for i in self.slots
        ]
        self._exclusive = Exclusive(self.send, ready, epoch=3)
        yield self._exclusive

    @property
    def num_used(self) -> int:
        return sum(sum(slots.values()) for slots in self.slots.values())

    def send(self, instance: int, message: ToWorker) -> None:
        assert self._exclusive is not None
        slots = self.slots[instance]
        match message:
            case FreeSegments():
                for segment in message.segments:
                    slots.pop(segment, None)
            case AuditRequest():
                used = sum(slots.values())
                self._exclusive.put(
                    Audit(
                        instance=instance,
                        total=POOL_TOKENS,
                        used=used,
                        free=POOL_TOKENS - used,
                        num_segments=len(slots),
                    )
                )
            case RunStep():
                self._step(instance, message)
            case RunMigrate():
                self._migrate(instance, message)
            case _:
                raise AssertionError(message)

    def _migrate(self, instance: int, message: RunMigrate) -> None:
        """3 ms and 2 us a token; twice as long from or to instance 3."""
        assert self._exclusive is not None
        assert message.epoch == 3
        assert instance in message.members
        for segment, tokens in message.moves:
            slots = self.slots[instance]
            slots[segment] += tokens if instance == message.target else -tokens
            assert slots[segment] >= 0
            assert sum(slots.values()) <= POOL_TOKENS
        moved = sum(tokens for _, tokens in message.moves)
        elapsed_s = (0.003 + 2e-6 * moved) * self.slow * (1 + (3 in message.members))
        self._exclusive.put(StepDone(instance, message.step_id, elapsed_s, []))

    def _step(self, instance: int, step: RunStep) -> None:
        assert self._exclusive is not None
        assert step.epoch == 3
        assert instance in step.members
        waiting = self._waiting.setdefault(step.step_id, set(step.members))
        for extend in step.batch:
            self._store(instance, step, extend)
        self.most_used = max(self.most_used, self.num_used)
        waiting.discard(instance)
        if waiting:
            return
        self.num_steps += 1
        elapsed_s = self.time_s(step) * self.slow
        if self.num_steps % 7 == 0:
            elapsed_s *= self.spoil
        for number, member in enumerate(step.members):
            if self.num_steps == self.fail_step:
                self._exclusive.put(StepFailed(member, step.step_id, "out of slots"))
            elif self.num_steps == self.lose_at:
                self._exclusive.put(WorkerLost(member, "killed by signal 9"))
            else:
                # The first member is the slowest: the step takes as long as it does.
                share = elapsed_s * (1.0 if number == 0 else 0.9)
                self._exclusive.put(StepDone(member, step.step_id, share, []))

    def _store(self, instance: int, step: RunStep, extend: Extend) -> None:
        new = 1 if step.follows else len(extend.tokens) // 4
        slots = self.slots[instance]
        assert extend.start + new <= MAX_TOKENS
        if extend.master is None:
            assert sum(count for _, count in extend.keep) == new
            kept = dict(extend.keep).get(instance, 0)
        else:
            assert extend.master in step.members
            kept = new if extend.master == instance else 0
        assert set(extend.holders) <= set(step.members)
        held = sum(slots[segment] for segment in extend.cached)
        assert (instance in extend.holders) == (held > 0)
        if extend.master is None and held:
            assert extend.holder_tokens[extend.holders.index(instance)] == held
        slots[extend.segment] += kept
        assert sum(slots.values()) <= POOL_TOKENS

    def time_s(self, step: RunStep) -> float:
        """1 ms + 0.1 ms a request; 20 us a token, 1 ns a square, shared by the group; decode:
        2 ms + 0.2 ms a request of the busiest master + 0.5 us a KV token of a member."""
        dop = len(step.members)
        lengths = lengths_of(step)
        if step.batch[0].master is None:
            new = sum(n for _, n in lengths)
            square = sum((c + n) ** 2 - c**2 for c, n in lengths)
            return 0.001 + 1e-4 * len(lengths) + (2e-5 * new + 1e-9 * square) / dop
        masters = Counter(extend.master for extend in step.batch)
        kv = sum(c + n for c, n in lengths)
        return 0.002 + 2e-4 * max(masters.values()) + 5e-7 * kv / dop


def lengths_of(step: RunStep) -> list[tuple[int, int]]:
    """(cached, new) tokens of the step's requests."""
    return [(e.start, 1 if step.follows else len(e.tokens) // 4) for e in step.batch]


def make_profiler(workers: FakeWorkers, device: str = "cpu x") -> tuple[Profiler, Sib]:
    sib = Sib(default_profile(FACTS, "cpu"))
    subject = Subject(
        facts=FACTS,
        device=device,
        dtype="float32",
        tp=1,
        max_tokens=MAX_TOKENS,
        attention="cpu-flash",
    )
    return Profiler(workers, sib, lambda: subject), sib
