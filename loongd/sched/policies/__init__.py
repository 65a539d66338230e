"""Scheduling policies by name, as the `policy` option has them."""

from __future__ import annotations

from loongd.sched.policies.fcfs import FirstComeFirstServed
from loongd.sched.policies.loongserve import LoongServe
from loongd.sched.policy import Policy
from loongd.sched.sib import Sib


def make_policy(name: str, sib: Sib | None = None) -> Policy:
    """The policy called `name`; `fcfs` has a SIB for its reasons only.

    Raises ValueError naming the known ones.
    """
    match name:
        case "fcfs":
            return FirstComeFirstServed(sib)
        case "loongserve":
            if sib is None:
                raise ValueError("policy 'loongserve' needs a SIB")
            return LoongServe(sib)
        case _:
            raise ValueError(f"policy {name!r} is unknown; known: loongserve, fcfs")
