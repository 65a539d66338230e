"""Kernels of `kernels.gpu.draw`: weighing, gathering and drawing the tokens of rows of logits.

Knows: masses beside the best token's, in units of 2^-40; bisection for a bound. Arguments named
alike mean the same in all kernels: see `kernels.gpu.draw.draw_tokens`. Does not know: launches.
"""

from __future__ import annotations

import triton
import triton.language as tl

_UNDECIDED = tl.constexpr(-2)
"""In place of a token that a later kernel draws; -1 is a row that cannot draw any."""
_COUNT = tl.constexpr(0)
_MASS = tl.constexpr(1)
_PLACE = tl.constexpr(2)
"""What `weight_above` sums: tokens or masses above a logit, or masses above a token id."""


@triton.jit
def order_of(x):
    """int32 in the order of float32 `x`: equal for equal numbers, 0 and -0 too."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def mass_of(x, best, rate, min_p):
    """exp((x - best) * rate) in units of 2^-40 (int64), 0 below `min_p`."""
    mass = tl.exp((x - best) * rate)
    return tl.where(mass < min_p, 0.0, mass * 1099511627776.0).to(tl.int64)


@triton.jit
def is_filtered(top_k, top_p, vocab):
    """Whether top-k or top-p leave anything out."""
    return ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0)


@triton.jit
def part_of(uniform, total):
    """`uniform` (in [0, 1)) of a whole `total` > 0: less than `total`."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def load_row(best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, vocab, greedy):
    """A row's best token, whether it is drawn at all, whether filtered, and its rate (1 / T)."""
    best = tl.load(best_ptr)
    temperature = tl.load(temperature_ptr)
    drawn = (best >= 0) & (temperature >= greedy)
    filtered = drawn & is_filtered(tl.load(top_k_ptr), tl.load(top_p_ptr), vocab)
    rate = (1.0 / tl.maximum(temperature, greedy)).to(tl.float32)
    return best, drawn, filtered, rate


