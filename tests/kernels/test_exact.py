"""Exact sums: bits do not depend on order, batch or partition, and values are those of float64."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from loongd.kernels import exact
from loongd.kernels.attention import PoolSlots, Spans
from loongd.kernels.exact_attention import ExactBackend, ExactPartials
from loongd.kernels.partials import Partials
from loongd.model.arithmetic import Exact

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = [
    torch.device("cpu"),
    pytest.param(torch.device("cuda"), marks=pytest.mark.gpu),
]
on_devices = pytest.mark.parametrize("device", DEVICES, ids=str)
of_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SCALE = 0.25
TINY = {torch.float32: 2.0**-38, torch.bfloat16: 2.0**-18, torch.float16: 2.0**-18}
"""Error allowed of a sum relative to the sum of its largest possible terms."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(11)


def uneven(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers with factors between 2^-8 and 2^8, so that sums cancel and orders matter."""
    factors = torch.randint(-8, 9, shape, device=device).double().exp2()
    return (torch.randn(shape, dtype=torch.float64, device=device) * factors).to(dtype)


# ---- products ---------------------------------------------------------------------------------


@of_dtypes
@on_devices
def test_a_product_does_not_depend_on_order_or_batch(
    dtype: torch.dtype, device: torch.device
) -> None:
    x_TK = uneven(44, 700, dtype=dtype, device=device)
    w_OK = uneven(300, 700, dtype=dtype, device=device)
    y_TO = exact.linear(x_TK, w_OK)
    order = torch.randperm(700, device=device)
    assert torch.equal(exact.linear(x_TK[:, order], w_OK[:, order]), y_TO)
    for rows in (slice(0, 1), slice(7, 8), slice(3, 40)):
        assert torch.equal(exact.linear(x_TK[rows], w_OK), y_TO[rows])
    assert torch.equal(exact.linear(x_TK, w_OK[17:19]), y_TO[:, 17:19])


def test_plain_float64_does_depend_on_order() -> None:
    """The control for the test above."""
    x_TK = uneven(44, 700, dtype=torch.float32, device=torch.device("cpu")).double()
    order = torch.randperm(700)
    assert not torch.equal(x_TK @ x_TK.T, x_TK[:, order] @ x_TK[:, order].T)


@of_dtypes
@on_devices
def test_a_product_is_that_of_float64(dtype: torch.dtype, device: torch.device) -> None:
    x_TK = uneven(9, 4096, dtype=dtype, device=device)
    w_OK = uneven(40, 4096, dtype=dtype, device=device)
    bias_O = torch.randn(40, device=device).to(dtype)
    expected = x_TK.double() @ w_OK.double().T + bias_O.double()
    bound = 4096 * x_TK.double().abs().amax(1)[:, None] * w_OK.double().abs().amax(1)
    error = (exact.linear(x_TK, w_OK, bias_O) - expected).abs()
    assert bool((error <= TINY[dtype] * bound).all())


@on_devices
def test_rows_that_are_not_finite_harm_no_other(device: torch.device) -> None:
    x_TK = torch.randn(5, 64, device=device)
    w_OK = torch.randn(6, 64, device=device)
    good = exact.linear(x_TK, w_OK)
    x_TK[1, 3], x_TK[3, 0] = torch.nan, -torch.inf
    found = exact.linear(x_TK, w_OK)
    assert bool(found[[1, 3]].isnan().all())
    assert torch.equal(found[[0, 2, 4]], good[[0, 2, 4]])
    x_TK[:] = 0
    assert bool((exact.linear(x_TK, w_OK) == 0).all())
    assert exact.linear(x_TK[:0], w_OK).shape == (0, 6)


# ---- other operations -------------------------------------------------------------------------


@of_dtypes
@on_devices
def test_rows_of_the_other_operations_depend_on_nothing_beside_them(
    dtype: torch.dtype, device: torch.device
) -> None:
    math = Exact()
    x_TD = uneven(37, 193, dtype=dtype, device=device)
    other_TD = uneven(37, 193, dtype=dtype, device=device)
    weight_D = torch.randn(193, device=device).to(dtype)
    normed, gated = math.rms_norm(x_TD, weight_D, 1e-5), math.silu_mul(x_TD, other_TD)
    for row in range(37):
        one = slice(row, row + 1)
        assert torch.equal(math.rms_norm(x_TD[one], weight_D, 1e-5), normed[one])
        assert torch.equal(math.silu_mul(x_TD[one], other_TD[one]), gated[one])
    wide = x_TD.double()
    close = {"rtol": 2.0 * torch.finfo(dtype).eps, "atol": 1e-6}
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight_D.double()
    torch.testing.assert_close(normed, expected.to(dtype), **close)
    expected = wide * wide.sigmoid() * other_TD.double()
    torch.testing.assert_close(gated, expected.to(dtype), **close)


@on_devices
def test_cosines_and_sines(device: torch.device) -> None:
    """Right from small angles to those of a millionth token, and equal wherever they stand."""
    scales = torch.logspace(-6, 6, 1003, dtype=torch.float64)
    angles = (torch.rand(1003) * 2 - 1) * scales
    found = exact.cos_sin(angles.to(device))
    for whole, expected in zip(found, (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(whole.cpu(), expected, rtol=0, atol=2.0**-45)
    for first in range(30):
        part = angles[first : 2 * first + 500].to(device)
        for whole, alone in zip(found, exact.cos_sin(part), strict=True):
            assert torch.equal(alone, whole[first : 2 * first + 500])


@pytest.mark.gpu
@of_dtypes
def test_a_gpu_gives_the_bits_of_a_cpu(dtype: torch.dtype) -> None:
    """Nothing but operations that IEEE 754 defines: products, attention and all the rest."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    x_TD, y_TD = (uneven(40, 512, dtype=dtype, device=cpu) for _ in range(2))
    weight_D = torch.randn(512).to(dtype)
    q, k, v, partials, backend = make(40, 40, dtype, cpu, spread=3.0)

    def everything(device: torch.device) -> list[Tensor]:
        math, spans = Exact(), Spans((40,), (40,), device)
        a, b, w = x_TD.to(device), y_TD.to(device), weight_D.to(device)
        state = backend.square_causal(q.to(device), k.to(device), v.to(device), spans)
        return [
            exact.linear(a, b),
            math.rms_norm(a, w, 1e-6),
            math.silu_mul(a, b),
            *math.cos_sin(a.float()),
            *state,
            partials.result(*state, dtype),
        ]

    for mine, theirs in zip(everything(cpu), everything(gpu), strict=True):
        assert torch.equal(mine, theirs.cpu())


def test_exp2_is_right() -> None:
    x = torch.linspace(-300, 300, 10_001, dtype=torch.float64)
    mantissa, whole = exact.exp2_parts(x)
    torch.testing.assert_close(mantissa * whole.exp2(), x.exp2(), rtol=2.0**-41, atol=0.0)


# ---- attention --------------------------------------------------------------------------------


def expected_attention(q_TNH: Tensor, k_XKH: Tensor, v_XKH: Tensor, hidden_TX: Tensor) -> Tensor:
    """Dense float64."""
    group = q_TNH.shape[1] // k_XKH.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k_XKH, v_XKH))
    scores = torch.einsum("tnh,xnh->ntx", q_TNH.double(), k) * SCALE
    scores = scores.masked_fill(hidden_TX, -torch.inf)
    return torch.einsum("ntx,xnh->tnh", scores.softmax(-1), v)


def make(
    num_q: int, num_k: int, dtype: torch.dtype, device: torch.device, *, spread: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, ExactPartials, ExactBackend]:
    q = spread * torch.randn(num_q, 6, 16, device=device)
    k, v = (torch.randn(num_k, 2, 16, device=device) for _ in range(2))
    v *= torch.randint(-6, 7, (num_k, 2, 1), device=device).float().exp2()
    partials = ExactPartials(dtype, SCALE)
    return q.to(dtype), k.to(dtype), v.to(dtype), partials, ExactBackend(partials)


@of_dtypes
@on_devices
@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0, 1000.0])
def test_any_partition_of_the_keys_gives_the_same_bits(
    dtype: torch.dtype, device: torch.device, spread: float
) -> None:
    """Scores from all equal to thousands apart, so that parts differ in their highest digit."""
    q, k, v, partials, backend = make(4, 500, dtype, device, spread=spread)

    def over(keys: list[int]) -> tuple[Tensor, Tensor]:
        slots = PoolSlots((np.array(keys, np.int64),), device)
        return backend.over_pool(q, k, v, slots, Spans((4,), (len(keys),), device))

    draw = random.Random(3)
    keys = list(range(500))
    whole = over(keys)
    for _ in range(6):
        draw.shuffle(keys)
        cuts = [0, *sorted(draw.choices(range(501), k=4)), 500]
        state = partials.empty(q)
        for lo, hi in pairwise(cuts):
            partials.merge_(*state, *over(keys[lo:hi]))
        assert torch.equal(state[0], whole[0])
        assert torch.equal(state[1], whole[1])
    everything = torch.zeros(4, 500, dtype=torch.bool, device=device)
    expected = expected_attention(q, k, v, everything)
    found = partials.result(*whole, torch.float64)
    bound = v.double().abs().amax()
    # exponents of large scores lose what the scores' own grid and float64 leave out
    allowed = TINY[dtype] * max(1.0, spread) * 64
    assert float((found - expected).abs().max() / bound) < allowed


