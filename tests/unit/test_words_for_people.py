"""Lines that people read: the daemon's `ready`, the head of a profile, a pool that is too large."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from profile_kit import FACTS

from loongd import ctl_speed
from loongd.config import Config
from loongd.daemon import Daemon
from loongd.errors import WorkerError
from loongd.profiling.facts import device_key
from loongd.sched.sib_default import default_profile
from loongd.worker import memory


@pytest.mark.parametrize(("count", "words"), [(1, "1 cpu instance,"), (2, "2 cpu instances,")])
def test_the_ready_line(count: int, words: str, caplog: pytest.LogCaptureFixture) -> None:
    daemon: Any = SimpleNamespace(_config=Config(), _num_instances=count, _device="cpu")
    status = {"node": {"model": "m"}, "pool": {"total": 1000}}
    manager: Any = SimpleNamespace(status=lambda: status, max_model_len=500)
    caplog.set_level(logging.INFO)
    Daemon._say_ready(daemon, manager)
    assert caplog.messages == [f"ready: m on {words} 1,000 KV slots, requests up to 500 tokens"]


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
@pytest.mark.parametrize(("cores", "words"), [(2, "1 core a worker"), (24, "12 cores a worker")])
def test_the_head_of_a_profile(cores: int, words: str, dtype: str) -> None:
    """No part of it is cut off, and the device's key itself is left alone."""
    key = device_key("cpu", num_cores=cores, num_workers=2)
    assert key.endswith(f", {cores // 2} cores a worker")
    key = f"cpu A Processor With Quite A Long Name @ 2.00GHz,{key.rpartition(',')[2]}"
    made = default_profile(FACTS, key, max_dop=1, tp=1, num_cores=1)
    one = msgspec.to_builtins(msgspec.structs.replace(made, dtype=dtype))
    head = ctl_speed.profile({"profile": one}).partition("\n\n")[0]
    assert " ".join(head.split()).endswith(f"GHz, {words}, tp 1{', ' * bool(dtype)}{dtype}")
    assert max(map(len, head.splitlines())) <= 80
    assert one["device"] == key


def test_a_pool_that_is_too_large_is_told_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise RuntimeError("not enough memory")

    monkeypatch.setattr(memory, "KvCache", refuse)
    monkeypatch.setattr(memory, "_available_bytes", lambda: 10_000_000)
    spec: Any = SimpleNamespace(num_layers=2, num_kv_heads=4, head_dim=64)
    token_bytes = 2 * 2 * 4 * 64 * 2
    with pytest.raises(WorkerError) as caught:
        memory.make_pool(spec, 1 << 20, torch.bfloat16, torch.device("cpu"))
    words = f"lower kv_pool_tokens (at most {10_000_000 // token_bytes:,} fit)"
    assert str(caught.value) == (
        f"a KV pool of 1,048,576 tokens needs 2.0 GiB, which cpu cannot give; {words}"
    )
