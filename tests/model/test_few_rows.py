"""Few rows go to the own products, as many as they are best for, and nothing else does.

Norms between such products are theirs too: the forward pass then equals transformers', in Triton's
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from loongd.kernels import skinny
from loongd.kernels.gpu import skinny as gpu
from loongd.model.arithmetic import Fast, Joint
from loongd.model.llama import Llama
from loongd.model.weights import Projection, load_weights

CPU = torch.device("cpu")
MOST = {False: 4, True: 2}
"""Rows for which an own product is best, by whether it is gated."""
MOST_ADDED = 3
"""Rows for which a product that is added to the residual stream is best."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name and rows of each own product."""
    seen: list[tuple[str, int]] = []

    def spy(name: str) -> Callable[..., Any]:
        product: Callable[..., Any] = getattr(skinny, name)

        def call(x_TD: Tensor, *rest: Any, **options: Any) -> Any:
            seen.append((name, len(x_TD)))
            return product(x_TD, *rest, **options)

        return call

    for name in ("linear_of_few", "gated_linear_of_few", "add_linear_of_few"):
        monkeypatch.setattr(skinny, name, spy(name))
    monkeypatch.setattr(skinny, "most_rows", lambda weight_OD, *, gated=False: MOST[gated])
    monkeypatch.setattr(skinny, "most_rows_added", lambda weight_OD: MOST_ADDED)
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


class TwoRanks:
    """Two workers that compute the same."""

    def all_reduce(self, x_TD: Tensor) -> None:
        x_TD.mul_(2)

    def all_gather(self, x_BV: Tensor) -> Tensor:
        return torch.cat([x_BV, x_BV], dim=1)


@pytest.mark.parametrize("ranks", [None, TwoRanks()], ids=["alone", "ranks"])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5])
def test_norm_between_products(
    calls: list[tuple[str, int]], rows: int, fused: bool, ranks: TwoRanks | None
) -> None:
    """It is the products' where both are own and nothing comes between."""
    x_TD, before_TD, norm_D = torch.randn(rows, 24), torch.randn(rows, 24), torch.randn(24)
    added, following = projection(24), projection(10, 10, fused=fused)
    joint, own = Joint(added, norm_D, 0.1, following), Fast(skinny.new_tickets(CPU))
    times = 1 if ranks is None else 2
    stream_TD = before_TD + times * added(x_TD)[0]
    normed_TD = torch.nn.functional.rms_norm(stream_TD, (24,), norm_D, 0.1)
    fusing_last = ranks is None and rows > 0
    fusing = fused and fusing_last

    residual_TD = before_TD.clone()
    own.add(added, x_TD, residual_TD, norm_D, ranks)
    torch.testing.assert_close(residual_TD, stream_TD)
    assert (("add_linear_of_few", rows) in calls) == (fusing_last and rows <= MOST_ADDED)

    calls.clear()
    residual_TD = before_TD.clone()
    got = own.add_and_project(joint, x_TD, residual_TD, ranks)
    torch.testing.assert_close(got, following(normed_TD))
    torch.testing.assert_close(residual_TD, stream_TD)
    assert (("add_linear_of_few", rows) in calls) == (fusing and rows <= MOST_ADDED)

    calls.clear()
    residual_TD = before_TD.clone()
    got_TF = own.add_and_project_gated(joint, x_TD, residual_TD, ranks)
    torch.testing.assert_close(got_TF, own.silu_mul(*following(normed_TD)))
    torch.testing.assert_close(residual_TD, stream_TD)
    assert (("add_linear_of_few", rows) in calls) == (fusing and rows <= MOST[True])


def whole(parts: Projection) -> Projection:
    """As one matrix, which they are on a GPU."""
    biases_O = [bias_O for bias_O in parts.biases_O if bias_O is not None]
    bias_O = torch.cat(biases_O) if biases_O else None
    return Projection((torch.cat(parts.weights_OD),), (bias_O,), parts.sizes)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {})],
    ids=["llama", "biases", "qwen3"],
)
def test_logits_with_norms_in_the_products_equal_transformers(
    kind, options, save_model, load, dense_attention, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_dir, reference = save_model(kind, **options)
    spec, plain = load(model_dir)
    weights = load_weights(
        model_dir,
        spec,
        load_format="auto",
        dtype=torch.float32,
        device=CPU,
        seed=0,
        progress=lambda stage, fraction: None,
    )
    layers = [
        replace(layer, qkv=whole(layer.qkv), gate_up=whole(layer.gate_up))
        for layer in weights.layers
    ]
    monkeypatch.setattr(skinny, "pick", lambda module, device: gpu)
    monkeypatch.setattr(gpu, "most_rows", lambda weight_OD, *, gated=False: 64)
    monkeypatch.setattr(gpu, "most_rows_added", lambda weight_OD: 32)
    monkeypatch.setattr(Fast, "add_rms_norm", None)  # the products' now
    own = Llama(
        spec,
        replace(weights, layers=layers),
        CPU,
        torch.float32,
        arithmetic=Fast(skinny.new_tickets(CPU)),
    )
    tokens_T = torch.randint(0, 97, (11,), generator=torch.Generator().manual_seed(1))
    positions_T = torch.arange(len(tokens_T))
    lengths_T = torch.full_like(positions_T, len(tokens_T))
    hidden_TD = own.forward(tokens_T, positions_T, lengths_T, dense_attention(spec))
    with torch.inference_mode():
        expected_TV = reference(tokens_T[None]).logits[0]
    torch.testing.assert_close(own.logits(hidden_TD), expected_TV, atol=1e-4, rtol=1e-4)
    monkeypatch.undo()
    plain_TD = plain.forward(tokens_T, positions_T, lengths_T, dense_attention(spec))
    torch.testing.assert_close(hidden_TD, plain_TD, atol=1e-4, rtol=1e-4)