@of_dtypes
@on_devices
def test_ragged_causal_spans_alone_and_together(dtype: torch.dtype, device: torch.device) -> None:
    lens = (1, 70, 3, 2, 300, 44)
    q, k, v, partials, backend = make(sum(lens), sum(lens), dtype, device)
    together = backend.square_causal(q, k, v, Spans(lens, lens, device))
    start = 0
    for length in lens:
        rows = slice(start, start + length)
        span = Spans((length,), (length,), device)
        alone = backend.square_causal(q[rows], k[rows], v[rows], span)
        assert torch.equal(alone[0], together[0][rows])
        hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        expected = expected_attention(q[rows], k[rows], v[rows], hidden)
        found = partials.result(*alone, torch.float64)
        bound = 64 * TINY[dtype] * float(v[rows].double().abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)
        start += length


@on_devices
def test_windows(device: torch.device) -> None:
    q, k, v, partials, _ = make(40, 60, torch.float32, device)
    at_q = torch.randperm(80, device=device)[:40]
    at_q[0] = 0  # sees no key
    at_k = 1 + torch.randperm(79, device=device)[:60]
    spans = Spans((40,), (60,), device, at_q, at_k)
    found = partials.windowed(q, k, v, spans, scale=SCALE, window=9)
    distance = at_q[:, None] - at_k
    hidden = (distance < 0) | (distance >= 9)
    expected = expected_attention(q, k, v, hidden).nan_to_num(0.0)  # NaN where all is hidden
    assert bool(hidden[0].all())
    torch.testing.assert_close(partials.result(*found, torch.float64), expected, rtol=0, atol=1e-8)


