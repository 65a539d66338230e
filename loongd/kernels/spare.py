"""Packed rows that have more rows behind them in memory, which nobody asked for.

Knows: how such rows are made, and how to look at all of them. A library that is planned for few
lengths takes them with as many rows behind as the next length has more: what a causal square gives
its first rows does not depend on what follows them, so neither copies nor a rest are left.
Does not know: lengths, attention.
"""

from __future__ import annotations

import torch
from torch import Tensor


def new_rows(like: Tensor, shape: tuple[int, ...], spare: int) -> Tensor:
    """A new (T, ...) of that shape, not initialised, with `spare` rows of zeros behind it. Type and
    device are those of `like`."""
    whole = like.new_empty((shape[0] + spare, *shape[1:]))
    if spare:
        whole[shape[0] :].zero_()
    return whole[: shape[0]]


def linear_with_spare(
    x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, *, spare: int
) -> Tensor:
    """y = x W^T + b (T, O) as torch's `linear`, with `spare` rows of zeros behind it."""
    y_TO = new_rows(x_TD, (len(x_TD), len(weight_OD)), spare)
    if bias_O is None:
        return torch.mm(x_TD, weight_OD.t(), out=y_TO)
    return torch.addmm(bias_O, x_TD, weight_OD.t(), out=y_TO)


def with_spare(x: Tensor, spare: int) -> Tensor:
    """View of `x` and the `spare` rows behind it, x's strides apart. Raises RuntimeError where its
    memory ends before."""
    return x.as_strided((len(x) + spare, *x.shape[1:]), x.stride())
