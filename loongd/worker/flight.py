"""A step that has been started: over already, or still with the device.

Knows: how to ask and wait for it, and how drawn tokens are reported. Does not know: steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

import torch

from loongd.model.sampler import Drawn, Mark
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


class Draws(Protocol):
    """Tokens that are being drawn."""

    def ready(self) -> bool:
        """Whether `finish` returns at once."""

    def finish(self) -> list[Drawn]:
        """Wait for the device. Raises RuntimeError for what failed there."""


class Undrawn:
    """Work on the device that draws nothing."""

    def __init__(self, device: torch.device) -> None:
        """Over when everything that the device has been given is done."""
        self._done = Mark(on_gpu=device.type == "cuda")

    def ready(self) -> bool:
        return self._done.is_reached()

    def finish(self) -> list[Drawn]:
        self._done.wait()
        return []


class Airborne:
    """A step that the device works on, and the requests that it draws for, in order."""

    def __init__(self, draws: Draws, extends: Sequence[Extend]) -> None:
        self._draws = draws
        self._extends = extends

    def ready(self) -> bool:
        return self._draws.ready()

    def wait(self) -> list[Sampled]:
        return report(self._extends, self._draws.finish())


class Best(Protocol):
    """Tokens that the device works out, with nothing to tell of them but what they are."""

    def ready(self) -> bool:
        """Whether `finish` returns at once."""

    def finish(self) -> list[int]:
        """Wait for the device; negative for none. Raises RuntimeError for what failed there."""


class Coming:
    """A step that the device works on, and the requests whose tokens it will give, in order."""

    def __init__(self, best: Best, requests: Sequence[str]) -> None:
        self._best = best
        self._requests = requests

    def ready(self) -> bool:
        return self._best.ready()

    def wait(self) -> list[Sampled]:
        tokens = self._best.finish()
        return [
            Sampled(request_id, token)
            for request_id, token in zip(self._requests, tokens, strict=True)
            if token >= 0
        ]


def report(extends: Sequence[Extend], drawn: Sequence[Drawn]) -> list[Sampled]:
    """The daemon's form of drawn tokens; requests for which none could be drawn are left out."""
    return [
        Sampled(
            request_id=extend.request_id,
            token=token,
            logprob=one.logprob,
            top_ids=array("i", [token for token, _ in one.top]).tobytes() if one.top else b"",
            top_logprobs=array("f", [value for _, value in one.top]).tobytes() if one.top else b"",
        )
        for extend, one in zip(extends, drawn, strict=True)
        if (token := one.token) is not None
    ]