@on_devices
def test_long_sums_keep_their_digits(device: torch.device) -> None:
    """More keys than one exact product takes; one that outweighs the 9,999 others by 2^26."""
    q = torch.zeros(1, 1, 16, device=device)
    q[0, 0, 0] = 1.0
    k, v = (torch.zeros(10_000, 1, 16, device=device) for _ in range(2))
    k[:, 0, 0] = -18.02 / SCALE
    k[4321, 0, 0] = 0.0
    v[:, 0, 0] = 1000.0
    v[4321, 0, 0] = 0.0
    partials = ExactPartials(torch.float32, SCALE)
    span = Spans((1,), (10_000,), device)
    slots = PoolSlots((np.arange(10_000),), device)
    state = ExactBackend(partials).over_pool(q, k, v, slots, span)
    no_key = torch.zeros(1, 10_000, dtype=torch.bool, device=device)
    expected = expected_attention(q, k, v, no_key)[0, 0, 0]
    assert float(partials.result(*state, torch.float64)[0, 0, 0] / expected) == pytest.approx(
        1.0, rel=2e-8
    )


@on_devices
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so_through_merges(bad: float, device: torch.device) -> None:
    for name in ("q", "k", "v"):
        q, k, v, partials, backend = make(2, 10, torch.bfloat16, device)
        {"q": q, "k": k, "v": v}[name][0, 0, 0] = bad
        parts: Partials = partials
        state = parts.empty(q)
        for lo, hi in ((5, 10), (0, 5)):
            slots = PoolSlots((np.arange(lo, hi),), device)
            parts.merge_(*state, *backend.over_pool(q, k, v, slots, Spans((2,), (5,), device)))
        broken = parts.result(*state, torch.float32).isnan().any(-1)
        assert bool(broken[0, 0]), name
        assert not bool(broken[:, 3:].any()), name
        assert bool(broken[1, 0]) == (name != "q")


@on_devices
def test_no_key_gives_zero(device: torch.device) -> None:
    q, k, v, partials, backend = make(3, 5, torch.float32, device)
    slots = PoolSlots((np.arange(0), np.arange(5)), device)
    state = backend.over_pool(q, k, v, slots, Spans((2, 1), (0, 5), device))
    found = partials.result(*state, torch.float32)
    assert bool((found[:2] == 0).all())
    assert bool((found[2] != 0).all())
