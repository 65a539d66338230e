"""Few rows go to the own products, as many as they are best for, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from loongd.kernels import skinny
from loongd.model.arithmetic import Fast
from loongd.model.weights import Projection

CPU = torch.device("cpu")
MOST = {False: 4, True: 2}
"""Rows for which an own product is best, by whether it is gated."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name and rows of each own product."""
    seen: list[tuple[str, int]] = []

    def spy(name: str) -> Callable[..., Tensor]:
        product: Callable[..., Tensor] = getattr(skinny, name)

        def call(x_TD: Tensor, *rest: Tensor) -> Tensor:
            seen.append((name, len(x_TD)))
            return product(x_TD, *rest)

        return call

    for name in ("linear_of_few", "gated_linear_of_few"):
        monkeypatch.setattr(skinny, name, spy(name))
    monkeypatch.setattr(skinny, "most_rows", lambda weight_OD, *, gated=False: MOST[gated])
    return seen


def projection(*sizes: int, fused: bool = True) -> Projection:
    parts, biases = [torch.randn(n, 24) for n in sizes], [torch.randn(n) for n in sizes]
    if not fused:
        return Projection(tuple(parts), tuple(biases), sizes)
    return Projection((torch.cat(parts),), (torch.cat(biases),), sizes)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 5, 100])
def test_few_rows(calls: list[tuple[str, int]], rows: int, fused: bool) -> None:
    x_TD, gate_up, out = torch.randn(rows, 24), projection(10, 10, fused=fused), projection(7)
    own, plain = Fast(skinny.new_tickets(CPU)), Fast.on(CPU)
    few, few_gated = 0 < rows <= MOST[False], fused and 0 < rows <= MOST[True]
    for got, expected in (
        (own.project(gate_up, x_TD)[1], plain.project(gate_up, x_TD)[1]),
        (own.project_summed(out, x_TD, None), out(x_TD)[0]),
        (own.logits(x_TD, out.weights_OD[0]), plain.logits(x_TD, out.weights_OD[0])),
    ):
        torch.testing.assert_close(got, expected)
    assert calls == [("linear_of_few", rows)] * ((3 if fused else 4) if few else 0)
    calls.clear()
    expected = plain.silu_mul(*gate_up(x_TD))
    torch.testing.assert_close(own.project_gated(gate_up, x_TD), expected)
    if few_gated:
        assert calls == [("gated_linear_of_few", rows)]
    else:
        assert calls == [("linear_of_few", rows)] * ((1 if fused else 2) if few else 0)
