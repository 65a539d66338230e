"""Matrix products of few rows as Triton programs: the weights stream by once.

Knows: y = x W^T with W row by row in memory. A program takes some rows of W, which are the long
side of the matrix units' tile; the rows of x are its short side. Sums are float32, in an order
that sizes and tile alone decide: a result's bits depend on its row of x and on the tile, not on
the other rows or on how many there are. Does not know: which tile is best where.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weights(w_row, at, dim, EVEN: tl.constexpr):
    if EVEN:
        w = tl.load(w_row[:, None] + at, eviction_policy="evict_first")
    else:
        w = tl.load(w_row[:, None] + at, mask=at < dim, other=0.0)
    return w


@triton.jit
def _bias(bias_ptr, at, mask, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        bias = tl.load(bias_ptr + at, mask=mask, other=0.0).to(tl.float32)
    else:
        bias = tl.zeros(at.shape, tl.float32)
    return bias


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _sum_of_parts(acc, parts_ptr, ticket_ptr, at, size, mask, SPLITS: tl.constexpr):
    """(sum, True) for the last of SPLITS programs, (its own part, False) for the others."""
    tl.store(parts_ptr + tl.program_id(1) * size + at, acc, mask=mask)
    # all threads' stores come before the one thread's release
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == SPLITS - 1
    tl.debug_barrier()
    if last:
        acc = tl.zeros(acc.shape, tl.float32)
        for split in range(SPLITS):
            part_at = parts_ptr + split * size + at
            acc += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(ticket_ptr, 0)
    return acc, last


@triton.jit(do_not_specialize=["num_rows"])
def product_of_few(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    tickets_ptr,
    num_rows,
    num_outs,
    dim,
    stride_xt,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Grid (outputs / BLOCK_O, SPLITS); num_rows <= BLOCK_M; y contiguous.

    With SPLITS > 1 each program sums a part of `dim` into `parts_ptr` (SPLITS, num_rows,
    num_outs); whichever of an output's programs comes last adds the parts, in order.
    """
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)[None, :]
    per_split = tl.cdiv(tl.cdiv(dim, BLOCK_D), SPLITS) * BLOCK_D
    first = tl.program_id(1) * per_split
    w_row = w_ptr + tl.minimum(o, num_outs - 1).to(tl.int64) * dim
    up_row = w_row + tl.cast(num_outs, tl.int64) * dim
    x_row = (x_ptr + m.to(tl.int64) * stride_xt)[:, None]
    in_x = m[:, None] < num_rows
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    up_acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    for start in tl.range(first, tl.minimum(first + per_split, dim), BLOCK_D):
        at = start + d
        x = tl.load(x_row + at, mask=in_x & (EVEN | (at < dim)), other=0.0)
        w = _weights(w_row, at, dim, EVEN)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            up = _weights(up_row, at, dim, EVEN)
            up_acc = tl.dot(up, tl.trans(x), up_acc, input_precision="ieee")
    mask = (o[:, None] < num_outs) & (m[None, :] < num_rows)
    y_at = m[None, :].to(tl.int64) * num_outs + o[:, None]
    last = True
    if SPLITS > 1:
        size = tl.cast(num_rows, tl.int64) * num_outs
        ticket_ptr = tickets_ptr + tl.program_id(0)
        acc, last = _sum_of_parts(acc, parts_ptr, ticket_ptr, y_at, size, mask, SPLITS)
    if last:
        acc += _bias(bias_ptr, o, o < num_outs, HAS_BIAS)[:, None]
        if GATED:
            up_bias = _bias(bias_ptr, num_outs + o, o < num_outs, HAS_BIAS)
            acc = _silu(acc) * (up_acc + up_bias[:, None])
        tl.store(y_ptr + y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)
