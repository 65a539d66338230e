"""Words for the sentences that explain decisions."""

from __future__ import annotations

from collections.abc import Iterable


def name_instances(instances: Iterable[int]) -> str:
    """`instance 2`, or `instances 0,1,2`."""
    names = [str(i) for i in instances]
    return f"instance{'s' if len(names) > 1 else ''} {','.join(names)}"


def plural(count: int, noun: str) -> str:
    """`1 request`, `6,000 requests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