@triton.jit
def guess_bound(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    bound_ptr,
    count_ptr,
    stride_b,
    vocab,
    step,
    aim,
    least_aim,
    greedy,
    BLOCK: tl.constexpr,
):
    """A bound, as `order_of`, that some `aim` logits of a row reach; grid (rows,).

    It is a best one of every `step`-th logit. Four times as many as top-k takes are enough.
    """
    row = tl.program_id(0).to(tl.int64)
    best, _, filtered, _ = load_row(
        best_ptr + row, temperature_ptr + row, top_k_ptr + row, top_p_ptr + row, vocab, greedy
    )
    if filtered:
        at = tl.arange(0, BLOCK) * step
        x = tl.load(logits_ptr + row * stride_b + at, mask=at < vocab, other=float("-inf"))
        order = order_of(x.to(tl.float32))
        high = order_of(tl.load(logits_ptr + row * stride_b + best).to(tl.float32)).to(tl.int64)
        low = order_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64)
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab):
            aim = tl.minimum(tl.maximum((4 * top_k).to(tl.int32), least_aim), aim)
        rank = tl.maximum(aim // step, 1)
        while high - low > 1:
            middle = low + (high - low) // 2
            few = tl.sum((order > middle).to(tl.int32)) < rank
            high = tl.where(few, middle, high)
            low = tl.where(few, low, middle)
        tl.store(bound_ptr + row, high.to(tl.int32))
        tl.store(count_ptr + row, 0)


@triton.jit
def gather(
    x, token, filtered, bound_ptr, count_ptr, value_ptr, token_ptr, CANDIDATES: tl.constexpr
):
    """Append the logits of at least a row's bound, and their tokens, while there is room."""
    if filtered:
        good = ((order_of(x) >= tl.load(bound_ptr)) & (x > float("-inf"))).to(tl.int32)
        num = tl.sum(good)
        if num > 0:
            place = tl.atomic_add(count_ptr, num) + tl.cumsum(good, 0) - good
            kept = (good > 0) & (place < CANDIDATES)
            tl.store(value_ptr + place, x, mask=kept)
            tl.store(token_ptr + place, token, mask=kept)


@triton.jit
def weigh_part(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    mass_ptr,
    bound_ptr,
    count_ptr,
    value_ptr,
    token_ptr,
    stride_b,
    vocab,
    num_blocks,
    part_len,
    greedy,
    GATHER: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Mass of each block of a part of a row; grid (rows, parts).

    With GATHER also the logits of at least the row's bound and their tokens, as far as there is
    room; `count` counts them all. Without top-k and top-p masses are those that min-p keeps.
    """
    row = tl.program_id(0).to(tl.int64)
    best, drawn, filtered, rate = load_row(
        best_ptr + row, temperature_ptr + row, top_k_ptr + row, top_p_ptr + row, vocab, greedy
    )
    if drawn:
        logits_ptr += row * stride_b
        top = tl.load(logits_ptr + best).to(tl.float32)
        min_p = tl.where(filtered, 0.0, tl.load(min_p_ptr + row)).to(tl.float32)
        first = tl.program_id(1) * part_len
        for start in range(first, tl.minimum(first + part_len, vocab), BLOCK):
            token = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
            x = x.to(tl.float32)
            mass = tl.sum(mass_of(x, top, rate, min_p))
            tl.store(mass_ptr + row * num_blocks + start // BLOCK, mass)
            if GATHER:
                room = row * CANDIDATES
                gather(
                    x, token, filtered, bound_ptr + row, count_ptr + row,
                    value_ptr + room, token_ptr + room, CANDIDATES,
                )  # fmt: skip


@triton.jit
def draw_unfiltered(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    mass_ptr,
    out_ptr,
    stride_b,
    vocab,
    num_blocks,
    greedy,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens of rows that are not drawn or have no top-k and top-p; grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    best, drawn, filtered, rate = load_row(
        best_ptr + row, temperature_ptr + row, top_k_ptr + row, top_p_ptr + row, vocab, greedy
    )
    if filtered:
        tl.store(out_ptr + row, tl.full((), _UNDECIDED, tl.int64))
    elif drawn:
        at = tl.arange(0, BLOCKS)
        mass = tl.load(mass_ptr + row * num_blocks + at, mask=at < num_blocks, other=0)
        until = tl.cumsum(mass, 0)
        target = part_of(tl.load(uniform_ptr + row), tl.sum(mass))
        block = tl.sum((until <= target).to(tl.int32))
        target -= tl.max(tl.where(until <= target, until, 0))
        logits_ptr += row * stride_b
        top = tl.load(logits_ptr + best).to(tl.float32)
        min_p = tl.load(min_p_ptr + row).to(tl.float32)
        token = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + token, mask=token < vocab, other=float("-inf"))
        within = tl.cumsum(mass_of(x.to(tl.float32), top, rate, min_p), 0)
        drawn_token = block * BLOCK + tl.sum((within <= target).to(tl.int32))
        tl.store(out_ptr + row, drawn_token.to(tl.int64))
    else:
        tl.store(out_ptr + row, best)


@triton.jit
def weight_above(
    value_ptr,
    token_ptr,
    num,
    bound,
    cutoff,
    top,
    rate,
    min_p,
    KIND: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Weight (int64) of `num` tokens above `bound`, of those whose logit is at least `cutoff`."""
    total = tl.zeros((BLOCK,), tl.int64)
    bound = bound.to(tl.int32)
    cutoff = cutoff.to(tl.int32)
    for start in range(0, num, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(value_ptr + at, mask=at < num, other=float("-inf")).to(tl.float32)
        order = order_of(x)
        above = (order > bound) & (order >= cutoff) & (at < num)
        if KIND == _PLACE:
            token = tl.load(token_ptr + at, mask=at < num, other=0) if GATHERED else at
            above = (token > bound) & (order >= cutoff) & (at < num)
        if KIND == _COUNT:
            total += above.to(tl.int64)
        else:
            total += tl.where(above, mass_of(x, top, rate, min_p), 0)
    return tl.sum(total)


@triton.jit
def least_bound(
    value_ptr,
    token_ptr,
    num,
    low,
    high,
    wanted,
    cutoff,
    top,
    rate,
    min_p,
    KIND: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least bound in (low, high] above which the weight is less than `wanted`."""
    while high - low > 1:
        middle = low + (high - low) // 2
        weight = weight_above(
            value_ptr, token_ptr, num, middle, cutoff, top, rate, min_p, KIND, GATHERED, BLOCK
        )
        enough = weight < wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high


@triton.jit
def draw_kept(
    value_ptr,
    token_ptr,
    num,
    vocab,
    uniform,
    cutoff,
    top,
    rate,
    min_p,
    GATHERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token in whose mass `uniform` falls, of those whose logit is at least `cutoff`."""
    low = tl.full((), -1, tl.int64)
    high = tl.full((), 0, tl.int64) + vocab - 1
    kept = weight_above(
        value_ptr, token_ptr, num, low, cutoff, top, rate, min_p, _PLACE, GATHERED, BLOCK
    )
    # mass up to a token exceeds the target where less than the rest is above it
    rest = kept - part_of(uniform, kept)
    return least_bound(
        value_ptr, token_ptr, num, low, high, rest, cutoff,
        top, rate, min_p, _PLACE, GATHERED, BLOCK,
    )  # fmt: skip


@triton.jit
def draw_filtered(
    logits_ptr,
    best_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    mass_ptr,
    bound_ptr,
    count_ptr,
    value_ptr,
    token_ptr,
    out_ptr,
    stride_b,
    value_stride,
    vocab,
    num_blocks,
    CANDIDATES: tl.constexpr,
    GATHERED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tokens of rows with top-k or top-p that are still undecided; grid (rows,).

    GATHERED: from the gathered logits, where these hold all that is kept; else `value_ptr` is
    `logits_ptr`.
    """
    row = tl.program_id(0).to(tl.int64)
    undecided = tl.load(out_ptr + row) == _UNDECIDED
    num = tl.load(count_ptr + row) if GATHERED else vocab
    if GATHERED:
        undecided &= num <= CANDIDATES
    if undecided:
        best = tl.load(best_ptr + row)
        top = tl.load(logits_ptr + row * stride_b + best).to(tl.float32)
        high = order_of(top).to(tl.int64)
        rate = (1.0 / tl.load(temperature_ptr + row)).to(tl.float32)
        value_ptr += row * value_stride
        token_ptr += row * value_stride
        if GATHERED:
            low = tl.load(bound_ptr + row).to(tl.int64) - 1
        else:
            low = order_of(tl.full((), float("-inf"), tl.float32)).to(tl.int64) - 1
        at = tl.arange(0, BLOCKS)
        mass = tl.load(mass_ptr + row * num_blocks + at, mask=at < num_blocks, other=0)
        total = tl.sum(mass)
        holds = num > 0
        top_k = tl.load(top_k_ptr + row).to(tl.int64)
        if (top_k > 0) & (top_k < vocab):
            holds &= top_k <= num
            low = least_bound(
                value_ptr, token_ptr, num, low, high, top_k, low,
                top, rate, 0.0, _COUNT, GATHERED, BLOCK,
            ) - 1  # fmt: skip
            total = weight_above(
                value_ptr, token_ptr, num, low, low, top, rate, 0.0, _MASS, GATHERED, BLOCK
            )
        top_p = tl.load(top_p_ptr + row)
        if holds & (top_p < 1.0):
            # the best token is kept however small top-p is
            wanted = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
            wanted = tl.maximum(tl.minimum(wanted, total), 1)
            if GATHERED:
                there = weight_above(
                    value_ptr, token_ptr, num, low, low, top, rate, 0.0, _MASS, GATHERED, BLOCK
                )
                holds &= there >= wanted
            low = least_bound(
                value_ptr, token_ptr, num, low, high, wanted, low,
                top, rate, 0.0, _MASS, GATHERED, BLOCK,
            ) - 1  # fmt: skip
        if holds:
            min_p = tl.load(min_p_ptr + row).to(tl.float32)
            token = draw_kept(
                value_ptr, token_ptr, num, vocab, tl.load(uniform_ptr + row), low + 1,
                top, rate, min_p, GATHERED, BLOCK,
            )  # fmt: skip
            tl.store(out_ptr + row, token)
