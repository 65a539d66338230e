"""Summaries as text for people and as JSON for tools."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from loongd.sim.metrics import ClassSummary, Spread, Summary

HEAD = (
    f"{'prompts':<12}{'num':>7}{'fail':>6} | {'TTFT s p50':>10}{'p90':>9}{'p99':>9} | "
    f"{'TPOT ms p50':>11}{'p90':>8}{'p99':>8} | {'gap s p99':>9} | "
    f"{'ms/token total':>14}{'input':>8}{'output':>8} | {'SLO %':>6}"
)


def as_table(summary: Summary) -> str:
    """A few lines: the run, one line for each class of prompts, and why the first failed."""
    busy = [f"{kind} {100 * share:.1f} %" for kind, share in summary.busy.items() if share]
    lines = [
        f"{summary.num_requests:,} requests in {summary.end_s:,.1f} s: offered "
        f"{summary.offered_rps:.3f}/s, achieved {summary.achieved_rps:.3f}/s; "
        f"busy: {', '.join(busy) or 'nothing'}",
        f"{summary.num_prefill_steps:,} prefill and {summary.num_decode_steps:,} decode steps, "
        f"{summary.num_preemptions:,} preemptions, {summary.num_scale_ups:,} scale-ups, "
        f"{summary.num_scale_downs:,} scale-downs",
        HEAD,
        *map(_line, summary.classes),
        *(f"failed: {failure}" for failure in summary.failures),
    ]
    num_failed = next((c.num_failed for c in summary.classes if c.name == "all"), 0)
    if num_failed > len(summary.failures):
        lines.append(f"and {num_failed - len(summary.failures):,} more failed")
    return "\n".join(lines)


def as_json(summary: Summary) -> dict[str, Any]:
    """All numbers, rounded to six significant digits; keys are the fields of the summaries."""
    rounded: dict[str, Any] = _round(asdict(summary))
    return rounded


def _line(summary: ClassSummary) -> str:
    slo, gap_s = summary.slo_attainment, summary.longest_gap_s
    normalised = (
        summary.total_s_per_token,
        summary.input_s_per_token,
        summary.output_s_per_token,
    )
    was_served = summary.ttft_s.num > 0
    at_total, at_input, at_output = (1000 * s if was_served else None for s in normalised)
    return (
        f"{summary.name:<12}{summary.num_requests:>7,}{summary.num_failed:>6,} | "
        f"{_three(summary.ttft_s, 1, (10, 9, 9))} | {_three(summary.tpot_s, 1000, (11, 8, 8))} | "
        f"{_number(gap_s.p99 if gap_s.num else None, 9, 3)} | "
        f"{_number(at_total, 14, 2)}{_number(at_input, 8, 2)}{_number(at_output, 8, 2)} | "
        f"{_number(None if slo is None else 100 * slo, 6, 1)}"
    )


def _three(spread: Spread, factor: float, widths: tuple[int, int, int]) -> str:
    values = (spread.p50, spread.p90, spread.p99)
    digits = 1 if factor > 1 else 3
    return "".join(
        _number(factor * v if spread.num else None, w, digits)
        for v, w in zip(values, widths, strict=True)
    )


def _number(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _round(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: _round(item) for key, item in value.items()}
        case list() | tuple():
            return [_round(item) for item in value]
        case _:
            return value
