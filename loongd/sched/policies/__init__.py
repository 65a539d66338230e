"""Scheduling policies by name, as the `policy` option has them."""

from __future__ import annotations

from loongd.sched.policies.fcfs import FirstComeFirstServed
from loongd.sched.policy import Policy


def make_policy(name: str) -> Policy:
    """The policy called `name`. Raises ValueError naming the known ones."""
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case _:
            raise ValueError(f"policy {name!r} is unknown; known: fcfs")
