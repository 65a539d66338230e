"""Which devices launch a kernel while the one ahead of it ends."""

from __future__ import annotations

import pytest
import torch

from loongd.kernels.gpu import early as launching

early = launching.early.__wrapped__  # type: ignore[attr-defined]


@pytest.mark.parametrize(("capability", "launched"), [((8, 0), False), ((9, 0), True)])
def test_from_hopper_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], launched: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    options = early(torch.device("cuda"))
    assert options["EARLY"] is options.get("launch_pdl", False) is launched


def test_never_on_a_cpu() -> None:
    assert early(torch.device("cpu")) == {"EARLY": False}
