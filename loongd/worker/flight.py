"""A step that has been started: over already, or still with the device.

Knows: how to ask and wait for it, and how drawn tokens are reported. Does not know: steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from loongd.model.sampler import Drawn
from loongd.wire import Extend, Sampled


class Flight(Protocol):
    """A started step."""

    def ready(self) -> bool:
        """Whether `wait` returns at once."""

    def wait(self) -> list[Sampled]:
        """What was drawn here. Raises RuntimeError for what failed on the device."""


class Landed:
    """A step that is over."""

    def __init__(self, sampled: list[Sampled]) -> None:
        self._sampled = sampled

    def ready(self) -> bool:
        return True

    def wait(self) -> list[Sampled]:
        return self._sampled


def report(extends: Sequence[Extend], drawn: Sequence[Drawn]) -> list[Sampled]:
    """The daemon's form of drawn tokens; requests for which none could be drawn are left out."""
    return [
        Sampled(
            request_id=extend.request_id,
            token=token,
            logprob=one.logprob,
            top_ids=array("i", [token for token, _ in one.top]).tobytes(),
            top_logprobs=array("f", [logprob for _, logprob in one.top]).tobytes(),
        )
        for extend, one in zip(extends, drawn, strict=True)
        if (token := one.token) is not None
    ]
