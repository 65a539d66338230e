"""Length traces: when requests arrive and how many tokens they have; no text.

Knows: the three-column CSV (`arrival_s,input_len,output_len`, plain or gzipped) and how a trace is
replayed at another rate. Does not know: schedulers, costs.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TextIO

from loongd.errors import ConfigError

COLUMNS = ("arrival_s", "input_len", "output_len")


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request: seconds after the start, prompt tokens, and tokens that it will produce."""

    arrival_s: float
    input_tokens: int
    output_tokens: int


def read_trace(
    path: Path, *, num_requests: int | None = None, input_cap: int | None = None
) -> list[TracedRequest]:
    """The first `num_requests` rows of a trace, in order of arrival.

    Args:
        input_cap: prompts longer than this are cut to it.

    Raises ConfigError when the file is not such a trace or has fewer rows.
    """
    try:
        with _open(path) as file:
            trace = list(islice(_rows(path, file), num_requests))
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror or error}") from error
    if num_requests is not None and len(trace) < num_requests:
        raise ConfigError(f"trace {path} has {len(trace):,} requests, {num_requests:,} wanted")
    if not trace:
        raise ConfigError(f"trace {path} has no requests")
    if input_cap is not None:
        trace = [replace(r, input_tokens=min(r.input_tokens, input_cap)) for r in trace]
    return sorted(trace, key=lambda r: r.arrival_s)


def at_rate(trace: Sequence[TracedRequest], rate_rps: float) -> list[TracedRequest]:
    """The same arrival pattern, stretched so that the last of N requests comes at N / rate.

    This is what LoongServe's own client does: every rate sees the same pattern, and the mean rate
    is exact.
    """
    first_s, last_s = trace[0].arrival_s, trace[-1].arrival_s
    span_s = last_s - first_s
    factor = len(trace) / rate_rps / span_s if span_s > 0 else 0.0
    return [replace(r, arrival_s=(r.arrival_s - first_s) * factor) for r in trace]


def _open(path: Path) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="ascii", newline="")
    return path.open(encoding="ascii", newline="")


def _rows(path: Path, lines: Iterable[str]) -> Iterator[TracedRequest]:
    reader = csv.reader(lines)
    header = tuple(next(reader, ()))
    if header != COLUMNS:
        raise ConfigError(f"trace {path}: columns are {','.join(header)}, not {','.join(COLUMNS)}")
    for number, row in enumerate(reader, start=2):
        try:
            arrival, num_input, num_output = row
            request = TracedRequest(float(arrival), int(num_input), int(num_output))
        except ValueError as error:
            raise ConfigError(f"trace {path}, line {number}: {error}") from error
        if request.input_tokens < 1 or request.output_tokens < 1:
            raise ConfigError(f"trace {path}, line {number}: lengths must be at least 1")
        yield request
