"""How much of a long prefill one step computes, so that others never wait long for their turn.

Knows: the arithmetic of chunks, from the SIB. Does not know: who waits, where anything is.

A chunk is predicted to take the bound at most. Each one costs the step's fixed time again
(launches, exchanges, and the host's work around it); where that would be more than
`OVERHEAD_SHARE` of the chunk, the chunk is longer, and others wait so much longer: by the formula a
prompt loses no more than this share to being cut while nobody else waits. A measured profile knows
more of what a chunk adds; for that nobody waits longer, since it would gain 1 to 3 % (H200, 7B).

Lengths are rounded to a few sizes, the same for every prompt: GPU libraries plan for each pair of
lengths (45 to 80 ms with cuDNN, once), and equal parts keep the group's members in step. The last
chunk takes what is left.
"""

from __future__ import annotations

from math import ceil, sqrt

from loongd.sched.policy import Limits
from loongd.sched.sib import Coefficients, Sib

OVERHEAD_SHARE = 0.05
HOST_S = 0.003
"""Of each chunk, beside the step's own fixed time: a decision, its message, a worker's geometry and
slot lists (0.5 to 1.3 ms for 8,192 tokens after 56,000), the answers."""
SIZES_PER_OCTAVE = 4
LIBRARY_TOKENS = 512
"""Libraries attend to a long prefix with so many queries at a time, of all members together; what
is left over goes to kernels that are slower, or pads a piece (`kernels.cudnn.QUERY_SIZES`)."""
LEAST_UNMEASURED = 512
"""Tokens of each member in all chunks but the last, until the machine is measured. What is believed
of it may be wrong by far: if it seems slow, chunks get smaller, which makes it slower still."""


def overhead_s(coefficients: Coefficients) -> float:
    """What one more chunk adds to a prefill."""
    return coefficients.alpha_s + coefficients.item_s + HOST_S


def least_s(coefficients: Coefficients) -> float:
    """The shortest chunk, in seconds, that loses no more than its share to the overhead, by the
    formula alone."""
    return max(overhead_s(coefficients) / OVERHEAD_SHARE, coefficients.floor_s)


def added_s(sib: Sib, dop: int, *, cached: int, size: int) -> float:
    """What one more chunk adds to a prefill that has come so far, by all that the profile knows:
    twice `size` tokens in two chunks beside in one. By the formula alone it is the fixed time."""
    first, second, both = (
        sib.prefill_s(dop, [(before, new)])
        for before, new in ((cached, size), (cached + size, size), (cached, 2 * size))
    )
    return max(first + second - both, 0.0)


def largest_within(coefficients: Coefficients, *, cached: int, time_s: float) -> int:
    """The most new tokens after `cached` ones in a step of `time_s` seconds; at least 1."""
    free_s = max(0.0, time_s - coefficients.alpha_s - coefficients.item_s)
    linear, square = coefficients.beta_s + 2 * coefficients.gamma_s * cached, coefficients.gamma_s
    if square == 0.0:
        most = free_s / linear if linear > 0.0 else float(1 << 40)
    else:
        # The root of square * n^2 + linear * n = free, in the form that loses no digits.
        root = linear + sqrt(linear * linear + 4 * square * free_s)
        most = 2 * free_s / root if root > 0.0 else 0.0
    return max(1, int(most))


def longest_short(coefficients: Coefficients, bound_s: float) -> int:
    """The longest prompt that one instance computes within the bound, or in twice its fixed time
    where that is longer."""
    fixed_s = coefficients.alpha_s + coefficients.item_s
    time_s = max(bound_s, 2 * fixed_s, coefficients.floor_s)
    return largest_within(coefficients, cached=0, time_s=time_s)


def aligned_down(most: int, dop: int) -> int:
    """The largest size that is not above `most`: each member computes the same number of tokens,
    one of `SIZES_PER_OCTAVE` in each octave. `most` itself when it is below `dop`."""
    each = most // dop
    return (each - each % _step(each, dop)) * dop or most


def aligned_up(least: int, dop: int) -> int:
    """The smallest size that is not below `least`."""
    each = -(-least // dop)
    step = _step(each, dop)
    return -(-each // step) * step * dop


def _step(each: int, dop: int) -> int:
    octave = 1 << max(0, each.bit_length() - 1)
    step = max(1, octave // SIZES_PER_OCTAVE)
    piece = 1 << max(0, (LIBRARY_TOKENS // dop).bit_length() - 1)
    return step if each < 2 * piece else max(step, piece)


def next_chunk(sib: Sib, dop: int, *, cached: int, left: int, limits: Limits) -> int:
    """New tokens of the next chunk of a prefill that has `left` tokens to go."""
    coefficients, bound_s = sib.prefill_coefficients(dop), limits.max_prefill_wait_s
    most = limits.max_step_tokens * dop

    def step_s(size: int) -> float:
        return sib.prefill_s(dop, [(cached, size)])

    if left <= most and step_s(left) <= bound_s:
        return left
    least = aligned_up(
        largest_within(coefficients, cached=cached, time_s=least_s(coefficients)), dop
    )
    if not sib.profile.measured:
        least = max(least, LEAST_UNMEASURED * dop)
    within = largest_within(coefficients, cached=cached, time_s=bound_s)
    size = max(aligned_down(within, dop), least)
    # the profile may know better than its formula; but the fewer queries over a long prefix, the
    # more each of them loses
    least = max(least, aligned_up(-(-within // 2), dop))
    while size > least and step_s(size) > bound_s:
        size = max(aligned_down(size - 1, dop), least)
    while size < min(most, left) and step_s(longer := aligned_up(size + 1, dop)) <= bound_s:
        size = longer
    return fit_chunk(min(size, most), dop, left=left)


def fit_chunk(most: int, dop: int, *, left: int) -> int:
    """All that is `left` when a step may take so many; else an aligned chunk of at most `most`."""
    return left if left <= most else aligned_down(most, dop)


def left_s(sib: Sib, dop: int, *, cached: int, left: int, limits: Limits) -> float:
    """Predicted seconds until a prefill is done on `dop` instances alone, in chunks.

    Counts them as if all were as one half way: they get smaller as much as later ones take longer.
    """
    once_s = sib.prefill_s(dop, [(cached, left)])
    if next_chunk(sib, dop, cached=cached, left=left, limits=limits) == left:
        return once_s
    middle = cached + left // 2
    size = next_chunk(sib, dop, cached=middle, left=left, limits=limits)
    more_s = added_s(sib, dop, cached=middle, size=size)
    return once_s + more_s * (max(ceil(left / size), 2) - 1)
