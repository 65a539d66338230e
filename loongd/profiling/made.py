"""A profile as a whole: what it is of, and what it says of itself.

Knows: the facts that stand in a profile beside its fits. Does not know: how anything is measured.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from statistics import median
from typing import Any

import msgspec

from loongd.profiling.facts import versions
from loongd.profiling.links import Links
from loongd.sched.sib_default import ModelFacts, hardware_of
from loongd.sched.sib_fit import compute_bound_batch
from loongd.sched.sib_profile import DecodeFit, MigrateFit, PrefillFit, Profile


@dataclass(frozen=True, slots=True)
class Subject:
    """What is profiled: the model, the device as profiles name it, the limits of requests, and the
    backend of attention."""

    facts: ModelFacts
    device: str
    dtype: str
    tp: int
    max_tokens: int
    attention: str = ""


def migrate_facts(profile: Profile) -> dict[str, Any]:
    """What a check says of moving KV: it is shown, not measured again."""
    fit = profile.migrate
    return {
        "alpha_s": fit.alpha_s,
        "token_s": fit.token_s,
        "bytes_per_s": profile.link_bytes_per_s,
        "num_links": len(fit.links),
        "compute_bound_batch": profile.compute_bound_batch,
        "max_batch": max(fit.max_batch for fit in profile.decode),
    }


def make_profile(
    subject: Subject,
    prefill: list[PrefillFit],
    decode: list[DecodeFit],
    links: Links,
    *,
    quick: bool,
    noise: float,
) -> Profile:
    """The fits as a profile that says of itself what it is of."""
    facts = subject.facts
    hardware = hardware_of(subject.device)
    alone = next(fit for fit in decode if fit.dop == 1)
    source = f"measured on these workers ({'quick' if quick else 'full'})"
    if links.points:
        migrate = links.fit(facts.kv_bytes_per_token)
        bytes_per_s = median(link.bytes_per_s for link in migrate.links)
    else:
        source += "; migration and link bandwidth derived from constants of the device"
        bytes_per_s = hardware.link_bytes
        migrate = MigrateFit(
            alpha_s=hardware.exchange_s * facts.num_layers,
            token_s=facts.kv_bytes_per_token / bytes_per_s,
        )
    profile = Profile(
        model=facts.name,
        shape=facts.key,
        device=subject.device,
        tp=subject.tp,
        dtype=subject.dtype,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        source=source,
        measured=True,
        prefill=prefill,
        decode=decode,
        migrate=migrate,
        compute_bound_batch=compute_bound_batch(alone),
        kv_bytes_per_token=facts.kv_bytes_per_token,
        link_bytes_per_s=bytes_per_s,
        versions=versions() | ({"attention": subject.attention} if subject.attention else {}),
        noise=round(noise, 4),
    )
    if profile.doubt:
        profile = msgspec.structs.replace(profile, source=f"{source}; {profile.doubt}")
    return profile
