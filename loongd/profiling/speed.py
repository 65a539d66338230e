"""The SIB of a daemon: which profile it predicts from, and what a new one would be of.

Knows: that the device's name is known only once workers are up, and that a roofline serves until
then and wherever no profile matches. Does not know: the scheduler that asks the SIB.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from loongd.config import Config
from loongd.profiling import store
from loongd.profiling.facts import device_key, device_words
from loongd.profiling.made import Subject
from loongd.sched.sib import Sib
from loongd.sched.sib_default import ModelFacts, default_profile
from loongd.sched.sib_profile import Profile

_log = logging.getLogger(__name__)


class Speed:
    """Owns the SIB."""

    def __init__(
        self, config: Config, facts: ModelFacts, *, device: str, num_instances: int, dtype: str
    ) -> None:
        """`device` is cpu or cuda. Raises ConfigError when `config.profile` cannot be read."""
        self._config = config
        self._facts = facts
        self._dtype = dtype
        self._num_instances = num_instances
        self._num_cores = len(os.sched_getaffinity(0))
        self._device = device
        self._attention = ""
        self._asked = None if config.profile is None else store.load(Path(config.profile))
        self.sib = Sib(self._asked or self._roofline(device))

    def use_best(self, device_name: str, attention: str) -> None:
        """Take the best profile for the workers' device: the configured one, else one that
        matches, else the roofline. `attention` is their backend's name."""
        self._device = self._key(device_name)
        self._attention = attention
        shape, tp = self._facts.key, self._config.tensor_parallel_size
        if self._asked is not None:
            named = (self._asked.shape, self._asked.device, self._asked.tp)
            if named != (shape, self._device, tp):
                _log.warning(
                    "profile %s is of shape %s on %s with tp %d; this is %s on %s with tp %d",
                    *(self._config.profile, *named, shape, self._device, tp),
                )
            self._check(self._asked)
            return
        found = store.find(store.places(os.environ), shape=shape, device=self._device, tp=tp)
        if found is None:
            where = device_words(self._device)
            _log.info("no profile of this model on %s: run loongctl profile", where)
            self.sib.replace(self._roofline(self._device))
        else:
            path, profile = found
            _log.info("profile %s of %s", path, profile.date)
            self._check(profile)
            self.sib.replace(profile)

    def subject(self, max_tokens: int) -> Subject:
        """What a new profile is of; `max_tokens` is the most that a request may have."""
        return Subject(
            facts=self._facts,
            device=self._device,
            dtype=self._dtype,
            tp=self._config.tensor_parallel_size,
            max_tokens=max_tokens,
            attention=self._attention,
        )

    def _check(self, profile: Profile) -> None:
        if profile.doubt:
            _log.warning("this profile is %s: run loongctl profile", profile.doubt)
        attention = profile.versions.get("attention", self._attention)
        if attention != self._attention:
            _log.warning(
                "this profile was measured with attention by %s, not %s: run loongctl profile",
                *(attention, self._attention),
            )

    def _key(self, device_name: str) -> str:
        workers = self._num_instances * self._config.tensor_parallel_size
        return device_key(device_name, num_cores=self._num_cores, num_workers=workers)

    def _roofline(self, device: str) -> Profile:
        workers = self._num_instances * self._config.tensor_parallel_size
        return default_profile(
            self._facts,
            device,
            max_dop=self._num_instances,
            tp=self._config.tensor_parallel_size,
            num_cores=max(1, self._num_cores // workers),
        )
