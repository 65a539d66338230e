"""A world of random events around a scheduler, with an independent model of the workers."""

import random
from collections import Counter, defaultdict
from zlib import crc32

from sched_kit import make_sib

from loongd.sched.events import (
    Arrived,
    Cancelled,
    Drain,
    Emit,
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
    Tick,
)
from loongd.sched.plan import MigratePlan, PrefillPlan
from loongd.sched.policies import make_policy
from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler

STOP = 7


def follows(plan):
    """The step that a plan is queued behind; 0 for none."""
    return getattr(plan, "follows", 0)


def is_part(plan):
    """A part of a chunk."""
    return getattr(plan, "layers", None) is not None


def token_of(request_id, n):
    """The n-th token of a request's answer, whatever step draws it."""
    return crc32(f"{request_id}/{n}".encode()) % 41


class FakeWorkers:
    """What workers and clients would see; built from actions alone, asserts that they fit."""

    def __init__(self):
        self.slots = {}
        self.kv = defaultdict(Counter)  # instance -> segment -> slots
        self.steps = {}  # step_id -> plan
        self.segments = {}  # request_id -> segments that exist, in order
        self.length = {}  # request_id -> prompt + emitted
        self.max_tokens = {}
        self.needs_history = {}
        self.stops = {}  # request_id -> ids that end it
        self.emitted = defaultdict(list)
        self.ended = {}
        self.used_segments = set()
        self.last_step = 0
        self.num_chunks = 0
        self.num_queued = 0
        self.num_moves = 0
        self.num_parts = 0
        self.paused = {}  # step_id -> plan of a part of a chunk that has more
        self.failed_parts = []

    def can_end(self):
        """Ids of the steps that run; the others are queued behind one of these."""
        return sorted(k for k, p in self.steps.items() if follows(p) not in self.steps)

    def busy(self):
        return {i for plan in self.steps.values() for i in plan.members}

    def lose(self, instance):
        del self.slots[instance]
        self.kv.pop(instance, None)
        lost = [p for p in self.steps.values() if instance in p.members]
        self.failed_parts += filter(is_part, lost)
        self.steps = {k: p for k, p in self.steps.items() if instance not in p.members}
        alive = self.slots.keys()
        self.paused = {k: p for k, p in self.paused.items() if not alive.isdisjoint(p.members)}

    def apply(self, actions):
        for action in actions:
            match action:
                case RunPrefill(plan, reason) | RunDecode(plan, reason) | Migrate(plan, reason):
                    assert reason
                    self.start(plan)
                case Emit(request_id, token):
                    assert request_id not in self.ended
                    self.emitted[request_id].append(token)
                    self.length[request_id] += 1
                case Finish(request_id, how):
                    self.end(request_id, how)
                case Fail(request_id, message, code, status):
                    assert message
                    assert 400 <= status < 600
                    self.end(request_id, code)
                case FreeSegments(segments, instances, reason):
                    assert reason
                    self.free(segments, instances)

    def end(self, request_id, how):
        assert request_id not in self.ended
        self.ended[request_id] = how
        whole = self.answer(request_id)
        if how in ("length", "stop"):
            assert self.emitted[request_id] == whole
            assert how == ("stop" if whole[-1] in self.stops[request_id] else "length")
        else:
            assert self.emitted[request_id] == whole[: len(self.emitted[request_id])]

    def answer(self, request_id):
        """All tokens of a request that nothing befalls."""
        drawn = [token_of(request_id, n) for n in range(self.max_tokens[request_id])]
        stops = [n for n, token in enumerate(drawn) if token in self.stops[request_id]]
        return drawn[: stops[0] + 1] if stops else drawn

    def free(self, segments, instances):
        assert set(instances) <= self.slots.keys()
        writing = set()
        for plan in self.steps.values():
            if isinstance(plan, MigratePlan):
                writing.update(segment for segment, _ in plan.moves)
            else:
                writing.update(item.segment for item in plan.items)
        assert not writing & set(segments), "freed under a running step"
        held = {i for i in self.slots if any(self.kv[i][s] for s in segments)}
        held |= self.give_up(segments, instances)
        assert held == set(instances), "freed where it is not, or left behind"
        for instance in instances:
            for segment in segments:
                del self.kv[instance][segment]
        for request_id, owned in self.segments.items():
            if set(owned) & set(segments):
                self.segments[request_id] = []

    def give_up(self, segments, instances):
        """Drop paused chunks that write these segments; where they were."""
        found = set()
        for step_id, plan in list(self.paused.items()):
            if plan.items[0].segment in segments:
                found |= set(plan.members) & self.slots.keys()
                del self.paused[step_id]
        for plan in self.failed_parts:  # nothing is left there, but to be told does no harm
            if plan.items[0].segment in segments:
                found |= set(plan.members) & set(instances)
        return found

    def start(self, plan):
        assert plan.step_id > self.last_step
        self.last_step = plan.step_id
        assert set(plan.members) <= self.slots.keys()
        if follows(plan):
            self.check_queued(plan)
        else:
            assert not set(plan.members) & self.busy()
        if isinstance(plan, MigratePlan):
            self.begin_move(plan)
        else:
            self.begin_items(plan)
        for instance in plan.members:
            assert self.kv[instance].total() <= self.slots[instance], "more than there are slots"
        self.steps[plan.step_id] = plan

    def check_queued(self, plan):
        """The plan goes on from a decode step that runs and has nothing behind it yet."""
        self.num_queued += 1
        before = self.steps[plan.follows]
        assert plan.follows in self.can_end()
        assert sum(follows(other) == plan.follows for other in self.steps.values()) == 0
        assert plan.members == before.members
        assert [(i.request_id, i.master, i.segment) for i in plan.items] == [
            (i.request_id, i.master, i.segment) for i in before.items
        ]
        assert not any(self.needs_history[item.request_id] for item in plan.items)

    def begin_move(self, plan):
        """Both ends hold the KV until the move is done."""
        assert plan.source != plan.target
        assert plan.moves
        running = {i.request_id for p in self.steps.values() for i in getattr(p, "items", ())}
        for segment, count in plan.moves:
            assert self.kv[plan.source][segment] == count, "all that the source has moves"
            self.kv[plan.target][segment] += count
            (owner,) = [r for r, owned in self.segments.items() if segment in owned]
            assert owner not in running, "KV moves under a running step"
        assert len({segment for segment, _ in plan.moves}) == len(plan.moves)

    def finish(self, plan):
        """A step is done."""
        if getattr(plan, "pauses", False):
            self.num_parts += 1
            self.paused[plan.step_id] = plan
        self.num_moves += isinstance(plan, MigratePlan)
        if isinstance(plan, MigratePlan):
            for segment, count in plan.moves:
                self.kv[plan.source][segment] -= count

    def moving(self):
        return {s for p in self.steps.values() if isinstance(p, MigratePlan) for s, _ in p.moves}

    def resume(self, plan):
        """The rest of a chunk, on the very instances on which it is paused."""
        before = self.paused.pop(plan.resumes)
        assert (plan.members, plan.items) == (before.members, before.items)
        assert plan.layers.first == before.layers.end < plan.layers.end <= plan.layers.total
        assert plan.layers.total == before.layers.total
        assert plan.items[0].request_id not in self.ended

    def rows_of_parts(self, instance):
        """New tokens of each chunk that is paused or runs in parts there."""
        parts = [*self.paused.values(), *(p for p in self.steps.values() if is_part(p))]
        return [
            -(-plan.items[0].num_tokens // plan.dop) for plan in parts if instance in plan.members
        ]

    def begin_items(self, plan):
        if getattr(plan, "resumes", 0):
            self.resume(plan)
            return
        assert plan.items
        if is_part(plan):
            assert len(plan.items) == 1
            assert plan.layers.first == 0
        assert list(plan.members) == sorted(set(plan.members))
        ids = [item.request_id for item in plan.items]
        assert len(ids) == len(set(ids))
        assert not set(ids) & self.ended.keys()
        for item in plan.items:
            if hasattr(item, "master"):
                self.extend(plan, item)
            else:
                self.prefill(plan, item)

    def prefill(self, plan, item):
        owned = self.segments.setdefault(item.request_id, [])
        if item.start == 0:
            assert not any(self.kv[i][s] for i in self.slots for s in owned), "KV was not freed"
            owned.clear()
        self.check_cached(plan, item, item.start)
        held = (sum(self.kv[i][s] for s in item.cached) for i in item.holders)
        assert item.holder_tokens == tuple(held)
        assert 0 < item.num_tokens <= self.length[item.request_id] - item.start
        assert item.samples == (item.start + item.num_tokens == self.length[item.request_id])
        assert sum(n for _, n in item.keep) == item.num_tokens
        assert all(n > 0 for _, n in item.keep)
        assert {i for i, _ in item.keep} <= set(plan.members)
        assert item.segment not in self.used_segments
        self.used_segments.add(item.segment)
        owned.append(item.segment)
        self.num_chunks += not item.samples
        for instance, count in item.keep:
            self.kv[instance][item.segment] += count

    def extend(self, plan, item):
        owned = self.segments[item.request_id]
        assert item.position == self.length[item.request_id] - (0 if plan.follows else 1)
        self.check_cached(plan, item, item.position)
        assert item.master in plan.members
        if item.segment not in owned:
            assert item.segment not in self.used_segments
            self.used_segments.add(item.segment)
            owned.append(item.segment)
        assert owned[-1] == item.segment
        self.kv[item.master][item.segment] += 1

    def check_cached(self, plan, item, num_tokens):
        """All older tokens are in the group, on the holders that the plan names."""
        owned = self.segments[item.request_id]
        assert list(item.cached) == owned
        assert not set(owned) & self.moving()
        covered = sum(self.kv[i][s] for i in self.slots for s in owned)
        assert covered == num_tokens, "older tokens are not all there"
        holders = [i for i in sorted(self.slots) if any(self.kv[i][s] for s in owned)]
        assert list(item.holders) == holders
        assert set(holders) <= set(plan.members)


class World:
    """Drives a scheduler with random events; the same seed gives the same run."""

    def __init__(self, seed, *, num_instances, tiny, policy, queue_ahead=False):
        self.random = random.Random(seed)
        self.tiny = tiny
        most_batched = self.random.choice([16, 600, 8192])
        limits = Limits(
            max_num_seqs=self.random.choice([2, 8, 256]),
            max_num_batched_tokens=most_batched,
            max_step_tokens=most_batched * self.random.choice([1, 2, 4, 4, 5, 16]) + 3,
            prefill_tokens_per_instance=self.random.choice([4, 64, 512]),
            max_num_queued_reqs=self.random.choice([3, 1000]),
            max_passes=self.random.choice([1, 1000]),
            queue_ahead=queue_ahead,
            num_layers=self.random.choice([1, 3, 32]),
        )
        self.policy, self.limits = policy, limits
        self.scheduler = new_scheduler(policy, limits, tiny=tiny)
        self.workers = FakeWorkers()
        self.now = 0.0
        self.num_requests = 0
        self.prompts = {}
        self.log = []
        self.lost = []
        self.last_slots = {}
        for instance in range(num_instances):
            if self.random.random() < 0.9:
                self.join(instance)
            else:
                self.lost.append(instance)

    def handle(self, event):
        actions = self.scheduler.handle(event)
        self.log.append((event, tuple(actions)))
        self.workers.apply(actions)
        self.scheduler.check()
        started = [a.plan for a in actions if isinstance(a, RunPrefill | RunDecode | Migrate)]
        self.check_cap(started)
        running = [i for plan in started if not follows(plan) for i in plan.members]
        assert len(running) == len(set(running))

    def check_cap(self, plans):
        """No instance computes more new tokens in a step than its memory was made for."""
        for plan in plans:
            if isinstance(plan, PrefillPlan):
                for index, instance in enumerate(plan.members):
                    stripes = (range(index, i.num_tokens, plan.dop) for i in plan.items)
                    parts = self.workers.rows_of_parts(instance)
                    assert len(parts) <= 1, "two chunks hold memory"
                    num_tokens = 0 if is_part(plan) else sum(map(len, stripes))
                    assert num_tokens + sum(parts) <= self.limits.max_step_tokens

    def tick(self):
        self.now += self.random.random() * self.random.choice([0.01, 1.0])
        return self.now

    def join(self, instance):
        low, high = (3, 30) if self.tiny else (50, 8000)
        slots = self.random.randint(low, high)
        if self.random.random() < 0.7:
            slots = self.last_slots.get(instance, slots)
        self.last_slots[instance] = slots
        self.workers.slots[instance] = slots
        self.handle(InstanceJoined(self.tick(), instance, slots))

    def arrive(self):
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        longest = self.random.choice([5, 40] if self.tiny else [20, 700, 5000])
        prompt = self.random.randint(1, longest)
        max_tokens = self.random.randint(1, 25)
        self.workers.length[request_id] = prompt
        self.workers.max_tokens[request_id] = max_tokens
        reserve = self.random.randint(1, self.random.choice([1, max_tokens]))
        stop = frozenset({STOP}) if self.random.random() < 0.5 else frozenset()
        history = self.random.random() < 0.05
        self.workers.stops[request_id] = stop
        self.workers.needs_history[request_id] = history
        self.prompts[request_id] = prompt
        now = self.tick()
        self.handle(Arrived(now, request_id, prompt, max_tokens, reserve, stop, 0, history))

    def finish_step(self, *, fail=False):
        if not self.workers.steps:
            return
        step_id = self.random.choice(self.workers.can_end())
        plan = self.workers.steps.pop(step_id)
        if fail:
            self.workers.failed_parts += [plan] * is_part(plan)
            self.handle(StepFailed(self.tick(), step_id, "out of memory"))
            return
        self.workers.finish(plan)
        drawing = [i for i in getattr(plan, "items", ()) if getattr(i, "samples", True)]
        drawing = [] if getattr(plan, "pauses", False) else drawing
        if self.random.random() < 0.002:
            drawing = drawing[1:]
        tokens = tuple((item.request_id, self.draw(item)) for item in drawing)
        elapsed_s = self.random.choice([0.01, 0.5])
        self.handle(StepDone(self.tick(), step_id, elapsed_s, tokens))

    def draw(self, item):
        """The token after the item's last one."""
        end = item.position + 1 if hasattr(item, "master") else item.start + item.num_tokens
        return token_of(item.request_id, end - self.prompts[item.request_id])

    def lose(self):
        if self.workers.slots:
            instance = self.random.choice(sorted(self.workers.slots))
            self.lost.append(instance)
            self.workers.lose(instance)
            self.handle(InstanceLost(self.tick(), instance, "killed"))

    def rejoin(self):
        if self.lost:
            self.join(self.lost.pop(self.random.randrange(len(self.lost))))

    def cancel(self):
        if self.num_requests:
            request_id = f"r{self.random.randint(1, self.num_requests)}"
            self.handle(Cancelled(self.tick(), request_id, "client"))

    def any_event(self):
        draw = self.random.random()
        for limit, act in (
            (0.25, self.arrive),
            (0.85, self.finish_step),
            (0.90, self.cancel),
            (0.92, self.lose),
            (0.96, self.rejoin),
            (0.97, lambda: self.finish_step(fail=True)),
            (0.98, lambda: self.handle(Drain(self.tick(), self.random.random() < 0.3))),
            (0.99, lambda: self.handle(Tick(self.tick()))),
            (1.01, lambda: self.handle(StepDone(self.tick(), 10**9, 0.1, (("nobody", 1),)))),
        ):
            if draw < limit:
                act()
                return

    def run(self, num_events):
        for _ in range(num_events):
            self.any_event()
        while self.lost:
            self.rejoin()
        most = 30 * sum(self.workers.max_tokens.values()) + 1000
        while self.workers.steps and most:
            most -= 1
            self.finish_step()
        return self

    def check_end(self):
        assert not self.workers.steps
        assert not self.workers.paused
        unfinished = self.workers.length.keys() - self.workers.ended.keys()
        assert not unfinished, "requests that never end"
        assert self.scheduler.snapshot().pool.used == 0
        assert sum(kv.total() for kv in self.workers.kv.values()) == 0
        emitted = sum(map(len, self.workers.emitted.values()))
        assert self.scheduler.snapshot().totals.num_generated_tokens == emitted


def new_scheduler(policy, limits, *, tiny):
    sib = make_sib(token_s=0.05 if tiny else 0.001)
    return Scheduler(make_policy(policy, sib), limits, sib)
