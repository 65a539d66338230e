"""Length traces: when requests arrive and how many tokens they have; no text.

Knows: the three-column CSV (`arrival_s,input_len,output_len`, plain or gzipped) and how a trace is
replayed at another rate. Does not know: schedulers, costs.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import nan
from pathlib import Path
from typing import TextIO

from loongd.errors import ConfigError

COLUMNS = ("arrival_s", "input_len", "output_len")
# Up to here a double tells microseconds apart, and the square of a length fits 64 bits.
LAST_ARRIVAL_S = 1e9
MOST_TOKENS = 10**9


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

    Empty lines are skipped. Raises ConfigError, which names the file and the line, when the file
    is not such a trace or has fewer rows.
    """
    try:
        with _open(path) as file:
            trace = list(islice(_rows(path, file), num_requests))
    except (EOFError, zlib.error) as error:
        raise ConfigError(f"trace {path}: broken gzip file: {error}") from error
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
    is exact. Requests that all arrive at once still do. Raises ConfigError when the last would
    come after `LAST_ARRIVAL_S`.
    """
    first_s, last_s = trace[0].arrival_s, trace[-1].arrival_s
    span_s = last_s - first_s
    ends_s = len(trace) / rate_rps
    if ends_s > LAST_ARRIVAL_S:
        message = f"at {rate_rps:g} requests/s the last would arrive after {ends_s:g} s"
        raise ConfigError(f"{message}, which is more than {LAST_ARRIVAL_S:g}")
    factor = ends_s / span_s if span_s > 1e-9 else 0.0
    return [replace(r, arrival_s=(r.arrival_s - first_s) * factor) for r in trace]


def _open(path: Path) -> TextIO:
    # Bytes that are not ASCII pass here: the line is known where a number is wanted.
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="ascii", errors="backslashreplace", newline="")
    return path.open(encoding="ascii", errors="backslashreplace", newline="")


def _rows(path: Path, lines: Iterable[str]) -> Iterator[TracedRequest]:
    reader = csv.reader(lines)
    try:
        header = next(reader, None)
        if header is None:
            raise ConfigError(f"trace {path} is empty; its first line must be {','.join(COLUMNS)}")
        if tuple(header) != COLUMNS:
            found = ",".join(header)[:80]
            raise ConfigError(f"trace {path}: columns are {found}, not {','.join(COLUMNS)}")
        for row in reader:
            if row:
                yield _request(row)
    except (csv.Error, ValueError) as error:
        raise ConfigError(f"trace {path}, line {reader.line_num}: {error}") from error


def _request(row: Sequence[str]) -> TracedRequest:
    """Raises ValueError that says which column is wrong, and what it holds."""
    if len(row) != len(COLUMNS):
        raise ValueError(f"columns are {','.join(row)[:80]!r}, not {len(COLUMNS)} numbers")
    try:
        arrival_s = float(row[0])
    except ValueError:
        arrival_s = nan
    if not 0.0 <= arrival_s <= LAST_ARRIVAL_S:
        raise ValueError(f"arrival_s is {row[0]!r}, not a number from 0 to {LAST_ARRIVAL_S:g}")
    return TracedRequest(arrival_s, _length(row, 1), _length(row, 2))


def _length(row: Sequence[str], column: int) -> int:
    text = row[column]
    # Of a text of thousands of digits, int() itself refuses to know the value.
    num_tokens = int(text) if text.strip().isdecimal() and len(text) < 100 else 0
    if not 1 <= num_tokens <= MOST_TOKENS:
        what = f"{COLUMNS[column]} is {text[:40]!r}"
        raise ValueError(f"{what}, not a whole number from 1 to {MOST_TOKENS:,}")
    return num_tokens
