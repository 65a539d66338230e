"""Profiles as files: where they are, which one matches, how one is written.

Knows: directories and names. Does not know: what is in a profile beyond what must match.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from loongd.errors import ConfigError
from loongd.sched.sib_profile import Profile, dump_profile, parse_profile

_log = logging.getLogger(__name__)
_PACKAGE = Path(__file__).resolve().parent.parent


def state_dir(env: Mapping[str, str]) -> Path:
    """Where profiles are written; not made yet."""
    base = env.get("STATE_DIRECTORY", "").split(":")[0]
    if base:
        return Path(base, "profiles")
    return Path(env.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "loongd" / "profiles"


def places(env: Mapping[str, str]) -> list[Path]:
    """Where profiles are looked for, best first: measured here, installed, shipped."""
    shipped = (_PACKAGE / "profiles", _PACKAGE.parent / "etc" / "profiles")
    return [state_dir(env), Path("/etc/loongd/profiles"), *shipped]


def load(path: Path) -> Profile:
    """Read one profile. Raises ConfigError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"profile {path}: cannot be read: {error.strerror or error}") from None
    return parse_profile(data, where=f"profile {path}")


def find(
    directories: Sequence[Path], *, shape: str, device: str, tp: int
) -> tuple[Path, Profile] | None:
    """The newest matching profile of the first directory that has one; broken files are said and
    skipped."""
    for directory in directories:
        matching = []
        for path in sorted(directory.glob("*.json")):
            try:
                profile = load(path)
            except ConfigError as error:
                _log.warning("%s; ignored", error)
                continue
            if (profile.shape, profile.device, profile.tp) == (shape, device, tp):
                matching.append((path, profile))
        if matching:
            return max(matching, key=lambda found: found[1].date)
    return None


def save(directory: Path, profile: Profile) -> Path:
    """Write a profile under a name of its own; replaces an older one of the same model, device
    and tp. Raises ConfigError."""
    words = f"{profile.device}-{profile.model}-{profile.shape}-tp{profile.tp}"
    path = directory / (re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-") + ".json")
    draft = path.with_suffix(".tmp")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        draft.write_text(dump_profile(profile), encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
