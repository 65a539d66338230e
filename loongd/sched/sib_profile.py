"""What profiling has found out, as frozen values that are one readable JSON file.

Knows: the coefficients of the time formulas, the range in which they were measured, and how
good the fit was. Does not know: how coefficients are measured (`loongd.profiling`), fitted
(`sched.sib_fit`) or used (`sched.sib`).

Prefill, for one degree of parallelism:
    T = max(floor, alpha + item * requests + many * [requests > 1] + beta * sum(new)
            + gamma * sum((cached + new)^2 - cached^2))
Decode, for one (dop, masters), with b = ceil(batch / masters) requests of the busiest master
and k = kv_tokens / dop tokens read by each member:
    T = max(floor, alpha + extra(b) + kv_token * k)
`many` is what the output head costs more for several rows than for one, a product of matrices
instead of a matrix and a vector. `extra` is a line with a knee, beyond which the linear layers are
bound by arithmetic and not by reading the weights: request * b + over * max(0, b - knee). `alpha`
holds the weights' reading, launches and the latency of the exchanges.
All coefficients are seconds and not negative, so no prediction falls when work is added.
These formulas are the paper's, and serve for any size. What measurements add to them is in
`sched.sib_detail`, and comes first where a profile has it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import ceil

import msgspec

from loongd.errors import ConfigError
from loongd.sched.sib_detail import DecodeGrid, PrefillDetail, SmallSteps

FORMAT = 1
NOISY = 0.10
"""Steps that typically take so much longer than the fastest of their runs tell more of what else
ran on the machine."""


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill time of one degree of parallelism: seconds, per token, per squared token, ..."""

    alpha_s: float
    beta_s: float
    gamma_s: float
    item_s: float = 0.0
    many_s: float = 0.0
    floor_s: float = 0.0

    def time_s(self, items: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step; `items` are (cached_tokens, new_tokens)."""
        new = square = 0
        for cached, count in items:
            new += count
            square += count * (count + 2 * cached)
        return max(
            self.floor_s,
            self.alpha_s
            + self.item_s * len(items)
            + (self.many_s if len(items) > 1 else 0.0)
            + self.beta_s * new
            + self.gamma_s * square,
        )

    def alone_s(self, cached: int, new: int) -> float:
        """`time_s` of a single request, to the last bit; thousands are asked for each second."""
        square = new * (new + 2 * cached)
        time_s = self.alpha_s + self.item_s + self.beta_s * new + self.gamma_s * square
        return max(self.floor_s, time_s)

    def added_s(self, new: int) -> float:
        """What one more prompt adds to a step that takes its least time anyway."""
        return self.item_s + (self.beta_s + self.gamma_s * new) * new

    def scaled(self, factor: float) -> Coefficients:
        """All times multiplied by `factor`."""
        return Coefficients(
            alpha_s=self.alpha_s * factor,
            beta_s=self.beta_s * factor,
            gamma_s=self.gamma_s * factor,
            item_s=self.item_s * factor,
            many_s=self.many_s * factor,
            floor_s=self.floor_s * factor,
        )


class DecodeCoefficients(msgspec.Struct, frozen=True, kw_only=True):
    """Decode time of one (dop, masters); the module says what each coefficient means."""

    alpha_s: float
    request_s: float
    kv_token_s: float
    over_s: float = 0.0
    knee: float = 0.0
    floor_s: float = 0.0

    def time_s(self, *, dop: int, num_masters: int, batch: int, kv_tokens: int) -> float:
        """Seconds of one step of `batch` requests that read `kv_tokens` altogether."""
        return self.step_s(ceil(batch / num_masters), kv_tokens / dop)

    def step_s(self, busiest: int, kv_tokens: float) -> float:
        """The same, for the requests of the busiest master and the KV tokens of a member."""
        work_s = self.extra_s(busiest) + self.kv_token_s * kv_tokens
        return max(self.floor_s, self.alpha_s + work_s)

    def extra_s(self, requests: int) -> float:
        """Seconds that so many requests of one master add to `alpha_s`."""
        return self.request_s * requests + self.over_s * max(0.0, requests - self.knee)


class FitError(msgspec.Struct, frozen=True, kw_only=True):
    """Relative errors of a fit on its own points."""

    mean: float
    worst: float
    num_points: int


class PrefillFit(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill coefficients of a dop; measured up to so many new tokens, squares and requests.

    `error` is of the best of what is here: of `small` and `detail`, or else of `coefficients`.
    """

    dop: int
    coefficients: Coefficients
    max_tokens: int
    max_square: int
    max_items: int
    error: FitError | None = None
    detail: PrefillDetail | None = None
    small: tuple[SmallSteps, ...] = ()

    def time_s(self, items: Sequence[tuple[int, int]]) -> float:
        """Seconds of a step; `items` are (cached_tokens, new_tokens)."""
        for small in self.small:
            if small.limits.covers(items):
                return small.detail.time_s(items)
        seconds = (self.coefficients if self.detail is None else self.detail).time_s(items)
        if not self.small or any(cached for cached, _ in items):
            return seconds
        return max(seconds, *(small.most_s for small in self.small))


class DecodeFit(msgspec.Struct, frozen=True, kw_only=True):
    """Decode coefficients of (dop, masters); measured up to so large a batch and so much KV.

    `error` is of the best of what is here: of `grid`, or else of `coefficients`.
    """

    dop: int
    num_masters: int
    coefficients: DecodeCoefficients
    max_batch: int
    max_kv_tokens: int
    error: FitError | None = None
    grid: DecodeGrid | None = None

    def time_s(self, *, busiest: int, kv_tokens: float) -> float:
        """Seconds of a step whose busiest master has so many requests and whose members read so
        many tokens each. Outside the grid, what the coefficients say of the rest is added."""
        formula, grid = self.coefficients, self.grid
        if grid is None:
            return formula.step_s(busiest, kv_tokens)
        at, kv = grid.clamp(busiest, kv_tokens)
        inside_s = grid.time_s(at, kv)
        if (at, kv) == (busiest, kv_tokens):
            return inside_s
        rest_s = formula.step_s(busiest, kv_tokens) - formula.step_s(at, kv)
        return inside_s + max(rest_s, 0.0)

    def times_s(self, *, busiest: int, kv_tokens: Sequence[float]) -> list[float]:
        """`time_s` of several steps of one batch, to the last bit; `kv_tokens` ascend."""
        grid = self.grid
        if grid is None or not kv_tokens or not grid.has(busiest, kv_tokens[0], kv_tokens[-1]):
            return [self.time_s(busiest=busiest, kv_tokens=kv) for kv in kv_tokens]
        return grid.times_of(busiest, kv_tokens)


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """What one pair of instances reaches, both ways: seconds at least, and bytes per second."""

    instances: tuple[int, int]
    alpha_s: float
    bytes_per_s: float


class MigrateFit(msgspec.Struct, frozen=True, kw_only=True):
    """Moving KV from one instance to another: seconds at least, and per token, over all pairs.

    `links` are the measured pairs; empty where nothing was measured.
    """

    alpha_s: float
    token_s: float
    error: FitError | None = None
    links: list[LinkFit] = []


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of the speed of one model on one device; `sib.Sib` predicts from it.

    Args:
        model: name, for people.
        shape: the model's shape in words (`sib_default.ModelFacts.key`); must match to be used.
        device: the device's name; must match to be used.
        tp: workers per instance; must match to be used.
        date: ISO date of the measurement, or of the file.
        source: where the numbers come from; what is measured and what is derived.
        measured: coefficients come from these very workers; else they are a model, and online
            correction may move them further.
        versions: of loongd and of libraries that matter, and the backend of attention.
        noise: how much longer than the fastest of its runs a measured step took, typically.
        compute_bound_batch: requests per master at which arithmetic takes as long as reading
            the weights.
        link_bytes_per_s: bandwidth from one instance to another, one way.
    """

    model: str
    shape: str
    device: str
    tp: int
    date: str
    source: str
    measured: bool
    prefill: list[PrefillFit]
    decode: list[DecodeFit]
    migrate: MigrateFit
    compute_bound_batch: int
    kv_bytes_per_token: int
    link_bytes_per_s: float
    dtype: str = ""
    versions: dict[str, str] = {}
    noise: float = 0.0
    format: int = FORMAT

    @property
    def max_dop(self) -> int:
        """The largest degree of parallelism with prefill coefficients."""
        return max(fit.dop for fit in self.prefill)

    @property
    def doubt(self) -> str:
        """Why its times should not be trusted; empty when they may be."""
        if self.noise <= NOISY:
            return ""
        return (
            f"not to be trusted: measured steps typically took {self.noise:.0%} longer than the "
            "fastest of their runs, as on a busy machine"
        )


_NUMBERS = re.compile(r"\[[-+0-9.eE,\s]+\]")
"""A list of nothing but numbers."""


def dump_profile(profile: Profile) -> str:
    """A profile as indented JSON, which `parse_profile` reads back to the same value; lists of
    numbers have a line each."""
    text = msgspec.json.format(msgspec.json.encode(profile), indent=2).decode()
    return _NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def parse_profile(data: str | bytes, *, where: str) -> Profile:
    """The profile in a JSON text. Raises ConfigError that starts with `where`."""
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: not a profile: {error}") from error
    if profile.format != FORMAT:
        raise ConfigError(f"{where}: format is {profile.format}, this loongd reads {FORMAT}")
    if not profile.prefill or not profile.decode:
        raise ConfigError(f"{where}: a profile needs prefill and decode coefficients")
    fits: tuple[PrefillFit | DecodeFit, ...] = (*profile.prefill, *profile.decode)
    for fit in fits:
        numbers = msgspec.structs.asdict(fit.coefficients)
        bad = [name for name, value in numbers.items() if not 0 <= value < float("inf")]
        if bad or fit.dop < 1:
            raise ConfigError(f"{where}: {bad or 'dop'} of dop {fit.dop} must not be negative")
        for one in _measured(fit):
            if fault := one.fault():
                raise ConfigError(f"{where}: dop {fit.dop}: {fault}")
    return profile


def _measured(fit: PrefillFit | DecodeFit) -> list[PrefillDetail | DecodeGrid]:
    """What measurements add to the formula."""
    if isinstance(fit, DecodeFit):
        return [] if fit.grid is None else [fit.grid]
    replays = [small.detail for small in fit.small]
    return [*replays, *([] if fit.detail is None else [fit.detail])]
