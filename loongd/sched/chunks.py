"""How much of a long prefill one step computes, so that others never wait long for their turn.

Knows: the arithmetic of chunks and their parts, from the SIB. Does not know: who waits, where
anything is.

A step is predicted to take `max_prefill_wait_s` at most, the bound. A chunk may take longer, in
parts of so many layers that each keeps to it: between two of them others have their turn as between
two chunks, but the group stays and holds the chunk's hidden states. Short chunks lose much (few
queries over a long prefix are slow, and each chunk costs its launches and exchanges again), long
ones keep their group for long. So a chunk is as long as it must be to lose little, where no other
long prompt has begun, or waits behind its first chunk, and the group has all instances; elsewhere
it is one step.

Each chunk costs the step's fixed time again; where that would be more than `OVERHEAD_SHARE` of the
chunk, the chunk is longer: by the formula a prompt loses no more than this share to being cut while
nobody else waits. Such a chunk runs in parts as well, unless another one is paused there.

Lengths are rounded to a few sizes, the same for every prompt: GPU libraries plan for each pair of
lengths (45 to 80 ms with cuDNN, once), and equal parts keep the group's members in step. The last
chunk takes what is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt

from loongd.sched.plan import Layers
from loongd.sched.policy import Limits
from loongd.sched.sib import Coefficients, Sib

OVERHEAD_SHARE = 0.05
"""Of a chunk's time, at most, what it costs to be a step of its own."""
HOST_S = 0.003
"""Of each chunk, beside the step's own fixed time: a decision, its message, a worker's geometry and
slot lists (0.5 to 1.3 ms for 8,192 tokens after 56,000), the answers."""
LEAST_LOSS = 0.025
"""What a prompt may lose to its chunks before they are longer: a group stays for a chunk."""
SIZES_PER_OCTAVE = 4
MORE_SIZES_TOKENS = 32768
"""Tokens of each member from which there are twice as many sizes: such chunks take seconds, and few
of them make a prompt."""
LIBRARY_TOKENS = 512
"""Libraries attend to a long prefix with so many queries at a time, of all members together; what
is left over goes to kernels that are slower, or pads a piece (`kernels.cudnn.QUERY_SIZES`)."""
LEAST_UNMEASURED = 512
"""Tokens of each member in all chunks but the last, until the machine is measured. What is believed
of it may be wrong by far: if it seems slow, chunks get smaller, which makes it slower still."""

BESIDE_SHARE = 4
"""This fraction of an instance's tokens in a step is left for steps beside a paused chunk."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a chunk may take, and how many new tokens of each instance."""

    time_s: float
    most_tokens: int


def in_one_step(limits: Limits) -> Pace:
    """For a chunk without parts."""
    return Pace(limits.max_prefill_wait_s, limits.max_step_tokens)


def beside_part(limits: Limits) -> Pace:
    """For a chunk where another one is paused, which holds memory."""
    return Pace(limits.max_prefill_wait_s, _beside_tokens(limits))


def in_parts(limits: Limits) -> Pace:
    """For a chunk in parts, of which each takes the bound at most."""
    one, bound_s = in_one_step(limits), limits.max_prefill_wait_s
    most = limits.max_step_tokens - _beside_tokens(limits)
    if limits.num_layers == 1 or most <= 0:
        return one
    time_s = limits.num_layers * (bound_s - HOST_S)
    return Pace(time_s, most) if time_s > bound_s else one


def alone(sib: Sib, dop: int, *, cached: int, left: int, limits: Limits) -> Pace:
    """For a long prompt on all `dop` instances with no other beside it: the shortest chunks, of one
    step or in parts, that cost it no more than `LEAST_LOSS`, for a chunk's group stays."""
    pace, longest = in_one_step(limits), in_parts(limits)
    most_s = (1.0 + LEAST_LOSS) * sib.prefill_s(dop, [(cached, left)])
    while left_s(sib, dop, cached=cached, left=left, pace=pace) > most_s:
        if 2 * pace.time_s >= longest.time_s:
            return longest
        pace = Pace(2 * pace.time_s, longest.most_tokens)
    return pace


def _beside_tokens(limits: Limits) -> int:
    share = -(-limits.max_step_tokens // BESIDE_SHARE)
    return max(share, limits.max_num_batched_tokens)


def first_layers(step_s: float, limits: Limits) -> Layers | None:
    """The first part of a chunk that takes so long; None when that is within the bound, or when
    `num_layers` is 1. A part has one layer at least."""
    num_parts = parts_of(step_s, limits)
    if num_parts == 1:
        return None
    return Layers(0, ceil(limits.num_layers / num_parts), limits.num_layers)


def next_layers(before: Layers) -> Layers:
    """The part of a chunk behind that one: as many layers, or what is left."""
    end = min(before.end + before.end - before.first, before.total)
    return Layers(before.end, end, before.total)


def parts_of(step_s: float, limits: Limits) -> int:
    """Of a chunk that takes so long."""
    bound_s = limits.max_prefill_wait_s
    if step_s <= bound_s or limits.num_layers == 1:
        return 1
    layers = int(limits.num_layers * bound_s / step_s)
    return ceil(limits.num_layers / max(1, layers))


def overhead_s(coefficients: Coefficients) -> float:
    """What one more chunk adds to a prefill."""
    return coefficients.alpha_s + coefficients.item_s + HOST_S


def least_s(coefficients: Coefficients) -> float:
    """The shortest chunk, in seconds, that loses no more than its share to the overhead, by the
    formula alone."""
    return max(overhead_s(coefficients) / OVERHEAD_SHARE, coefficients.floor_s)


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
    if octave >= MORE_SIZES_TOKENS:
        step //= 2
    piece = 1 << max(0, (LIBRARY_TOKENS // dop).bit_length() - 1)
    return step if each < 2 * piece else max(step, piece)


def next_chunk(sib: Sib, dop: int, *, cached: int, left: int, pace: Pace) -> int:
    """New tokens of the next chunk of a prefill that has `left` tokens to go."""
    coefficients, bound_s = sib.prefill_coefficients(dop), pace.time_s
    most = pace.most_tokens * dop

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


def left_s(sib: Sib, dop: int, *, cached: int, left: int, pace: Pace) -> float:
    """Predicted seconds until a prefill is done on `dop` instances alone, in chunks.

    Counts them as if all were as one half way: they get smaller as much as later ones take longer.
    """
    once_s = sib.prefill_s(dop, [(cached, left)])
    size = next_chunk(sib, dop, cached=cached + left // 2, left=left, pace=pace)
    if size == left:
        return once_s
    middle = cached + max(0, left - size) // 2
    coefficients, count = sib.prefill_coefficients(dop), left / size
    rest_s = (ceil(count) - count) * (coefficients.alpha_s + coefficients.item_s)
    return max(once_s, sib.prefill_s(dop, [(middle, size)]) * count + rest_s)
