"""Matrix products of few rows as Triton programs: the weights stream by once.

Knows: y = x W^T with W row by row in memory. A program takes some rows of W, which are the long
side of the matrix units' tile; the rows of x are its short side. Sums are float32, in an order
that sizes and tile alone decide: a result's bits depend on its row of x and on the tile, not on
the other rows or on how many there are. A norm between two products needs no pass of its own: the
one ahead adds to the residual stream x and writes x * weight and sums of x^2 over its outputs, the
next divides its sums by the root mean square. Does not know: which tile is best where.
"""

from __future__ import annotations

import triton
import triton.language as tl

from loongd.kernels.gpu.early import wait_for_ahead


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
def _sum_of_parts(acc, parts_at, size, tickets_ptr, mask, SPLITS: tl.constexpr):
    """(sum, True) for the last of SPLITS programs, (its own part, False) for the others; parts are
    `size` apart."""
    ticket_ptr = tickets_ptr + tl.program_id(0)
    tl.store(parts_at + tl.program_id(1) * size, acc, mask=mask)
    # all threads' stores come before the one thread's release
    tl.debug_barrier()
    last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == SPLITS - 1
    tl.debug_barrier()
    if last:
        acc = tl.zeros(acc.shape, tl.float32)
        for split in range(SPLITS):
            part_at = parts_at + split * size
            acc += tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(ticket_ptr, 0)
    return acc, last


@triton.jit
def _squares(squares_ptr, m, num_rows, NUM_PARTS: tl.constexpr):
    """Sums of squares by parts; rows beyond `num_rows` have none."""
    if NUM_PARTS == 0:
        squares = tl.zeros((1, m.shape[0]), tl.float32)
    else:
        part = tl.arange(0, triton.next_power_of_2(NUM_PARTS))[:, None]
        mask = (part < NUM_PARTS) & (m[None, :] < num_rows)
        squares = tl.load(squares_ptr + part * num_rows + m[None, :], mask=mask, other=0.0)
    return squares


@triton.jit
def _divided(acc, squares, dim, eps, NUM_PARTS: tl.constexpr):
    if NUM_PARTS > 0:
        acc *= tl.rsqrt(tl.sum(squares, 0) / dim + eps)[None, :]
    return acc


@triton.jit
def _add_to_stream(acc, old, stream_at, norm, squares_at, mask, in_rows):
    """Adds to the residual stream what the sums are in its type, as a norm of its own would; stores
    sums of x^2 of the new x, and gives x * norm."""
    kind = old.dtype
    new = (acc.to(kind).to(tl.float32) + old.to(tl.float32)).to(kind)
    tl.store(stream_at, new, mask=mask)
    x = tl.where(mask, new.to(tl.float32), 0.0)
    tl.store(squares_at, tl.sum(x * x, 0), mask=in_rows)
    return x * norm.to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def product_of_few(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    parts_ptr,
    tickets_ptr,
    stream_ptr,
    norm_ptr,
    squares_ptr,
    eps,
    num_rows,
    num_outs,
    dim,
    stride_xt,
    stride_st,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Grid (outputs / BLOCK_O, SPLITS); num_rows <= BLOCK_M; y and squares contiguous.

    With ADD the product is added to the stream (num_rows, num_outs), y is that times `norm_ptr`,
    and each output block's sums of squares go to `squares_ptr` (blocks, num_rows). With NUM_PARTS
    the sums are divided by the root of `eps` and the mean of such squares (NUM_PARTS, num_rows).

    With SPLITS > 1 each program sums a part of `dim` into `parts_ptr` (SPLITS, num_rows,
    num_outs); whichever of an output's programs comes last adds the parts, in order.
    """
    wait_for_ahead(EARLY)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)[None, :]
    per_split = tl.cdiv(tl.cdiv(dim, BLOCK_D), SPLITS) * BLOCK_D
    first = tl.program_id(1) * per_split
    w_row = w_ptr + tl.minimum(o, num_outs - 1).to(tl.int64) * dim
    up_row = w_row + tl.cast(num_outs, tl.int64) * dim
    x_row = (x_ptr + m.to(tl.int64) * stride_xt)[:, None]
    mask = (o[:, None] < num_outs) & (m[None, :] < num_rows)
    # what is small is asked for before the weights and awaited after them
    if ADD:
        stream_at = stream_ptr + m[None, :].to(tl.int64) * stride_st + o[:, None]
        old = tl.load(stream_at, mask=mask, other=0.0)
        norm = tl.load(norm_ptr + o, mask=o < num_outs, other=0.0)
    squares = _squares(squares_ptr, m, num_rows, NUM_PARTS)
    acc = tl.zeros((BLOCK_O, BLOCK_M), tl.float32)
    up_acc = acc
    for start in tl.range(first, tl.minimum(first + per_split, dim), BLOCK_D):
        at = start + d
        x = tl.load(x_row + at, mask=(m[:, None] < num_rows) & (EVEN | (at < dim)), other=0.0)
        w = _weights(w_row, at, dim, EVEN)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            up = _weights(up_row, at, dim, EVEN)
            up_acc = tl.dot(up, tl.trans(x), up_acc, input_precision="ieee")
    y_at = m[None, :].to(tl.int64) * num_outs + o[:, None]
    last = True
    if SPLITS > 1:
        acc, last = _sum_of_parts(
            acc, parts_ptr + y_at, num_rows * num_outs, tickets_ptr, mask, SPLITS
        )
    if last:
        acc = _divided(acc, squares, dim, eps, NUM_PARTS)
        acc += _bias(bias_ptr, o, o < num_outs, HAS_BIAS)[:, None]
        if GATED:
            up_acc = _divided(up_acc, squares, dim, eps, NUM_PARTS)
            up_bias = _bias(bias_ptr, num_outs + o, o < num_outs, HAS_BIAS)
            acc = _silu(acc) * (up_acc + up_bias[:, None])
        if ADD:
            squares_at = squares_ptr + tl.program_id(0) * num_rows + m
            acc = _add_to_stream(acc, old, stream_at, norm, squares_at, mask, m < num_rows)
        tl.store(y_ptr + y_at, acc.to(y_ptr.dtype.element_ty), mask=mask)
