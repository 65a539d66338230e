"""Runs a profile or a check on the live workers, and keeps what it finds.

Knows: what may be asked for, and that a new profile is used at once. Does not know: HTTP, how the
workers are lent (an `Owner` does), or what is measured (`profiling.session`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from loongd.errors import WorkerError
from loongd.exclusive import Exclusive
from loongd.profiling import grid, store
from loongd.profiling.bench import Bench
from loongd.profiling.made import Subject
from loongd.profiling.session import Session
from loongd.sched.sib import Sib
from loongd.sched.sib_profile import Profile

_log = logging.getLogger(__name__)
CHECK_SEED = 20240412


class ProfileRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `loongctl profile` asks for.

    Args:
        quick: fewer repetitions and shorter steps.
        check: compare the profile in force with fresh measurements; writes nothing.
        save: keep the new profile in the state directory.
        seed: selects the batches of a check.
    """

    quick: bool = False
    check: bool = False
    save: bool = True
    seed: int = CHECK_SEED


class Owner(Protocol):
    """Who lends the workers."""

    def exclusive(self) -> AbstractContextManager[Exclusive]:
        """The workers, while nobody is served. Raises RequestError when they are busy."""


class Profiler:
    """One profile or check at a time; who gets the workers from the owner has the turn."""

    def __init__(self, owner: Owner, sib: Sib, subject: Callable[[], Subject]) -> None:
        """A new profile goes into `sib` at once. `subject` is asked once the workers are up."""
        self._owner = owner
        self._sib = sib
        self._subject = subject

    async def run(self, request: ProfileRequest) -> AsyncGenerator[dict[str, Any], None]:
        """Yields `{"stage", "fraction"}` again and again, in the end `{"profile", "path",
        "doubt", "points"}` or `{"check"}`.

        Raises RequestError when busy, WorkerError when a worker fails.
        """
        subject = self._subject()
        with self._owner.exclusive() as exclusive:
            _log.info("%s: nobody is served meanwhile", "check" if request.check else "profile")
            bench = Bench(
                exclusive, vocab_size=subject.facts.vocab_size, max_tokens=subject.max_tokens
            )
            effort = grid.QUICK if request.quick else grid.FULL
            if subject.device.startswith("cpu"):
                effort = effort.on_cpu()
            session = Session(bench, effort, request.seed)
            try:
                work = (
                    session.check(self._sib.profile)
                    if request.check
                    else session.profile(subject, quick=request.quick)
                )
                async for word in work:
                    if "made" in word:
                        kept = self._keep(word["made"], save=request.save)
                        yield kept | {"points": word["points"]}
                    else:
                        yield word
            finally:
                bench.clear()
            used = await exclusive.num_used()
            if used:
                raise WorkerError(f"{used} KV slots are still used after profiling")

    def _keep(self, profile: Profile, *, save: bool) -> dict[str, Any]:
        self._sib.replace(profile)
        path = store.save(store.state_dir(os.environ), profile) if save else None
        _log.info("profiled: %s", path or "not saved")
        if profile.doubt:
            _log.warning("this profile is %s; profile again when nothing else runs", profile.doubt)
        return {
            "profile": msgspec.to_builtins(profile),
            "path": None if path is None else str(path),
            "doubt": profile.doubt,
        }
