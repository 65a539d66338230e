"""A cost model that can be computed by hand, and small traces."""

import random
from pathlib import Path

from loongd.sched.policy import Limits
from loongd.sched.scheduler import Scheduler
from loongd.sim.engine import Options, Simulation
from loongd.sim.systems import load_profile
from loongd.sim.trace import TracedRequest

PROFILES = Path(__file__).resolve().parents[2] / "etc" / "profiles"
A800 = load_profile("a800-llama2-7b-tp2", PROFILES)


class HandCosts:
    """Prefill: 1 s + 1 ms per new token / dop. Decode: 10 ms a request on the busiest master."""

    def prefill_s(self, dop, items):
        return 1.0 + 0.001 * sum(new for _, new in items) / dop

    def decode_s(self, *, dop, num_masters, batch, kv_tokens):
        assert 1 <= num_masters <= dop
        assert kv_tokens >= batch
        return 0.010 * -(-batch // num_masters)

    def decode_run_s(self, batch, kv_tokens, num_steps):
        lengths = (kv_tokens + batch * n for n in range(num_steps))
        return [self.decode_s(dop=1, num_masters=1, batch=batch, kv_tokens=n) for n in lengths]

    def migrate_s(self, tokens):
        return 0.1 + 1e-6 * tokens


def random_trace(seed, num_requests, *, longest=3000, rate_rps=2.0):
    """Poisson arrivals; a few long prompts among short ones."""
    draw = random.Random(seed)
    at_s = 0.0
    trace = []
    for _ in range(num_requests):
        at_s += draw.expovariate(rate_rps)
        top = longest if draw.random() < 0.1 else longest // 30
        trace.append(TracedRequest(at_s, draw.randint(1, top), draw.randint(1, 40)))
    return trace


def simulate(policy, trace, *, slots, costs=None, limits=None, **options):
    """A run with all invariants checked after each event."""
    options = Options(**{"max_tokens": 64, "reserve_tokens": 64, "check": True, **options})
    scheduler = Scheduler(policy, limits or Limits())
    return Simulation(scheduler, costs or HandCosts(), options).run(trace, slots)
