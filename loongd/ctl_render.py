"""What `loongctl` prints: JSON from the admin socket in, text of at most 80 columns out.

Knows: the shapes of `status` and `story`. Does not know: where they come from, or the terminal.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH = 80
Json = Mapping[str, Any]


def status(snapshot: Json) -> str:
    """The node, its instances, groups, pool and queue, as tables."""
    node = snapshot["node"]
    blocks = [
        _node(node, snapshot["queue"], snapshot["totals"]),
        _instances(snapshot["instances"], snapshot["pool"]) + _first_wait(snapshot["queue"]),
        _groups(snapshot["groups"]),
    ]
    return "\n\n".join(blocks)


def story(tale: Json) -> str:
    """One request's life: a row with a time bar for each entry, and the sentence below it.

    A call with several choices is several requests to the engine, hence several tables.
    """
    if "choices" in tale:
        return "\n\n".join(story(part) for part in tale["choices"])
    entries = tale["entries"]
    if tale.get("waiting"):
        entries = [*entries, {"event": "waiting", **tale["waiting"]}]
    total_s = max((e["at_s"] + (e.get("duration_s") or 0.0) for e in entries), default=0.0)
    total_s = max(total_s, tale.get("elapsed_s", 0.0))
    head = (
        f"{tale['request_id']}  {tale['state']}  {tale['prompt_tokens']:,} prompt + "
        f"{tale['generated_tokens']:,} generated tokens  {seconds(total_s)}"
    )
    rows = [
        "",
        f"{'AT':>8}  {'TIME':<{_BAR}}  {'EVENT':<9} {'DOP':>3} {'GROUP':<9} {'MASTERS':<8}"
        f" {'TOKENS':>7} {'STEPS':>5}",
    ]
    for entry in entries:
        rows.append(_entry_row(entry, total_s))
        rows += _sentences(entry, tale["request_id"])
    return "\n".join([head, *rows])


def bar(share: float, width: int) -> str:
    """`[###...]` with `width` cells. Only nothing is empty, and only everything is full."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    if 0 < share < 1:
        filled = min(max(filled, 1), width - 1)
    return "[" + "#" * filled + "." * (width - filled) + "]"


def span(start: float, end: float, total: float, width: int) -> str:
    """Where `start` to `end` lies in 0 to `total`, in `width` columns; an instant is a `|`."""
    scale = width / total if total > 0 else 0.0
    first = min(int(start * scale), width - 1)
    mark = "|" if end <= start else "=" * max(min(round(end * scale), width) - first, 1)
    return (" " * first + mark).ljust(width)


def seconds(value: float) -> str:
    """A duration in three or four figures: `850 us`, `12.3 ms`, `4.21 s`, `2h03m`."""
    if value >= 3600:
        return f"{int(value // 3600)}h{int(value % 3600 // 60):02}m"
    if value >= 100:
        return f"{int(value // 60)}m{int(value % 60):02}s"
    if value >= 1:
        return f"{value:.3g} s"
    if value >= 1e-3:
        return f"{value * 1e3:.3g} ms"
    return f"{value * 1e6:.0f} us"


def numbers(values: Sequence[int]) -> str:
    """Numbers of instances, runs shortened: `0-3,6`; `-` for none."""
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(str(value) for value in run)
        for run in runs
    ]
    return ",".join(parts) or "-"


# ---- status -----------------------------------------------------------------------------------


def _node(node: Json, queue: Json, totals: Json) -> str:
    ended = ("finished", "cancelled", "failed", "rejected", "preempted")
    counts = ", ".join(f"{totals[name]:,} {name}" for name in ended if totals[name])
    if totals["lost"]:
        counts += f"{', ' if counts else ''}{totals['lost']:,} restarted"
    tensor_parallel = node.get("tensor_parallel_size", 1)
    together = f", tensor parallel {tensor_parallel}" if tensor_parallel > 1 else ""
    waiting = f"{queue['waiting']:,} waiting"
    if queue["waiting_tokens"]:
        waiting += f" ({queue['waiting_tokens']:,} tokens)"
    pairs = [
        ("loongd", f"{node['version']} on {node['name']}, pid {node['pid']}"),
        ("state", f"{node['state']}, up {seconds(node['uptime_s'])}"),
        ("model", f"{node['model']}, up to {node['max_model_len'] or 0:,} tokens a request"),
        ("engine", f"{node['device']}, {node['dtype']}, {node['attention_backend']}{together}"),
        ("policy", node["policy"]),
        ("api", node["api"]),
        ("requests", f"{queue['running']:,} running, {waiting}"),
        ("so far", f"{totals['started']:,} started" + (f": {counts}" if counts else "")),
    ]
    return "\n".join(_cut(f"{name:<9} {text}", WIDTH) for name, text in pairs)


