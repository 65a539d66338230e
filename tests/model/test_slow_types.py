"""Half-precision products on CPUs that have none: in float32, rounded once."""

from __future__ import annotations

import pytest
import torch

from loongd.model.arithmetic import Fast
from loongd.model.weights import Projection

HALF = [torch.bfloat16, torch.float16]


def _projection(dtype: torch.dtype, *, bias: bool) -> Projection:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    bias_O = torch.randn(40, generator=generator).to(dtype) if bias else None
    return Projection((weight,), (bias_O,), (40,))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 3, 50])
def test_wide_products_are_rounded_once(dtype: torch.dtype, bias: bool, num_rows: int) -> None:
    projection = _projection(dtype, bias=bias)
    x_TD = torch.randn(num_rows, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    (out,) = Fast(slow_types=frozenset({dtype})).project(projection, x_TD)
    (weight,), (bias_O,) = projection.weights_OD, projection.biases_O
    exact = x_TD.double() @ weight.double().T + (0 if bias_O is None else bias_O.double())
    assert out.dtype == dtype
    if num_rows >= 3:
        ulp = torch.finfo(dtype).eps
        torch.testing.assert_close(out.double(), exact, rtol=ulp, atol=1e-6)
    else:
        torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_float32_is_left_alone() -> None:
    x_TD, weight = torch.randn(7, 24), torch.randn(40, 24)
    (out,) = Fast(slow_types=frozenset(HALF)).project(Projection((weight,), (None,), (40,)), x_TD)
    assert torch.equal(out, torch.nn.functional.linear(x_TD, weight))


def test_the_cpu_itself() -> None:
    """Whatever this CPU can do, its products are right."""
    here = Fast.on(torch.device("cpu"))
    x_TD = torch.randn(5, 24).to(torch.bfloat16)
    (out,) = here.project(_projection(torch.bfloat16, bias=False), x_TD)
    weight = _projection(torch.bfloat16, bias=False).weights_OD[0]
    torch.testing.assert_close(out.float(), x_TD.float() @ weight.float().T, rtol=2e-2, atol=2e-2)
