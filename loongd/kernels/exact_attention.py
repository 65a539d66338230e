"""Attention whose result has the same bits however its keys are dealt out and added up.

Knows: a backend and a form of partial results for it. Scores are exact products (`kernels.exact`).
The weight 2^t of a key is written in digits of 20 bits at fixed powers of 2^20; a sum keeps three
digits, from the highest in which any of its keys has a bit ("top"), as whole numbers. What a key
adds to a digit depends on that key alone and whole numbers add in any order, so merging is exact:
keys that were left out below one part's top lie even further below the whole's (reproducible
summation in bins: Demmel and Nguyen, ARITH 2013). The weights of values carry the exponent of the
value's row too, so numerator and denominator have a top each.
Does not know: groups, where keys lie, layers.

At least 40 bits of weight below the largest, 20 of each value below the largest of its row (40 for
float32). Room for 2^23 keys. A query with a score or a value that is not finite gets NaN.

Letters: S spans, Q queries and X keys of a chunk, G query heads of a kv head, D = 3 digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from loongd.kernels.attention import PoolSlots, Spans
from loongd.kernels.exact import (
    LOG2_E,
    cut,
    exp2_parts,
    exponent_above,
    grid_bits,
    num_slices,
    power_of_two,
    products,
    row_largest,
)

Range = tuple[int, int, int, int]
"""First query, end, first key, end."""

_BITS = 20
"""Bits of a digit, and of a slice of a value."""
_DIGITS = 3
_CHUNK_KEYS = 4096
"""2 * 20 bits and a sum over 2^12 keys fill float64; int64 adds up 2^11 such chunks."""
_MOST_SCORES = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Scores at a time, of which up to ten float64 tensors are alive: 640 MB."""
_CHUNK_ROWS = 4096
"""Query rows that are merged and finished at a time, on copies."""
_EMPTY = -(1 << 40)
"""Top of a sum over no key."""
_BROKEN = 1 << 40
"""Top of a sum with a NaN or an infinity: above every other, so it survives every merge."""


