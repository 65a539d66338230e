"""The SIB: how long a step will take (LoongServe, section 5; the paper's scaling information base).

Knows: a profile's formulas (`sched.sib_profile`) and what measurements add to them, how to fill in
degrees of parallelism that were not profiled, how far a prediction lies outside what was measured,
and a bounded correction from the steps that really ran.
Does not know: clocks, workers, files, who asks.

Degrees that were not profiled: per-step costs are linear in dop between the profiled neighbours;
costs per token are shared by the group, so cost x dop is. Beyond the profiled ends the nearest
one's cost x dop holds and its per-step costs stay. Decode times are already of one member and one
master: linear between neighbours, first in masters, then in dop, constant beyond the ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import ceil
from typing import Literal

from loongd.sched.sib_correct import Corrections
from loongd.sched.sib_default import HARDWARE, Hardware, ModelFacts, default_profile
from loongd.sched.sib_profile import (
    Coefficients,
    DecodeCoefficients,
    DecodeFit,
    PrefillFit,
    Profile,
    dump_profile,
    parse_profile,
)

__all__ = [
    "HARDWARE",
    "Coefficients",
    "DecodeCoefficients",
    "Hardware",
    "ModelFacts",
    "Profile",
    "Sib",
    "default_profile",
    "dump_profile",
    "parse_profile",
]

Phase = Literal["prefill", "decode"]
_LIMIT_MEASURED = 2.0
_LIMIT_MODELLED = 16.0
"""How far correction may go: a measured profile is about right, a roofline may be far off."""
_MOST_REMEMBERED = 1 << 16
"""Predictions of single prompts that are kept: some 10 MB."""


class Sib:
    """Predicts step times from a profile; deterministic given the observations so far."""

    def __init__(self, profile: Profile) -> None:
        self.replace(profile)

    def replace(self, profile: Profile) -> None:
        """Predict from another profile; corrections start anew."""
        self._profile = profile
        self._prefill_fits = sorted(profile.prefill, key=lambda fit: fit.dop)
        self._raw_prefill: dict[int, PrefillFit | Coefficients] = {}
        self._raw_alone: dict[tuple[int, int, int], float] = {}
        self._prefill: dict[int, Coefficients] = {}
        self._decode: dict[tuple[int, int], list[tuple[float, DecodeFit]]] = {}
        limit = _LIMIT_MEASURED if profile.measured else _LIMIT_MODELLED
        self._corrections: dict[Phase, Corrections] = {
            "decode": Corrections(limit),
            "prefill": Corrections(limit),
        }

    @property
    def profile(self) -> Profile:
        """What predictions are made from."""
        return self._profile

    @property
    def max_dop(self) -> int:
        """The largest profiled degree of parallelism; larger ones are extrapolated."""
        return self._profile.max_dop

    @property
    def compute_bound_batch(self) -> int:
        """Requests per master from which a decode step is bound by arithmetic."""
        return self._profile.compute_bound_batch

    # ---- predictions ---------------------------------------------------------------------------

    def prefill_s(self, dop: int, items: Sequence[tuple[int, int]]) -> float:
        """Seconds of a prefill step on `dop` instances; `items` are (cached, new) tokens."""
        if len(items) != 1:
            return self._raw(dop).time_s(items) * self._factor("prefill", dop)
        # sizes of chunks are looked for among the same ones again and again
        key = (dop, *items[0])
        raw_s = self._raw_alone.get(key)
        if raw_s is None:
            if len(self._raw_alone) >= _MOST_REMEMBERED:
                self._raw_alone.clear()
            raw_s = self._raw_alone[key] = self._raw(dop).time_s(items)
        return raw_s * self._factor("prefill", dop)

    def prefill_coefficients(self, dop: int) -> Coefficients:
        """The paper's formula of `prefill_s` now, with the online correction in it.

        For sums over many candidate batches and for inverting; `prefill_s` is nearer to the truth
        where a profile has more than the formula.
        """
        found = self._prefill.get(dop)
        if found is None:
            raw = self._raw(dop)
            formula = raw.coefficients if isinstance(raw, PrefillFit) else raw
            found = self._prefill[dop] = formula.scaled(self._factor("prefill", dop))
        return found

    def decode_s(self, *, dop: int, num_masters: int, batch: int, kv_tokens: int) -> float:
        """Seconds of a decode step of `batch` requests, spread evenly over `num_masters`, that
        read `kv_tokens` altogether, spread evenly over `dop` members."""
        raw = self._raw_decode_s(dop, num_masters, batch, kv_tokens)
        return raw * self._factor("decode", dop)

    def decode_run_s(self, batch: int, kv_tokens: int, num_steps: int) -> list[float]:
        """`decode_s` of so many steps in a row on one instance, to the last bit; the first reads
        `kv_tokens`, each later one `batch` more."""
        lengths = range(kv_tokens, kv_tokens + batch * num_steps, batch)
        found = self._decode.get((1, 1), [])
        if len(found) != 1:
            return [self.decode_s(dop=1, num_masters=1, batch=batch, kv_tokens=n) for n in lengths]
        ((share, fit),) = found
        if fit.grid is not None:
            factor, times = self._factor("decode", 1), fit.times_s(busiest=batch, kv_tokens=lengths)
            return [share * step_s * factor for step_s in times]
        formula, factor = fit.coefficients, self._factor("decode", 1)
        extra_s, kv_token_s = formula.extra_s(batch), formula.kv_token_s
        floor_s, alpha_s = formula.floor_s, formula.alpha_s
        return [
            share * max(floor_s, alpha_s + (extra_s + kv_token_s * n)) * factor for n in lengths
        ]

    def migrate_s(self, tokens: int) -> float:
        """Seconds to move the KV of `tokens` from one instance to another."""
        migrate = self._profile.migrate
        return migrate.alpha_s + migrate.token_s * tokens if tokens else 0.0

    def prefill_reach(self, dop: int, items: Sequence[tuple[int, int]]) -> float:
        """How far outside the profiled range the step lies: 1 is inside, 4 four times as much
        work as was ever measured. Predictions with more than 1 are extrapolations."""
        fit = _nearest(self._prefill_fits, dop)
        new = sum(count for _, count in items)
        square = sum(count * (count + 2 * cached) for cached, count in items)
        return max(1.0, new / fit.max_tokens, square / fit.max_square, len(items) / fit.max_items)

    def decode_reach(self, *, dop: int, num_masters: int, batch: int, kv_tokens: int) -> float:
        """The same for a decode step."""
        fits = [fit for fit in self._profile.decode if fit.dop == dop] or self._profile.decode
        fit = min(fits, key=lambda fit: (abs(fit.dop - dop), abs(fit.num_masters - num_masters)))
        return max(1.0, batch / fit.max_batch, kv_tokens / fit.max_kv_tokens)

    # ---- observations --------------------------------------------------------------------------

    def observe_prefill(self, dop: int, items: Sequence[tuple[int, int]], elapsed_s: float) -> None:
        """Learn from a prefill step that ran; the same units as `prefill_s`."""
        self._corrections["prefill"].observe(dop, self._raw(dop).time_s(items), elapsed_s)
        self._prefill.clear()

    def observe_decode(
        self, *, dop: int, num_masters: int, batch: int, kv_tokens: int, elapsed_s: float
    ) -> None:
        """Learn from a decode step that ran; the same units as `decode_s`."""
        raw = self._raw_decode_s(dop, num_masters, batch, kv_tokens)
        self._corrections["decode"].observe(dop, raw, elapsed_s)

    def corrections(self) -> dict[str, float]:
        """The factors in force, by `phase@dop`; for status pages."""
        known = {phase: one.known() for phase, one in self._corrections.items()}
        return {f"{phase}@{dop}": f for phase, of_dop in known.items() for dop, f in of_dop.items()}

    def _factor(self, phase: Phase, dop: int) -> float:
        return self._corrections[phase].factor(dop)

    # ---- between profiled degrees --------------------------------------------------------------

    def _raw(self, dop: int) -> PrefillFit | Coefficients:
        """The fit of `dop`, or coefficients between those of its neighbours."""
        found = self._raw_prefill.get(dop)
        if found is None:
            measured = next((fit for fit in self._prefill_fits if fit.dop == dop), None)
            found = measured or _between_prefill(self._prefill_fits, dop)
            self._raw_prefill[dop] = found
        return found

    def _raw_decode_s(self, dop: int, num_masters: int, batch: int, kv_tokens: int) -> float:
        key = (dop, num_masters)
        found = self._decode.get(key)
        if found is None:
            found = self._decode[key] = _between_decode(self._profile.decode, dop, num_masters)
        if batch < num_masters:  # the other masters have nothing to do
            return self._raw_decode_s(dop, max(batch, 1), max(batch, 1), kv_tokens)
        busiest, kv = ceil(batch / num_masters), kv_tokens / dop
        if len(found) == 1:
            ((share, fit),) = found
            return share * fit.time_s(busiest=busiest, kv_tokens=kv)
        return sum(share * fit.time_s(busiest=busiest, kv_tokens=kv) for share, fit in found)


def _nearest(fits: Sequence[PrefillFit], dop: int) -> PrefillFit:
    return min(fits, key=lambda fit: abs(fit.dop - dop))


def _between_prefill(fits: Sequence[PrefillFit], dop: int) -> Coefficients:
    if dop < 1:
        raise ValueError(f"dop is {dop}, but a group has at least one instance")
    low, high, share = _neighbours([fit.dop for fit in fits], dop)
    a, b = fits[low], fits[high]
    left, right = a.coefficients, b.coefficients

    def per_token(x: float, y: float) -> float:
        return _mix(x * a.dop, y * b.dop, share) / dop

    return Coefficients(
        alpha_s=_mix(left.alpha_s, right.alpha_s, share),
        beta_s=per_token(left.beta_s, right.beta_s),
        gamma_s=per_token(left.gamma_s, right.gamma_s),
        item_s=_mix(left.item_s, right.item_s, share),
        many_s=_mix(left.many_s, right.many_s, share),
        floor_s=_mix(left.floor_s, right.floor_s, share),
    )


def _between_decode(
    fits: Sequence[DecodeFit], dop: int, num_masters: int
) -> list[tuple[float, DecodeFit]]:
    """The fits around (dop, masters), each with its share of the time; shares sum to 1."""
    if not 1 <= num_masters <= dop:
        raise ValueError(f"{num_masters} masters in a group of {dop}")
    dops = sorted({fit.dop for fit in fits})
    low, high, share = _neighbours(dops, dop)
    found: list[tuple[float, DecodeFit]] = []
    for at, part in ((low, 1.0 - share), (high, share)):
        row = sorted((f for f in fits if f.dop == dops[at]), key=lambda fit: fit.num_masters)
        left, right, towards = _neighbours([fit.num_masters for fit in row], num_masters)
        found += [(part * (1.0 - towards), row[left]), (part * towards, row[right])]
    return [(part, fit) for part, fit in found if part > 0.0]


def _neighbours(known: Sequence[int], wanted: int) -> tuple[int, int, float]:
    """Indices of the profiled values around `wanted`, and its place between them, 0 to 1."""
    at = bisect_left(known, wanted)
    if at == len(known):
        return at - 1, at - 1, 0.0
    if known[at] == wanted or at == 0:
        return at, at, 0.0
    return at - 1, at, (wanted - known[at - 1]) / (known[at] - known[at - 1])


def _mix(left: float, right: float, share: float) -> float:
    return left + (right - left) * share
