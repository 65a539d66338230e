"""Elastic instances and the steps they run.

Knows: which instances there are, how many slots each has, the step each takes part in, and whose
turn it is there. Does not know: who uses the slots (`sched.pool`).
"""

from __future__ import annotations

from dataclasses import dataclass

from loongd.sched.plan import DecodePlan, MigratePlan, PrefillPlan
from loongd.sched.request import Request


@dataclass(slots=True, eq=False)
class Step:
    """A step in flight; its members are busy until it ends.

    `follow` is the decode step that its members have been given beforehand and begin as soon as
    this one ends (`sched.ahead`); it is in flight only then. `num_before` counts the steps that
    this one followed without a decision of the policy in between.
    """

    plan: PrefillPlan | DecodePlan | MigratePlan
    requests: tuple[Request, ...]
    started_s: float
    follow: Step | None = None
    num_before: int = 0

    @property
    def step_id(self) -> int:
        return self.plan.step_id

    @property
    def members(self) -> tuple[int, ...]:
        return self.plan.members

    @property
    def is_prefill(self) -> bool:
        return isinstance(self.plan, PrefillPlan)

    @property
    def is_migration(self) -> bool:
        return isinstance(self.plan, MigratePlan)

    @property
    def is_decode(self) -> bool:
        return isinstance(self.plan, DecodePlan)


@dataclass(slots=True, eq=False)
class InstanceView:
    """One instance. A lost one stays known (`alive` false), for it is expected back.

    `owes_decode` is set when it starts a prefill and cleared when requests whose KV it holds
    start a decode step: until then they have the turn, and no other prefill starts there.
    `decode_debt_s` is what decode steps have not had yet of their share of the time that prefills
    took there;
    `chunk_turn` is set while the last prefill there was not a chunk of a longer one.
    """

    instance: int
    slots: int
    alive: bool = True
    step: Step | None = None
    owes_decode: bool = False
    decode_debt_s: float = 0.0
    chunk_turn: bool = False

    @property
    def idle(self) -> bool:
        return self.alive and self.step is None
