"""Bounded factors between predicted and observed times, one for each degree of parallelism.

Knows: how a factor follows a stream of ratios without believing any single one of them, and how a
belief fades that nothing has confirmed for long. Does not know: what is predicted.

A degree that is believed to be slow is not chosen, so nothing would ever correct the belief. So
each observation of another degree moves it a little towards the `shared` factor, which follows all
degrees, and ages what it rests on; a degree that was never observed has the shared factor.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_WINDOW = 9
_NUM_IGNORED = 3
"""First observations after a start, which pay for warm-up and are never believed."""
_MAX_STEP = 1.25
"""Most that one observation can move the factor, up or down."""
_SHARED_SHARE = 1 / 16
"""How much of the way the shared factor goes towards the one just observed."""
_FADE_SHARE = 1 / 64
"""How much of the way a belief goes towards the shared factor for each observation of another
degree: half in 44."""
_FADE_RATIO = 16
"""After so many observations of others, one ratio is forgotten: all in 144."""


class Correction:
    """Observed over predicted: the median of the last nine ratios, reached in bounded steps.

    A hiccup (four slow steps in nine or fewer) does not move the median beyond the other ratios;
    a lasting change is followed within some ten steps. The factor stays in 1 / `limit` to `limit`.
    """

    def __init__(self, limit: float, factor: float = 1.0) -> None:
        self._limit = limit
        self._ratios: deque[float] = deque(maxlen=_WINDOW)
        self._num_seen = 0
        self._num_missed = 0
        self.factor = factor

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

    def fade(self, shared: float) -> None:
        """Another degree was observed instead, and all together stand at `shared`."""
        self.factor *= (shared / self.factor) ** _FADE_SHARE
        self._num_missed += 1
        if self._num_missed % _FADE_RATIO == 0 and self._ratios:
            self._ratios.popleft()


class Corrections:
    """The factors of one phase.

    Attributes:
        shared: the factor of degrees that were never observed.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._of_dop: dict[int, Correction] = {}
        self.shared = 1.0

    def observe(self, dop: int, predicted_s: float, elapsed_s: float) -> None:
        """Take the times of one step on `dop` instances."""
        one = self._of_dop.get(dop)
        if one is None:
            one = self._of_dop[dop] = Correction(self._limit, self.shared)
        one.observe(predicted_s, elapsed_s)
        self.shared *= (one.factor / self.shared) ** _SHARED_SHARE
        for other, correction in self._of_dop.items():
            if other != dop:
                correction.fade(self.shared)

    def factor(self, dop: int) -> float:
        """What predictions for `dop` instances are multiplied by."""
        one = self._of_dop.get(dop)
        return self.shared if one is None else one.factor

    def known(self) -> dict[int, float]:
        """The factors of the degrees that were observed."""
        return {dop: one.factor for dop, one in sorted(self._of_dop.items())}
