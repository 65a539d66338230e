"""Snapshots and stories as JSON-able dictionaries, for `loongctl` and the admin API.

Knows: the names and shapes that operators' tools read. Does not know: how state changes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from loongd.pool import WorkerLost
from loongd.sched.predict import Prediction
from loongd.sched.snapshot import GroupStatus, InstanceStatus, Snapshot
from loongd.sched.story import Story, StoryEntry, Wait
from loongd.wire import Ready

_REFUSING: Mapping[str, str] = MappingProxyType(
    {
        "draining": "draining, new requests are refused until loongctl undrain",
        "profiling": "profiling, new requests are refused while the speed is measured",
        "failed": "failed, the workers could not be kept alive",
    }
)
"""Why nothing is served now, by state of the node."""


def engine_status(
    snapshot: Snapshot,
    ready: Mapping[int, Ready],
    pids: Mapping[int, Sequence[int]],
    lost: WorkerLost | None = None,
) -> dict[str, Any]:
    """Instances, groups, pool, queue and totals of a snapshot; `lost` is why instances restart."""
    pool, totals = snapshot.pool, snapshot.totals
    finished = dict(totals.num_finished)
    return {
        "instances": [
            _instance(i, ready.get(i.instance), pids.get(i.instance, ()), lost)
            for i in snapshot.instances
        ],
        "groups": [_group(group) for group in snapshot.groups],
        "pool": {
            "total": pool.total,
            "used": pool.used,
            "free": pool.free,
            "reserved": pool.reserved,
        },
        "queue": {
            "waiting": snapshot.num_waiting,
            "running": snapshot.num_running,
            "waiting_tokens": snapshot.num_waiting_tokens,
            "first": None if snapshot.first_wait is None else _wait(snapshot.first_wait),
        },
        "totals": {
            "started": totals.num_arrived,
            "finished": sum(n for reason, n in finished.items() if reason != "cancelled"),
            "cancelled": finished.get("cancelled", 0),
            "failed": sum(totals.num_failed.values()),
            "failed_by_code": dict(totals.num_failed),
            "preempted": totals.num_preemptions,
            "lost": totals.num_lost,
            "prefill_steps": totals.num_prefill_steps,
            "decode_steps": totals.num_decode_steps,
            "queued_ahead": totals.num_queued_ahead,
            "prefill_tokens": totals.num_prefill_tokens,
            "generated_tokens": totals.num_generated_tokens,
            "scale_downs": totals.num_scale_downs,
            "scale_ups": totals.num_scale_ups,
            "migrations": totals.num_migrations,
            "migrated_tokens": totals.num_migrated_tokens,
        },
    }


def node_status(
    facts: Mapping[str, Any], began_s: float, ready: Mapping[int, Ready]
) -> dict[str, Any]:
    """The node's own part; `began_s` is the monotonic time of its start."""
    backends = [instance.attention_backend for instance in ready.values()]
    return {
        **facts,
        "uptime_s": round(time.monotonic() - began_s, 3),
        "attention_backend": backends[0] if backends else "starting",
    }


def _instance(
    status: InstanceStatus, ready: Ready | None, pids: Sequence[int], lost: WorkerLost | None
) -> dict[str, Any]:
    """Where one was lost, all start again: the others are `starting`."""
    is_lost = not status.alive and (lost is None or lost.instance == status.instance)
    return {
        "id": status.instance,
        "state": "ready" if status.alive else "lost" if is_lost else "starting",
        "why": lost.message if is_lost and lost is not None else None,
        "pid": pids[0] if pids else None,
        "pids": list(pids),
        "device": None if ready is None else ready.device_name,
        "attention_backend": None if ready is None else ready.attention_backend,
        "slots_total": status.total,
        "slots_used": status.used,
        "slots_free": status.free,
        "phase": status.doing if status.alive else None,
        "step_id": status.step_id,
    }


def _group(group: GroupStatus) -> dict[str, Any]:
    return {
        "members": list(group.members),
        "dop": group.dop,
        "phase": group.kind,
        "num_requests": group.num_requests,
        "num_tokens": group.num_tokens,
        "masters": list(group.masters),
        "step_id": group.step_id,
        "layers": group.layers,
        "age_s": round(time.monotonic() - group.started_s, 4),
    }


def _wait(wait: Wait) -> dict[str, Any]:
    """Why a request waits, and the numbers of it."""
    return {
        "request_id": wait.request_id,
        "for": wait.kind,
        "text": wait.describe(),
        "ahead": wait.num_ahead,
        "needed_slots": wait.needed_slots,
        "prompt_tokens": wait.prompt_tokens,
        "answer_tokens": wait.answer_tokens,
        "spare_slots": wait.spare_slots,
        "total_slots": wait.total_slots,
    }


def plan_json(
    found: Prediction,
    prompt_tokens: int,
    max_tokens: int,
    *,
    limit_tokens: int,
    state: str = "ready",
) -> dict[str, Any]:
    """What would become of a prompt; times in seconds. A dop of 0 means that it is not served.

    `rough` says that the times rest on no measurement of these workers, or on answers that may
    end earlier: then `at_most` says that these are upper bounds. `state` is the node's.
    """
    total = prompt_tokens + max_tokens
    why = _REFUSING.get(state, "")
    if not why and total > limit_tokens:
        why = f"{total:,} tokens are more than the {limit_tokens:,} that a request may have here"
    if why:
        found = Prediction(0, (), 0.0, 0.0, why)
    return {
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "dop": found.dop,
        "members": list(found.members),
        "queue_s": found.queue_s,
        "prefill_s": found.prefill_s,
        "ttft_s": found.queue_s + found.prefill_s,
        "reason": found.reason,
        "rough": found.rough,
        "at_most": found.at_most,
    }


def story_json(request_id: str, story: Story, now: float) -> dict[str, Any]:
    """A request's life; times in seconds since it arrived. It has lasted for `elapsed_s`: until
    `now` when it is live. Of an entry's steps `idle_s` is the time up to the next entry in which
    none of them ran."""
    entries = story.entries
    began_s = entries[0].at_s
    last = entries[-1]
    has_ended = last.event in ("finished", "cancelled", "failed")
    waiting = None
    if story.wait is not None:
        since_s = story.wait.since_s
        times = {"at_s": round(since_s - began_s, 4), "duration_s": round(now - since_s, 4)}
        waiting = times | _wait(story.wait)
    return {
        "request_id": request_id,
        "state": last.event if has_ended else "live",
        "elapsed_s": round((last.at_s if has_ended else now) - began_s, 4),
        "waiting": waiting,
        "prompt_tokens": story.prompt_tokens,
        "generated_tokens": story.generated_tokens,
        "entries": [
            {
                "at_s": round(entry.at_s - began_s, 4),
                "event": entry.event,
                "text": entry.text,
                "group": list(entry.group) or None,
                "dop": entry.dop or None,
                "masters": list(entry.masters),
                "kept": {str(instance): kept for instance, kept in entry.kept.items()},
                "num_steps": entry.num_steps,
                "num_chunks": entry.num_chunks,
                "num_tokens": entry.num_tokens,
                "duration_s": round(entry.duration_s, 4),
                "idle_s": round(idle_s, 4),
            }
            for entry, idle_s in zip(entries, _idle_s(entries), strict=True)
        ],
    }


def _idle_s(entries: Sequence[StoryEntry]) -> list[float]:
    """Of each entry; a step of the last one may run now."""
    found = [
        max(0.0, after.at_s - one.at_s - one.duration_s) if one.num_steps else 0.0
        for one, after in pairwise(entries)
    ]
    return [*found, 0.0]
