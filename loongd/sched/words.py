"""Words for the sentences that explain decisions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from loongd.sched.sib import Sib


def name_instances(instances: Iterable[int]) -> str:
    """`instance 2`, or `instances 0,1,2`."""
    names = [str(i) for i in instances]
    return f"instance{'s' if len(names) > 1 else ''} {','.join(names)}"


def plural(count: int, noun: str) -> str:
    """`1 request`, `6,000 requests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def describe_decode(
    sib: Sib, dop: int, masters: Collection[int], batch: int, kv_tokens: int
) -> str:
    """`, predicted 0.0123 s`: a decode step of `batch` requests that read `kv_tokens`."""
    time_s = sib.decode_s(dop=dop, num_masters=len(masters), batch=batch, kv_tokens=kv_tokens)
    return f", predicted {time_s:.4f} s"


def describe_prefill(sib: Sib | None, dop: int, lengths: Sequence[tuple[int, int]]) -> str:
    """`, predicted 1.234 s (2.345 s with one instance less)`: a prefill step of (cached, new)
    tokens; empty without a SIB."""
    if sib is None:
        return ""
    text = f", predicted {sib.prefill_s(dop, lengths):.3f} s"
    if dop > 1:
        text += f" ({sib.prefill_s(dop - 1, lengths):.3f} s with one instance less)"
    return text
