"""Drawn tokens are those of a plain float64 draw: sort, cut, sum in the order of token ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from loongd.kernels import reference
from loongd.kernels.gpu import draw

LARGEST = 1 - 2**-52
"""The largest random number that there is."""


@dataclass(frozen=True)
class How:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5


def expected(logits_V: Tensor, how: How) -> int:
    """The token, the plain way."""
    x = logits_V.double()
    best = float(x.max())  # NaN if any is
    if not math.isfinite(best):
        return -1
    if how.temperature < 1e-5:
        return int((x == best).nonzero()[0])
    mass = ((x - best) / how.temperature).exp()
    kept = torch.ones_like(x, dtype=torch.bool)
    order = x.argsort(descending=True)
    if 0 < how.top_k < len(x):
        kept = x >= x[order[how.top_k - 1]]
    if how.top_p < 1:
        sorted_mass = (mass * kept)[order]
        before = sorted_mass.cumsum(0) - sorted_mass
        last = int((before < how.top_p * sorted_mass.sum()).sum()) - 1
        kept &= x >= x[order[max(last, 0)]]
    kept &= mass >= how.min_p
    until = (mass * kept).cumsum(0)
    return int((until <= how.uniform * until[-1]).sum())


def numbers_of(how: Sequence[How], device: torch.device) -> Tensor:
    """One row for each parameter."""
    rows = [(h.temperature, h.top_k, h.top_p, h.min_p, h.uniform) for h in how]
    return torch.tensor(rows, dtype=torch.float64, device=device).T.contiguous()


def draw_both(logits_BV: Tensor, how: Sequence[How]) -> list[int]:
    """Tokens of the kernels, which must be the twin's."""
    numbers = numbers_of(how, logits_BV.device)
    filtered = any(h.top_k > 0 or h.top_p < 1 for h in how)
    tokens = draw.draw_tokens(logits_BV, *numbers, filtered=filtered)
    twin = reference.draw_tokens(logits_BV, *numbers, filtered=filtered)
    assert tokens.dtype == twin.dtype == torch.int64
    assert tokens.tolist() == twin.tolist()
    found: list[int] = tokens.tolist()
    return found


def check(logits_BV: Tensor, how: Sequence[How]) -> list[int]:
    tokens = draw_both(logits_BV, how)
    assert tokens == [expected(x, h) for x, h in zip(logits_BV, how, strict=True)]
    return tokens


