"""A bounded factor between predicted and observed times.

Knows: how one factor follows a stream of ratios without believing any single one of them.
Does not know: what is predicted.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 9
_NUM_IGNORED = 3
"""First observations after a start, which pay for warm-up and are never believed."""
_MAX_STEP = 1.25
"""Most that one observation can move the factor, up or down."""


class Correction:
    """Observed over predicted: the median of the last nine ratios, reached in bounded steps.

    A hiccup (four slow steps in nine or fewer) does not move the median beyond the other ratios;
    a lasting change is followed within some ten steps. The factor stays in 1 / `limit` to `limit`.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._num_seen = 0
        self.factor = 1.0

    def observe(self, predicted_s: float, elapsed_s: float) -> None:
        """Take one step's times; those without a sensible ratio are ignored."""
        self._num_seen += 1
        if self._num_seen <= _NUM_IGNORED or predicted_s <= 0 or elapsed_s <= 0:
            return
        self._ratios.append(elapsed_s / predicted_s)
        if len(self._ratios) < _WINDOW // 2:
            return
        wanted = min(max(median(self._ratios), 1 / self._limit), self._limit)
        self.factor = min(max(wanted, self.factor / _MAX_STEP), self.factor * _MAX_STEP)