def _instances(instances: Sequence[Json], pool: Json) -> str:
    rows = [f"{'INSTANCE':<9} {'STATE':<9} {'PID':>7} {'DEVICE':<8} {'PHASE':<8} POOL"]
    for one in instances:
        # An instance has no pool and maybe no process before it is ready.
        pid = one["pid"] if one["pid"] is not None else "-"
        head = (
            f"{one['id']!s:<9} {_cut(one['state'], 9):<9} {pid!s:>7} "
            f"{_cut(one['device'] or '-', 8):<8} {_cut(one['phase'] or '-', 8):<8} "
        )
        rows.append(head + _use(one["slots_used"] or 0, one["slots_total"] or 0))
        if one.get("why"):
            rows.append(_cut(f"{'':<9} {one['why']}; all start again", WIDTH))
    reserved = f", {pool['reserved']:,} reserved" if pool["reserved"] else ""
    rows.append(f"{'pool':<9} {pool['free']:,} free{reserved}".ljust(46)[:46])
    rows[-1] += _use(pool["used"], pool["total"])
    return "\n".join(rows)


def _first_wait(queue: Json) -> str:
    """Why the first of the queue waits: a row below that of the pool, or nothing."""
    first = queue.get("first")
    if not first:
        return ""
    text = f"{queue['waiting']:,}; the first {first['text']}"
    head = f"{'waiting':<9} "
    return "\n" + textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * 10)


def _use(used: int, total: int) -> str:
    return f"{bar(used / total if total else 0.0, 10)} {_short(used)}/{_short(total)}"


def _groups(groups: Sequence[Json]) -> str:
    if not groups:
        return "no group is running"
    rows = [
        f"{'GROUP':<14} {'PHASE':<8} {'DOP':>3} {'MASTERS':<14} {'REQUESTS':>8} {'STEP':>9} AGE"
    ]
    for group in groups:
        masters = _cut(numbers(group["masters"]), 14)
        row = (
            f"{_cut(numbers(group['members']), 14):<14} {group['phase'] or '-':<8} "
            f"{group['dop']:>3} {masters:<14} {group['num_requests']:>8} "
            f"{group['step_id'] if group['step_id'] is not None else '-':>9} "
            f"{seconds(group['age_s'] or 0.0)}"
        )
        rows.append(row)
        if group.get("layers"):
            done = " done" if group["phase"] == "paused" else ""
            rows.append(f"{'':<14} {group['num_tokens']:,} tokens, layers {group['layers']}{done}")
    return "\n".join(rows)


def _short(count: int) -> str:
    """A count in at most six columns: `4,096`, `1.05M`."""
    if count < 100_000:
        return f"{count:,}"
    return f"{count / 1e6:.3g}M" if count >= 1e6 else f"{count // 1000}k"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "~"


# ---- story ------------------------------------------------------------------------------------

_BAR = 20
_LEAST_IDLE_S = 0.05


def _idle_s(entry: Json) -> float:
    """Time between an entry's steps or after them, where it is worth a word."""
    idle_s, steps_s = entry.get("idle_s") or 0.0, entry.get("duration_s") or 0.0
    return float(idle_s) if idle_s > max(_LEAST_IDLE_S, 0.2 * steps_s) else 0.0


def _entry_row(entry: Json, total_s: float) -> str:
    end_s = entry["at_s"] + (entry.get("duration_s") or 0.0) + _idle_s(entry)
    masters = numbers(entry["masters"]) if entry.get("masters") else ""
    group = numbers(entry["group"]) if entry.get("group") else ""
    cells = (
        f"{seconds(entry['at_s']):>8}  {span(entry['at_s'], end_s, total_s, _BAR)}  "
        f"{_cut(entry['event'], 9):<9} {_count(entry, 'dop'):>3} {_cut(group, 9):<9} "
        f"{_cut(masters, 8):<8} {_count(entry, 'num_tokens'):>7} {_count(entry, 'num_steps'):>5}"
    )
    return cells.rstrip()


def _sentences(entry: Json, request_id: str) -> list[str]:
    text = (entry.get("text") or "").replace(f" of {request_id} ", " ")
    text = text.removeprefix(f"{request_id} ")
    if entry.get("num_chunks", 1) > 1:
        text = f"{entry['num_chunks']:,} chunks; the first: {text}"
    if entry.get("duration_s"):
        idle = f"; {seconds(_idle_s(entry))} without a step" if _idle_s(entry) else ""
        text += f" [{seconds(entry['duration_s'])}{idle}]"
    if entry.get("kept"):
        kept = ", ".join(f"{count:,} on {one}" for one, count in entry["kept"].items())
        text += f" [tokens kept: {kept}]"
    return textwrap.wrap(text.strip(), WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 10)


def _count(entry: Json, name: str) -> str:
    return f"{entry[name]:,}" if entry.get(name) else ""