def random_logits(rows: int, vocab: int, device: torch.device, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(rows * vocab)
    return (torch.randn(rows, vocab, generator=generator) * scale).to(device)


def random_how(rows: int, vocab: int) -> list[How]:
    """Every filter on and off, in all combinations."""
    generator = torch.Generator().manual_seed(rows + vocab)
    return [
        How(
            temperature=0.3 + 1.5 * a,
            top_k=(0, 1 + int(b * 60), 0, 1 + int(b * vocab))[row % 4],
            top_p=(1.0, 0.5 + 0.5 * c)[row // 4 % 2],
            min_p=(0.0, 0.2 * d)[row // 8 % 2],
            uniform=e,
        )
        for row, (a, b, c, d, e) in enumerate(
            torch.rand(rows, 5, generator=generator, dtype=torch.float64).tolist()
        )
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_filters_in_all_combinations(device: torch.device, dtype: torch.dtype) -> None:
    """Vocabulary of two blocks, rows with gaps; half precision has many equal logits."""
    logits = random_logits(16, 3005, device).to(dtype)[:, :3001]
    how = random_how(16, 3001)
    tokens = check(logits, how)
    for row in (0, 3, 14):
        assert draw_both(logits[row : row + 1], how[row : row + 1]) == [tokens[row]]


def test_more_is_kept_than_is_gathered(device: torch.device) -> None:
    """Flat rows: what is kept is below the bound of the gathered logits, or they overflow."""
    logits = random_logits(5, 9000, device, scale=0.1)
    logits[4] = 0.25
    check(
        logits,
        [
            How(top_p=0.95, uniform=0.99),
            How(top_k=6000, uniform=0.01),
            How(top_k=3000, top_p=0.9, uniform=0.7),
            How(uniform=0.8),
            How(top_p=0.5, uniform=0.3),
        ],
    )


def test_equal_logits_are_kept_together(device: torch.device) -> None:
    logits = random_logits(6, 2500, device).clamp(max=4.0)
    ties = [7, 2047, 2048, 2499]
    logits[:, ties] = 9.0
    thirds = [How(top_k=1, uniform=u) for u in (0.0, 0.3, 0.6, 0.9)]
    assert check(logits[:4], thirds) == ties
    signs = torch.full((2, 40), -5.0, device=device)
    signs[:, 3], signs[:, 9] = 0.0, -0.0
    assert check(signs, [How(top_k=1, uniform=u) for u in (0.2, 0.7)]) == [3, 9]
    check(logits[4:], [How(top_p=1e-9, uniform=0.6), How(top_p=0.3, uniform=LARGEST)])


def test_extremes(device: torch.device) -> None:
    logits = random_logits(1, 700, device, scale=100.0).expand(9, -1)
    how = [
        How(temperature=0.0),
        How(temperature=1e-6, top_k=5),
        How(temperature=1e-5),
        How(temperature=1e-4, top_p=0.5),
        How(temperature=1e4, uniform=0.4),
        How(temperature=100.0, min_p=1.0),
        How(temperature=50.0, top_k=900, uniform=LARGEST),
        How(temperature=50.0, uniform=0.0),
        How(temperature=50.0, uniform=LARGEST),
    ]
    tokens = check(logits, how)
    best = int(logits[0].argmax())
    assert [tokens[row] for row in (0, 1, 2, 3, 5)] == [best] * 5


def test_banned_and_broken(device: torch.device) -> None:
    logits = random_logits(8, 2100, device)
    logits[0, 5] = torch.nan
    logits[1, 2070] = torch.inf
    logits[2] = -torch.inf
    logits[3:6] = -torch.inf
    logits[3:6, [11, 2060, 2099]] = torch.tensor([1.0, 0.5, 0.7], device=device)
    logits[6, 1000:] = -torch.inf
    how = [
        How(top_p=0.9),
        How(),
        How(top_k=3),
        How(uniform=LARGEST),
        How(top_k=2, uniform=LARGEST),
        How(top_k=50, top_p=0.99, uniform=0.6),
        How(top_p=0.9, uniform=LARGEST),
        How(temperature=0.0),
    ]
    tokens = check(logits, how)
    assert tokens[:5] == [-1, -1, -1, 2099, 2099]
    assert tokens[6] < 1000


def test_no_rows(device: torch.device) -> None:
    none = torch.empty(5, 0, dtype=torch.float64, device=device)
    for module in (draw, reference):
        tokens = module.draw_tokens(torch.empty(0, 40, device=device), *none, filtered=True)
        assert tokens.shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.02, 1.0, 4.0])
def test_large_batches(device: torch.device, dtype: torch.dtype, scale: float) -> None:
    """Against float64 at the size of a real vocabulary; and alone as in the batch.

    Sums of float32 exponentials are off by some 1e-7, which moves a token once in a while.
    """
    logits = random_logits(128, 128256, device, scale=scale).to(dtype)
    how = random_how(128, 128256)
    numbers = numbers_of(how, device)
    tokens = draw.draw_tokens(logits, *numbers, filtered=True)
    wanted = [expected(x, h) for x, h in zip(logits, how, strict=True)]
    assert sum(a != b for a, b in zip(tokens.tolist(), wanted, strict=True)) <= 1
    for row in range(0, 128, 9):
        alone = draw.draw_tokens(
            logits[row : row + 1], *numbers[:, row : row + 1].contiguous(), filtered=True
        )
        assert alone.tolist() == tokens[row : row + 1].tolist()
