"""Which profile a daemon predicts from, and what it says of it."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from profile_kit import FACTS

from loongd.config import Config
from loongd.profiling import store
from loongd.profiling.speed import Speed
from loongd.sched.sib_default import default_profile

DEVICE = "NVIDIA H200"


def _speed(profile: Path | None = None) -> Speed:
    config = Config(profile=None if profile is None else str(profile))
    return Speed(config, FACTS, device="cuda", num_instances=1, dtype="bfloat16")


def _write(directory: Path, versions: dict[str, str]) -> Path:
    profile = default_profile(FACTS, DEVICE, max_dop=1, tp=1, num_cores=1)
    measured = msgspec.structs.replace(profile, measured=True, versions=versions)
    return store.save(directory / "profiles", measured)


@pytest.mark.parametrize("is_asked_for", [False, True])
@pytest.mark.parametrize("attention", ["", "triton+cudnn", "triton+flash-attn-3"])
def test_a_profile_of_another_attention_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    attention: str,
    is_asked_for: bool,
) -> None:
    """... and used all the same. Those that do not say are trusted."""
    monkeypatch.setenv("STATE_DIRECTORY", str(tmp_path))
    path = _write(tmp_path, {"attention": attention} if attention else {})
    speed = _speed(path if is_asked_for else None)
    with caplog.at_level(logging.WARNING):
        speed.use_best(DEVICE, "triton+flash-attn-3")
    assert speed.sib.profile.measured
    words = (
        "this profile was measured with attention by triton+cudnn, not triton+flash-attn-3: "
        "run loongctl profile"
    )
    assert (words in caplog.text) == (attention == "triton+cudnn")
    assert speed.subject(1000).attention == "triton+flash-attn-3"


def test_the_shipped_profiles_of_hopper_say_their_attention() -> None:
    shipped = Path(store.__file__).parents[2] / "etc" / "profiles"
    found = [store.load(path) for path in sorted(shipped.glob("h200-*.json"))]
    assert [profile.versions["attention"] for profile in found] == ["triton+cudnn"] * 2
