"""A typed picture of the scheduler for a status page; values only, safe to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loongd.sched.instance import Step
from loongd.sched.plan import DecodePlan, MigratePlan, PrefillPlan
from loongd.sched.queued import first_wait
from loongd.sched.state import State
from loongd.sched.story import Wait


@dataclass(frozen=True, slots=True)
class InstanceStatus:
    """`reserved` slots are free ones that running requests count on; `doing` is idle, prefill,
    decode, migrate or lost."""

    instance: int
    alive: bool
    doing: str
    step_id: int | None
    total: int
    used: int
    free: int
    reserved: int


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """A step in flight and the instances that run it; `kind` is prefill, decode or migrate, or
    paused for a chunk between two parts. `layers` says which of a chunk in parts run, or how many
    are done."""

    step_id: int
    kind: str
    members: tuple[int, ...]
    masters: tuple[int, ...]
    num_requests: int
    num_tokens: int
    started_s: float
    layers: str = ""

    @property
    def dop(self) -> int:
        return len(self.members)


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """Slots of all alive instances; `free + used == total`, `reserved` are part of the free."""

    total: int
    used: int
    free: int
    reserved: int


@dataclass(frozen=True, slots=True)
class TotalsStatus:
    """Counts since the start; `num_finished` by finish reason, `num_failed` by error code."""

    num_arrived: int
    num_finished: Mapping[str, int]
    num_failed: Mapping[str, int]
    num_prefill_steps: int
    num_decode_steps: int
    num_prefill_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_lost: int
    num_scale_downs: int
    num_scale_ups: int
    num_migrations: int = 0
    num_migrated_tokens: int = 0
    num_queued_ahead: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment; `held` are instances kept for the head of the queue, and
    `first_wait` is why it waits."""

    instances: tuple[InstanceStatus, ...]
    groups: tuple[GroupStatus, ...]
    pool: PoolStatus
    num_waiting: int
    num_waiting_tokens: int
    num_running: int
    num_ending: int
    held: tuple[int, ...]
    draining: bool
    totals: TotalsStatus
    first_wait: Wait | None = None


def take_snapshot(state: State) -> Snapshot:
    """A picture of `state`, instances and groups in ascending order."""
    pool = state.pool
    reserved = _reserved(state)
    total, used, free = pool.total, pool.used, pool.total - pool.used
    return Snapshot(
        instances=_instances(state, reserved),
        groups=_groups(state),
        pool=PoolStatus(total, used, free, min(free, sum(reserved.values()))),
        num_waiting=len(state.waiting),
        num_waiting_tokens=sum(request.num_tokens for request in state.waiting),
        num_running=len(state.running),
        num_ending=len(state.ending),
        held=state.hold.instances if state.hold else (),
        draining=state.draining,
        totals=_totals(state),
        first_wait=first_wait(state),
    )


def _reserved(state: State) -> dict[int, int]:
    reserved = dict.fromkeys(state.instances, 0)
    for request in state.running.values():
        if request.master is not None:
            reserved[request.master] += request.growth_tokens + request.left_tokens
    return reserved


def _instances(state: State, reserved: Mapping[int, int]) -> tuple[InstanceStatus, ...]:
    statuses: list[InstanceStatus] = []
    paused = {i for part in _paused(state) for i in part.members}
    for instance in sorted(state.instances):
        view = state.instances[instance]
        if not view.alive:
            statuses.append(InstanceStatus(instance, False, "lost", None, 0, 0, 0, 0))
            continue
        step = view.step
        doing = ("paused" if instance in paused else "idle") if step is None else _kind(step)
        used = state.pool.used_slots(instance)
        free = view.slots - used
        statuses.append(
            InstanceStatus(
                instance=instance,
                alive=True,
                doing=doing,
                step_id=step.step_id if step else None,
                total=view.slots,
                used=used,
                free=free,
                reserved=min(free, reserved[instance]),
            )
        )
    return tuple(statuses)


def _groups(state: State) -> tuple[GroupStatus, ...]:
    groups: list[GroupStatus] = []
    for step_id, step in sorted(state.steps.items()):
        plan = step.plan
        masters: tuple[int, ...] = ()
        layers = ""
        if isinstance(plan, DecodePlan):
            masters, num_tokens = plan.masters, len(plan.items)
        elif isinstance(plan, MigratePlan):
            num_tokens = plan.num_tokens
        else:
            num_tokens = sum(item.num_tokens for item in plan.items)
            if plan.layers is not None:
                layers = f"{plan.layers.first} to {plan.layers.end} of {plan.layers.total}"
        groups.append(
            GroupStatus(
                step_id=step_id,
                kind=_kind(step),
                members=plan.members,
                masters=masters,
                num_requests=len(step.requests),
                num_tokens=num_tokens,
                started_s=step.started_s,
                layers=layers,
            )
        )
    for part in _paused(state):
        (item,), done = part.items, part.layers
        assert done is not None
        groups.append(
            GroupStatus(
                step_id=part.step_id,
                kind="paused",
                members=part.members,
                masters=(),
                num_requests=1,
                num_tokens=item.num_tokens,
                started_s=state.running[item.request_id].chunk_began_s,
                layers=f"{done.end} of {done.total}",
            )
        )
    return tuple(groups)


def _paused(state: State) -> list[PrefillPlan]:
    """The last parts of chunks that are between two of them."""
    found = [r.part for r in state.running.values() if r.step_id is None and r.part is not None]
    return sorted(found, key=lambda part: part.step_id)


def _kind(step: Step) -> str:
    return "prefill" if step.is_prefill else "decode" if step.is_decode else "migrate"


def _totals(state: State) -> TotalsStatus:
    totals = state.totals
    return TotalsStatus(
        num_arrived=totals.num_arrived,
        num_finished=dict(totals.num_finished),
        num_failed=dict(totals.num_failed),
        num_prefill_steps=totals.num_prefill_steps,
        num_decode_steps=totals.num_decode_steps,
        num_prefill_tokens=totals.num_prefill_tokens,
        num_generated_tokens=totals.num_generated_tokens,
        num_preemptions=totals.num_preemptions,
        num_lost=totals.num_lost,
        num_scale_downs=totals.num_scale_downs,
        num_scale_ups=totals.num_scale_ups,
        num_migrations=totals.num_migrations,
        num_migrated_tokens=totals.num_migrated_tokens,
        num_queued_ahead=totals.num_queued_ahead,
    )
