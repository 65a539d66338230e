"""Rows that one stream writes and another waits for."""

from __future__ import annotations

import pytest
import torch

from loongd.kernels import reference
from loongd.kernels.gpu import signal


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_a_push_is_seen_whole(device: torch.device, num_rows: int) -> None:
    rows = torch.arange(num_rows * 6 * 80, dtype=torch.float32, device=device).view(num_rows, 6, 80)
    target = torch.full((64, 6, 80), torch.nan, device=device)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for _ in range(3):  # a flag that has been seen serves again
        signal.push_rows(rows, target, flag)
        assert int(flag) == signal.push_counts(rows.numel())
        signal.await_flag(flag, signal.push_counts(rows.numel()))
        assert int(flag) == 0
    assert torch.equal(target[:num_rows], rows)
    assert bool(target[num_rows:].isnan().all())


def test_flags_add_up(device: torch.device) -> None:
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    signal.raise_flag(flag)
    signal.raise_flag(flag, 2)
    signal.await_flag(flag, 3)
    assert int(flag) == 0


def test_the_twin_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_FLAG_TIMEOUT_S", 0.01)
    with pytest.raises(TimeoutError, match="flag 0, 1 expected"):
        reference.await_flag(torch.zeros(1, dtype=torch.int32))


@pytest.mark.gpu
def test_one_stream_waits_for_another(device: torch.device) -> None:
    """The reader is queued first; what it reads is what the writer wrote later."""
    rows = torch.randn(64, 32, 128, device=device)
    target, seen = torch.zeros_like(rows), torch.zeros_like(rows)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    signal.push_rows(rows, torch.empty_like(rows), torch.zeros_like(flag))
    signal.await_flag(torch.zeros_like(flag), 0)
    torch.cuda.synchronize()
    reader, writer = torch.cuda.Stream(), torch.cuda.Stream()
    for round_ in range(50):
        with torch.cuda.stream(reader):
            signal.await_flag(flag, signal.push_counts(rows.numel()))
            seen.copy_(target)
        with torch.cuda.stream(writer):
            signal.push_rows(rows, target, flag)
        torch.cuda.synchronize()
        assert torch.equal(seen, rows), round_
        rows += 1
