"""The engine's cases, and their figures beside a roofline, vLLM and the goals.

Knows: the columns, as data with their source; what a case's name says. Does not know: how
anything is measured.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

SOURCE = (
    "roofline, vLLM 0.26 on the same machine (TP2 for two GPUs) and goals: the project's design, "
    "section 11"
)
Figures = tuple[float | None, float | None, float | None]
TABLE: dict[tuple[str, int, str], Figures] = {
    ("llama-2-7b", 1, "prefill-1k"): (17, 27, 22),
    ("llama-2-7b", 1, "prefill-16k"): (371, 477, 420),
    ("llama-2-7b", 1, "prefill-128k"): (9030, 10508, 9900),
    ("llama-2-7b", 2, "prefill-1k"): (8.5, 25, 22),
    ("llama-2-7b", 2, "prefill-16k"): (186, 274, 225),
    ("llama-2-7b", 2, "prefill-128k"): (4515, 5581, 5000),
    ("llama-2-7b", 1, "decode-b1x1k"): (3.3, 4.7, 3.8),
    ("llama-2-7b", 1, "decode-b32x4k"): (19.1, 21.0, 20),
    ("llama-2-7b", 1, "decode-b64x1k"): (11.1, 14.2, 12.5),
    ("llama-2-7b", 2, "decode-b1x1k"): (1.6, 3.2, None),
    ("llama-2-7b", 2, "decode-b32x4k"): (9.6, 11.6, 12.5),
    ("llama-2-7b", 2, "decode-b64x1k"): (5.6, 8.0, 8.5),
    ("llama-3.1-8b", 1, "prefill-1k"): (18, 36, 24),
    ("llama-3.1-8b", 1, "prefill-16k"): (391, 504, 440),
    ("llama-3.1-8b", 1, "prefill-128k"): (9190, 10528, 10000),
    ("llama-3.1-8b", 1, "decode-b1x1k"): (3.6, 5.0, 4.2),
    ("llama-3.1-8b", 1, "decode-b8x32k"): (11.6, 12.8, 12.4),
    ("llama-3.1-8b", 1, "decode-b32x4k"): (7.6, 9.4, 8.5),
    ("llama-3.1-8b", 1, "decode-b64x1k"): (5.6, 7.8, 6.4),
    ("llama-3.1-8b", 1, "decode-b256x1k"): (11.6, 18.6, 14),
}
"""(roofline, vLLM, goal) in ms by shape, GPUs and case; see `SOURCE`."""
SPEEDUPS: dict[tuple[str, str], float] = {
    ("llama-2-7b", "decode-b1024x64"): 1.7,
    ("llama-2-7b", "decode-b8x32k"): 1.6,
}
"""How many times as fast as one instance two masters must be; see `SOURCE`."""
CASES: dict[tuple[str, int], str] = {
    ("llama-2-7b", 1): "prefill-1k,prefill-16k,prefill-128k,decode-b1x1k,decode-b32x4k,"
    "decode-b64x1k,decode-b1024x64",
    # one instance has no room for 8 x 32K of this shape: 6 x 32K is the nearest comparison
    ("llama-2-7b", 2): "prefill-1k,prefill-16k,prefill-128k,decode-b1x1k,decode-b32x4k,"
    "decode-b64x1k,decode-b1024x64,decode-b8x32k,decode-b6x32k",
    ("llama-3.1-8b", 1): "prefill-1k,prefill-16k,prefill-128k,decode-b1x1k,decode-b8x32k,"
    "decode-b32x4k,decode-b64x1k,decode-b256x1k",
    ("llama-3.1-8b", 2): "prefill-1k,prefill-16k,prefill-128k,decode-b1x1k,decode-b8x32k,"
    "decode-b32x4k,decode-b64x1k,decode-b256x1k",
}


@dataclass(frozen=True)
class Case:
    """`batch` requests of `tokens` tokens: their prefill, or one decode step over so much KV."""

    name: str
    kind: str
    batch: int
    tokens: int

    @classmethod
    def parse(cls, name: str) -> Case:
        """From `prefill-16k` or `decode-b32x4k`. Raises ValueError."""
        found = re.fullmatch(r"(prefill|decode)-(?:b(\d+)x)?(\d+)(k?)", name)
        if found is None:
            raise ValueError(f"{name} is no case; prefill-16k and decode-b32x4k are")
        kind, batch, tokens, kilo = found.groups()
        return cls(name, kind, int(batch or 1), int(tokens) * (1024 if kilo else 1))


@dataclass
class Row:
    """What a case took in one layout; `runs_ms` in the order of measurement."""

    case: str
    layout: str
    instances: int
    ms: float
    runs_ms: list[float]
    host_ms: float | None = None
    gpu_idle: float | None = None
    gpu_gaps: float | None = None
    kernels_us: dict[str, float] | None = None


def finished(rows: list[Row], shape: str) -> list[dict[str, Any]]:
    """The rows with the table's columns beside them, and speed-ups over one instance."""
    alone = {row.case: row.ms for row in rows if row.layout == "one"}
    done = []
    for row in rows:
        limit, vllm, goal = TABLE.get((shape, row.instances, row.case), (None, None, None))
        least = SPEEDUPS.get((shape, row.case))
        speedup = alone[row.case] / row.ms if row.layout == "own" and row.case in alone else None
        reached = [row.ms <= goal] if goal is not None else []
        if least is not None and speedup is not None:
            reached.append(speedup >= least)
        done.append(
            {
                **asdict(row),
                "roofline_ms": limit,
                "of_roofline": row.ms / limit if limit else None,
                "vllm_ms": vllm,
                "of_vllm": row.ms / vllm if vllm else None,
                "goal_ms": goal,
                "of_goal": row.ms / goal if goal else None,
                "speedup_over_one": speedup,
                "goal_speedup": least if row.layout == "own" else None,
                "reached": all(reached) if reached else None,
            }
        )
    return [{k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in done]


def line(row: dict[str, Any]) -> str:
    """One row for a person; ratios are times over the column's."""
    names = ("of_roofline", "of_vllm", "of_goal", "speedup_over_one", "host_ms")
    columns = [f"{name} {row[name]:.3f}" for name in names if row[name] is not None]
    first = f"{row['case']:16} {row['layout']:7} x{row['instances']} {row['ms']:10.3f} ms"
    return "  ".join([first, *columns])
