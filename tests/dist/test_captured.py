"""How many graphs a worker keeps."""

from __future__ import annotations

import torch

from loongd.worker.captured import Recent


def test_what_was_asked_for_last_is_kept() -> None:
    made: list[str] = []

    def make(shape: str) -> str:
        made.append(shape)
        return shape.upper()

    kept: Recent[str, str] = Recent(torch.device("cpu"), most=2)
    assert [kept.of(shape, make) for shape in ("a", "b", "a", "b")] == ["A", "B", "A", "B"]
    assert made == ["a", "b"]
    kept.of("a", make)
    assert kept.of("c", make) == "C", "b goes, which nobody has asked for longest"
    assert [kept.of(shape, make) for shape in ("a", "c")] == ["A", "C"]
    assert made == ["a", "b", "c"]
    kept.of("b", make)
    assert made == ["a", "b", "c", "b"]
