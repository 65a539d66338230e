"""Which workers have fallen silent, or hang in a step.

Knows: when each worker last gave a sign of life, whether it has work, and when it last moved on.
Does not know: the clock (callers pass `now`), processes, sockets.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_MAX_OWN_PAUSE_S = 3.0
"""A longer pause between two looks is our own (a suspended machine, a busy loop): it says nothing
about the workers."""


@dataclass(slots=True)
class _Watched:
    heard_s: float
    moved_s: float
    layers: int = 0
    num_steps: int = 0


class Vigil:
    """Watches workers by name. One that has been given up is not watched any more."""

    def __init__(self, *, silence_s: float, stall_s: float) -> None:
        """Args: seconds without a beat, and seconds in a step without finishing a layer, after
        which a worker is given up."""
        self._silence_s = silence_s
        self._stall_s = stall_s
        self._watched: dict[bytes, _Watched] = {}
        self._looked_s: float | None = None

    def begin(self, name: bytes, now: float) -> None:
        """Watch a worker from now on."""
        self._watched[name] = _Watched(now, now)

    def beat(self, name: bytes, layers: int, now: float) -> None:
        """A sign of life; `layers` counts the layers that the worker has finished so far."""
        watched = self._watched.get(name)
        if watched is None:
            return
        watched.heard_s = now
        if layers != watched.layers:
            watched.layers, watched.moved_s = layers, now

    def given_step(self, name: bytes, now: float) -> None:
        """The worker has been sent a step."""
        watched = self._watched.get(name)
        if watched is not None:
            if watched.num_steps == 0:
                watched.moved_s = now
            watched.num_steps += 1

    def step_over(self, name: bytes, now: float) -> None:
        """The worker has reported a step."""
        watched = self._watched.get(name)
        if watched is not None:
            watched.num_steps = max(0, watched.num_steps - 1)
            watched.heard_s = watched.moved_s = now

    def overdue(self, now: float) -> list[tuple[bytes, str]]:
        """(name, why) of workers to give up; they are forgotten here."""
        last, self._looked_s = self._looked_s, now
        pause_s = 0.0 if last is None else now - last
        if pause_s > _MAX_OWN_PAUSE_S:
            for watched in self._watched.values():
                watched.heard_s += pause_s
                watched.moved_s += pause_s
        found = []
        for name, watched in self._watched.items():
            if now - watched.heard_s > self._silence_s:
                found.append((name, f"gave no sign of life for {now - watched.heard_s:.0f} s"))
            elif watched.num_steps and now - watched.moved_s > self._stall_s:
                found.append((name, f"hung in a step for {now - watched.moved_s:.0f} s"))
        for name, _ in found:
            del self._watched[name]
        return found

    def clear(self) -> None:
        """Watch nobody."""
        self._watched.clear()
        self._looked_s = None


class RestartLimit:
    """Counts restarts in a sliding window, so that a crash loop ends."""

    def __init__(self, *, most: int, window_s: float) -> None:
        self.window_s = window_s
        self._most = most
        self._times_s: deque[float] = deque()

    def exceeded(self, now: float) -> bool:
        """Note one more restart; whether there have now been too many within the window."""
        self._times_s.append(now)
        while self._times_s[0] < now - self.window_s:
            self._times_s.popleft()
        return len(self._times_s) > self._most