class ExactPartials:
    """Digits of numerators and denominator as int64; `top` is the numerators'.

    Columns of `out`: D x H x slices digits of the numerators, D of the denominator, its top.
    """

    dtype = torch.int64
    capturable = False

    def __init__(self, dtype: torch.dtype, scale: float) -> None:
        """`dtype` is that of the model, `scale` the factor of the scores."""
        self._slices = num_slices(dtype)
        self._scale = scale

    def columns(self, head_dim: int) -> int:
        return _DIGITS * (head_dim * self._slices + 1) + 1

    def empty(self, q_TNH: Tensor) -> tuple[Tensor, Tensor]:
        *rows, head_dim = q_TNH.shape
        out = torch.zeros((*rows, self.columns(head_dim)), dtype=torch.int64, device=q_TNH.device)
        out[..., -1] = _EMPTY
        return out, torch.full_like(out[..., -1], _EMPTY)

    def widened(self, out: Tensor) -> Tensor:
        return out

    def merge_(self, out: Tensor, top: Tensor, part: Tensor, part_top: Tensor) -> None:
        """Exact, so in any order: digits are moved below the higher top and added."""
        states = (out, top, part, part_top)
        for pieces in zip(*(torch.split(x, _CHUNK_ROWS) for x in states), strict=True):
            self._merge(*pieces)

    def _merge(self, out: Tensor, top: Tensor, part: Tensor, part_top: Tensor) -> None:
        ends = (0, out.shape[-1] - 1 - _DIGITS, out.shape[-1] - 1)
        tops = ((top, part_top), (out[..., -1], part[..., -1]))
        for (mine, theirs), first, end in zip(tops, ends[:-1], ends[1:], strict=True):
            highest = torch.maximum(mine, theirs)
            digits = _lowered(out[..., first:end], highest - mine)
            out[..., first:end] = digits.add_(_lowered(part[..., first:end], highest - theirs))
            mine.copy_(highest)

    def result(self, out: Tensor, top: Tensor, dtype: torch.dtype) -> Tensor:
        """Numerator over denominator in float64, rounded to `dtype`; 0 without any key."""
        pieces = zip(*(torch.split(x, _CHUNK_ROWS) for x in (out, top)), strict=True)
        return torch.cat([self._result(*piece).to(dtype) for piece in pieces])

    def _result(self, out: Tensor, top: Tensor) -> Tensor:
        bottom = out[..., -1]
        above_Y = _number(out[..., : -1 - _DIGITS])
        if self._slices == 2:
            high_H, low_H = above_Y.chunk(2, dim=-1)
            above_Y = high_H + low_H * 2.0**-_BITS
        below_1 = _number(out[..., -1 - _DIGITS : -1])
        none = bottom == _EMPTY
        below_1 = torch.where(none[..., None], 1.0, below_1)
        factor = power_of_two((top - bottom) * _BITS - _BITS)
        factor = torch.where(none, 0.0, factor)
        factor = torch.where((top >= _BROKEN) | (bottom >= _BROKEN), torch.nan, factor)
        return (above_Y / below_1).mul_(factor[..., None])

    def windowed(
        self,
        q_TNH: Tensor,
        k_TKH: Tensor,
        v_TKH: Tensor,
        spans: Spans,
        *,
        scale: float,
        window: int,
    ) -> tuple[Tensor, Tensor]:
        assert scale == self._scale
        assert spans.q_positions is not None
        assert spans.k_positions is not None
        positions = (spans.q_positions, spans.k_positions)
        return self.attend(q_TNH, k_TKH, v_TKH, None, spans, positions, window=window)

    def attend(
        self,
        q_TNH: Tensor,
        k_XKH: Tensor,
        v_XKH: Tensor,
        slots: Tensor | None,
        spans: Spans,
        positions: tuple[Tensor, Tensor] | None,
        *,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Partial results of all queries over the keys of their spans.

        Keys are packed, or at `slots` of the pool. With `positions` (of packed queries and keys)
        queries see no later key, and with a window none that far back.
        """
        state = self.empty(q_TNH)
        num_heads = q_TNH.shape[1]
        for bundle in _bundles(spans.ranges, num_heads, q_TNH.device):
            for q_rows_SQ, real_SQ in bundle.query_chunks(num_heads):
                mine = None
                for k_rows_SX, real_SX in bundle.key_chunks():
                    hidden_SQX = ~real_SX[:, None, :]
                    if positions is not None:
                        distance_SQX = (
                            positions[0][q_rows_SQ][:, :, None]
                            - positions[1][k_rows_SX][:, None, :]
                        )
                        hidden_SQX = hidden_SQX | (distance_SQX < 0)
                        if window is not None:
                            hidden_SQX |= distance_SQX >= window
                    at_SX = k_rows_SX if slots is None else slots[k_rows_SX]
                    part = self._partial(q_TNH[q_rows_SQ], k_XKH[at_SX], v_XKH[at_SX], hidden_SQX)
                    if mine is None:
                        mine = part
                    else:
                        self.merge_(*mine, *part)
                if mine is not None:
                    rows = q_rows_SQ[real_SQ]
                    state[0][rows], state[1][rows] = mine[0][real_SQ], mine[1][real_SQ]
        return state

    def _partial(
        self, q_SQNH: Tensor, k_SXKH: Tensor, v_SXKH: Tensor, hidden_SQX: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`out` (S, Q, N, columns) and `top` (S, Q, N) over one chunk of keys."""
        S, Q, N, H = q_SQNH.shape
        X, K = k_SXKH.shape[1:3]
        bits = grid_bits(H)
        heads = (S, Q, K, N // K, H)
        q = [
            x.view(heads).permute(0, 2, 1, 3, 4).reshape(S, K, -1, H)
            for x in self._cut(q_SQNH, bits)
        ]
        k = [x.transpose(1, 2) for x in self._cut(k_SXKH, bits)]
        weight = products(q, k).mul_(self._scale * LOG2_E)
        mantissa, exponent = exp2_parts(weight)
        del weight
        exponent.view(S, K, Q, -1, X).masked_fill_(hidden_SQX[:, None, :, None, :], -torch.inf)
        value_SKXV, value_exponent_SK1X = self._values(v_SXKH)

        digits, top = _digits(mantissa, exponent + value_exponent_SK1X)
        above = torch.stack([digit @ value_SKXV for digit in digits], dim=-2).long().flatten(-2)
        digits, bottom = _digits(mantissa, exponent)
        below = torch.stack([digit.sum(-1) for digit in digits], dim=-1).long()
        out = torch.cat((above, below, bottom[..., None]), dim=-1)

        def by_query(x: Tensor) -> Tensor:
            apart = x.view(S, K, Q, N // K, *x.shape[3:]).transpose(1, 2)
            return apart.reshape(S, Q, N, *x.shape[3:])

        return by_query(out), by_query(top)

    def _cut(self, x: Tensor, bits: int) -> list[Tensor]:
        return cut(x, bits, self._slices)

    def _values(self, v_SXKH: Tensor) -> tuple[Tensor, Tensor]:
        """Whole numbers (S, K, X, slices H), and exponents (S, K, 1, X); a broken row's is NaN."""
        v_SKXH = v_SXKH.double().transpose(1, 2)
        largest_SKX1 = row_largest(v_SKXH)
        broken_SKX1 = ~largest_SKX1.isfinite()
        exponent_SKX1 = exponent_above(largest_SKX1)
        rest = v_SKXH * power_of_two(_BITS - exponent_SKX1)
        rest = rest.masked_fill(broken_SKX1, 0.0)
        slices = []
        for _ in range(self._slices):
            part = rest.round()
            slices.append(part)
            rest = (rest - part) * 2.0**_BITS
        exponent = exponent_SKX1.double().masked_fill(broken_SKX1, torch.nan)
        return torch.cat(slices, dim=-1), exponent.transpose(-1, -2)


class ExactBackend:
    """`AttentionBackend` whose results are `ExactPartials`."""

    name = "exact (deterministic)"
    planned = None

    def __init__(self, partials: ExactPartials) -> None:
        self._partials = partials

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        positions = (_counted(spans.q_lens, q_TNH.device), _counted(spans.k_lens, k_TKH.device))
        return self._partials.attend(q_TNH, k_TKH, v_TKH, None, spans, positions)

    def over_pool(
        self, q_TNH: Tensor, k_SKH: Tensor, v_SKH: Tensor, slots: PoolSlots, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        return self._partials.attend(q_TNH, k_SKH, v_SKH, slots.packed, spans, None)


def _counted(lens: tuple[int, ...], device: torch.device) -> Tensor:
    """Place of each row within its span."""
    return torch.cat([torch.arange(n) for n in (0, *lens)]).to(device)


# ---- digits -----------------------------------------------------------------------------------


def _digits(mantissa: Tensor, exponent: Tensor) -> tuple[list[Tensor], Tensor]:
    """D digits (float64) of mantissa 2^exponent below the row's top, and that top (int64).

    A value below 2^(20 top) has digit i worth 2^(20 (top - 1 - i)). Digits are cut off, not
    rounded: a digit never depends on what is below it, nor on the top.
    """
    highest = exponent.amax(-1)
    top = ((highest + 1) / _BITS).ceil()
    top = top.nan_to_num(nan=_BROKEN, posinf=_BROKEN, neginf=_EMPTY).long()
    below = (exponent - top[..., None] * _BITS).clamp_(min=-1000)
    rest = power_of_two(below).mul_(mantissa)
    digits = []
    for number in range(_DIGITS):
        rest.mul_(2.0**_BITS)
        digit = rest.floor()
        digits.append(digit)
        if number + 1 < _DIGITS:
            rest.sub_(digit)
    return digits, top


def _lowered(digits: Tensor, by: Tensor) -> Tensor:
    """Digits (..., D * Y) moved `by` (...) places down; those below the last are dropped."""
    apart = digits.view(*digits.shape[:-1], _DIGITS, digits.shape[-1] // _DIGITS)
    source = torch.arange(_DIGITS, device=digits.device) - by[..., None]
    moved = apart.gather(-2, source.clamp(min=0)[..., None].expand(apart.shape))
    return moved.masked_fill_((source < 0)[..., None], 0).flatten(-2)


def _number(digits: Tensor) -> Tensor:
    """Digits (..., D * Y) as float64 (..., Y), in units of the last; always the same additions."""
    first, second, third = (
        digits.view(*digits.shape[:-1], _DIGITS, digits.shape[-1] // _DIGITS).double().unbind(-2)
    )
    return first * 2.0 ** (2 * _BITS) + (second * 2.0**_BITS + third)


# ---- spans side by side -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Spans worked on together, padded to the longest; padding adds exact zeros."""

    ranges: tuple[Range, ...]
    device: torch.device

    def query_chunks(self, num_heads: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows (S, Q), whether real): as many queries of each span as memory allows."""
        keys = min(max(r[3] - r[2] for r in self.ranges), _CHUNK_KEYS)
        most = _MOST_SCORES[self.device.type] // (len(self.ranges) * num_heads * keys)
        yield from self._chunks([(r[0], r[1]) for r in self.ranges], max(1, most))

    def key_chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows (S, X), whether real)."""
        yield from self._chunks([(r[2], r[3]) for r in self.ranges], _CHUNK_KEYS)

    def _chunks(self, ranges: list[tuple[int, int]], size: int) -> Iterator[tuple[Tensor, Tensor]]:
        first_S1, end_S1 = torch.tensor(ranges, device=self.device).T[..., None]
        longest = max(end - first for first, end in ranges)
        for start in range(0, longest, size):
            rows = first_S1 + torch.arange(start, min(start + size, longest), device=self.device)
            yield torch.minimum(rows, end_S1 - 1), rows < end_S1


def _bundles(ranges: tuple[Range, ...], num_heads: int, device: torch.device) -> Iterator[_Bundle]:
    """Spans with queries and keys, long ones first, together while padding stays below half."""
    full = [r for r in ranges if r[1] > r[0] and r[3] > r[2]]
    full.sort(key=lambda r: (r[3] - r[2], r[1] - r[0]), reverse=True)
    bundle: list[Range] = []
    for one in full:
        more = [*bundle, one]
        padded = len(more) * max(r[1] - r[0] for r in more) * (more[0][3] - more[0][2])
        real = sum((r[1] - r[0]) * (r[3] - r[2]) for r in more)
        many = padded * num_heads > _MOST_SCORES[device.type]
        if bundle and (many or padded > 2 * real + 4096):
            yield _Bundle(tuple(bundle), device)
            bundle = []
        bundle.append(one)
    if bundle:
        yield _Bundle(tuple(bundle), device)
