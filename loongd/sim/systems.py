"""Simulated systems: a policy, a profile, and so many instances of so many KV slots.

Knows: names of policies (those of the daemon and the static ones beside them) and profile files.
Does not know: traces, metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from loongd.errors import ConfigError
from loongd.sched.policies import make_policy
from loongd.sched.policies.static import FixedGroups
from loongd.sched.policy import Limits, Policy
from loongd.sched.scheduler import Scheduler
from loongd.sched.sib import Profile, Sib, parse_profile
from loongd.sched.sib_default import layers_of
from loongd.sim.engine import Options, Simulation
from loongd.sim.outcome import Run
from loongd.sim.trace import TracedRequest

# Nothing is refused for a full queue: every system must serve every request.
LIMITS = Limits(max_num_seqs=1024, max_num_batched_tokens=16384, max_num_queued_reqs=10**9)


@dataclass(frozen=True, slots=True)
class System:
    """What serves a trace.

    Args:
        slots: KV slots of each instance.
    """

    policy: str
    profile: Profile
    num_instances: int
    slots: int
    limits: Limits = field(default=LIMITS)

    def run(self, trace: Sequence[TracedRequest], options: Options) -> Run:
        """Run a trace on a fresh scheduler; executor and policy each have a SIB of their own."""
        limits = replace(self.limits, num_layers=layers_of(self.profile.shape))
        scheduler = Scheduler(choose_policy(self.policy, Sib(self.profile)), limits)
        simulation = Simulation(scheduler, Sib(self.profile), options)
        return simulation.run(trace, [self.slots] * self.num_instances)

    def predict_alone_s(self, num_tokens: int) -> float:
        """Seconds to prefill one prompt on all instances together, undisturbed."""
        return Sib(self.profile).prefill_s(self.num_instances, [(0, num_tokens)])

    def limited(
        self, *, max_num_batched_tokens: int | None = None, max_prefill_wait_s: float | None = None
    ) -> System:
        """The same system with other scheduler options."""
        limits = self.limits
        if max_num_batched_tokens is not None:
            limits = replace(limits, max_num_batched_tokens=max_num_batched_tokens)
        if max_prefill_wait_s is not None:
            limits = replace(limits, max_prefill_wait_s=max_prefill_wait_s)
        return replace(self, limits=limits)


def choose_policy(name: str, sib: Sib) -> Policy:
    """A policy by name. Raises ConfigError naming the known ones."""
    match name:
        case "static_tp" | "replicas":
            return FixedGroups(together=False, sib=sib)
        case "static_sp":
            return FixedGroups(together=True, sib=sib)
        case "chunked":
            return FixedGroups(together=True, chunked=True, sib=sib)
    try:
        return make_policy(name, sib)
    except ValueError as error:
        raise ConfigError(f"{error}, static_tp, static_sp, replicas, chunked") from error


def load_profile(name: str, directory: Path) -> Profile:
    """A profile by its name in `directory`, or by its path. Raises ConfigError."""
    path = Path(name) if name.endswith(".json") else directory / f"{name}.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        known = ", ".join(sorted(p.stem for p in directory.glob("*.json"))) or "none"
        raise ConfigError(f"profile {path}: {error.strerror}; known: {known}") from error
    return parse_profile(data, where=str(path))
