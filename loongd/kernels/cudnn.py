"""cuDNN's attention through torch: one span, any numbers of queries and keys, with log-sum-exp.

Knows: what it costs. The fastest there is on Hopper (600 to 690 TFLOP/s), but every new pair of
lengths takes 40 to 65 ms to plan (the first of a kind 1 s), once a thread. So causal squares are
rounded up to a size with rows behind them that nobody asked for (`spare`), where they are alone and
short; else down to one, with a rest (above `_EXACT` the plan is small beside the work). Queries
over a prefix, whose length is new in every chunk of a prompt, are cut in both directions into
pieces of few sizes (`pieces`): 30 pairs in all. What is left of the queries is padded to a piece
where that is faster (`query_rows`); the caller does the rest another way. torch's variable-length
form replans at every call (58 ms): unusable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LEAST_SQUARE = 1024
LEAST_SQUARE_OF_MANY = 2048
"""Tokens from which a causal square is faster here than in Triton: alone (1K: 35 us against 58),
and beside others, which Triton does in one launch (8 x 1K: 361 us here against 310)."""
QUERY_SIZES = (8192, 4096, 2048, 1024, 512)
KEY_SIZES = (65536, 32768, 16384, 8192, 4096, 2048)
"""Pieces of attention over the pool; with the least of each it is faster here than in Triton,
gathering included. Each piece of keys but the first costs a merge of its output, in bytes 1.4 % of
its time with 32,768 keys, 6 % with 8,192, 22 % with 2,048 (at 600 TFLOP/s and 4 TB/s)."""
LEAST_QUERIES = 320
"""Queries over the pool from which a piece of the smallest size is faster here, padded, than they
are in Triton: it takes as long whatever is in it, and 512 rows at 600 TFLOP/s take as long as 341
at 400; Triton needs more launches besides."""
MOST_SPARE = 8192
"""Tokens up to which a lone square is rounded up. It reaches 0.92 to 1.0 of the rate of its own
plan so, and 0.65 to 0.92 with a rest; longer ones 0.77 to 0.93, with a rest 0.88 to 0.95 (H200).
"""
_EXACT = 131072
_STEPS = (128, 256)
"""Between planned sizes, from 1,024 and from 2,048 tokens on."""
_SHORTER = 4096
"""From here on there is a plan for one token less than sizes an eighth of an octave apart, too: in
a ring, half of the blocks have a row less than the stripes."""
_PLANNED = 32768
"""Squares up to this size are planned before serving: those above take 100 times their plan."""


def is_available(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this GPU, torch and cuDNN really do it: tries it once, small."""
    if dtype not in (torch.float16, torch.bfloat16) or head_dim > 128 or head_dim % 8:
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    x = torch.zeros(64, 1, head_dim, dtype=dtype, device=device)
    try:
        attention(x, x, x, scale=1.0, causal=True)
    except RuntimeError:
        return False
    return True


def aligned(length: int, least: int) -> int:
    """The longest planned length that is not above `length`; 0 below `least`."""
    if length < least:
        return 0
    if length >= _EXACT:
        return length
    if length + 1 >= _SHORTER and (length + 1) % _eighth(length + 1) == 0:
        return length
    return length - length % _step(length)


def spare(length: int) -> int:
    """Rows behind a causal square of so many tokens, alone in its call, that make it as long as a
    planned one; 0 where it is as fast without."""
    return -length % _step(length) if LEAST_SQUARE <= length <= MOST_SPARE else 0


def _step(length: int) -> int:
    """Between planned sizes."""
    if length < MOST_SPARE:
        return _STEPS[length >= 2 * LEAST_SQUARE]
    return _eighth(length)


def _eighth(length: int) -> int:
    """Of the octave."""
    return (1 << (length.bit_length() - 1)) // 8


def planned_sizes() -> list[tuple[int, int, bool, bool]]:
    """(queries, keys, causal, whether values have a tensor of their own) of each plan."""
    squares = [LEAST_SQUARE]
    while squares[-1] < _PLANNED:
        squares.append(squares[-1] + _step(squares[-1]))
    sizes = [(n, n, True, True) for n in squares]
    # a plan is for strides too: of few tokens, values lie beside queries and keys
    sizes += [(n, n, True, False) for n in squares if n <= MOST_SPARE]
    sizes += [(n - 1, n - 1, True, True) for n in squares if n >= _SHORTER and n % _eighth(n) == 0]
    return sizes + [(q, k, False, True) for q in QUERY_SIZES for k in KEY_SIZES]


def plan_ahead(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, scale: float
) -> Iterator[float]:
    """Plan the sizes of squares up to `_PLANNED` and of pieces; yields the fraction done.

    cuDNN keeps plans by thread: to be called on the one that serves.
    """
    sizes = planned_sizes()
    for number, (num_q, num_k, causal, apart) in enumerate(sizes):
        q_TNH = torch.zeros(num_q, num_heads, head_dim, dtype=dtype, device="cuda")
        k_TKH = torch.zeros(num_k, num_kv_heads, head_dim, dtype=dtype, device="cuda")
        v_TKH = k_TKH
        if not apart:
            together = q_TNH.new_zeros(num_k, num_heads + 2 * num_kv_heads, head_dim)
            v_TKH = together[:, -num_kv_heads:]
        attention(q_TNH, k_TKH, v_TKH, scale=scale, causal=causal)
        yield (number + 1) / len(sizes)


@dataclass(frozen=True, slots=True)
class Plans:
    """This library as `kernels.attention.Planned`; with `rehearses`, nothing is planned."""

    scale: float
    dtype: torch.dtype
    rehearses: bool = False

    def ahead(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Iterable[float]:
        """All of `planned_sizes`, on the thread that serves."""
        if self.rehearses:
            return ()
        return plan_ahead(num_heads, num_kv_heads, head_dim, self.dtype, scale=self.scale)

    def spare(self, num_tokens: int) -> int:
        """As the function of this module."""
        return spare(num_tokens)

    def is_one_call(self, num_tokens: int) -> bool:
        """Planned lengths are; others take longer."""
        return 0 < aligned(num_tokens, LEAST_SQUARE) == num_tokens


def pieces(length: int, sizes: Sequence[int]) -> list[int]:
    """The fewest of `sizes` (descending, each a multiple of the next), largest first, that cover
    all of `length` but a rest smaller than the last size."""
    found: list[int] = []
    for size in sizes:
        count, length = divmod(length, size)
        found += [size] * count
    return found


def query_rows(length: int) -> int:
    """How many of so many queries over the pool, from the first on, are for here: whole pieces, and
    what is left where that is worth a padded one."""
    rest = length % QUERY_SIZES[-1]
    return length if rest >= LEAST_QUERIES else length - rest


def attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of one span: out_TNH in the type of q and lse_TN float32, both views.

    Causal needs as many keys as queries.
    """
    out_1NTH, lse_1NT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_TNH.transpose(0, 1)[None],
        k_TKH.transpose(0, 1)[None],
        v_TKH.transpose(0, 1)[None],
        None,
        True,
        0.0,
        causal,
        False,
        scale=scale,
    )
    return out_1NTH[0].transpose(0, 1), lse_1NT1[0, :, :, 0].transpose(0, 1)
