"""Writing rows to a peer's memory and telling it, without the host: for exchanges inside graphs.

Knows: a flag is an int32 counter in the receiver's memory. Writers add to it, each with release
order at system scope, after their rows; the receiver waits for the expected sum and sets it back
to 0, so the next round needs no new number and a captured graph can be replayed for ever.
Does not know: what the rows are, who the peers are. A round must not begin before the receiver
has seen the one before; decode's question and answer are such a pair.

A wait has no time-out: a peer that is gone has lost its process, and the daemon then ends this
one too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_MAX_PROGRAMS = 16
"""Programs of one push: enough for NVLink's latency at the sizes of decode, and few counts."""
_LARGE_ELEMENTS = 1 << 20
_MAX_LARGE_PROGRAMS = 64
"""Of a push of so many elements or more, which takes as long as the link needs for its bytes."""


@triton.jit
def push_block(source_ptr, target_ptr, flag_ptr, num_elements, BLOCK: tl.constexpr):
    """Copy in strides of the grid, then count this program; grid (programs,)."""
    for start in range(tl.program_id(0) * BLOCK, num_elements, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(source_ptr + at, mask=at < num_elements)
        tl.store(target_ptr + at, x, mask=at < num_elements)
    # all threads' stores come before the one thread's release
    tl.debug_barrier()
    tl.atomic_add(flag_ptr, 1, sem="release", scope="sys")


@triton.jit
def add_to_flag(flag_ptr, count):
    """What kernels before this one in the stream have written is there when the flag is."""
    tl.atomic_add(flag_ptr, count, sem="release", scope="sys")


@triton.jit
def wait_for_flag(flag_ptr, expected):
    """Return when the flag is `expected`, which becomes 0."""
    seen = tl.atomic_cas(flag_ptr, expected, 0, sem="acquire", scope="sys")
    while seen != expected:
        seen = tl.atomic_cas(flag_ptr, expected, 0, sem="acquire", scope="sys")


def push_counts(num_elements: int) -> int:
    """What a push of so many elements adds to the flag."""
    most = _MAX_PROGRAMS if num_elements < _LARGE_ELEMENTS else _MAX_LARGE_PROGRAMS
    return max(1, min(most, -(-num_elements // _BLOCK)))


def push_rows(source: Tensor, target: Tensor, flag: Tensor) -> None:
    """Copy contiguous `source` to the front of `target`, mapped from a peer, and count.

    `flag` (int32, one element) grows by `push_counts(source.numel())`.
    """
    assert source.is_contiguous()
    programs = push_counts(source.numel())
    push_block[(programs,)](source, target, flag, source.numel(), BLOCK=_BLOCK, num_warps=4)


def raise_flag(flag: Tensor, count: int = 1) -> None:
    """Add `count` after all that this stream has done so far."""
    add_to_flag[(1,)](flag, count, num_warps=1)


def await_flag(flag: Tensor, expected: int = 1) -> None:
    """Hold this stream until `flag` is `expected`, and set it to 0."""
    wait_for_flag[(1,)](flag, expected, num_warps=1)


def has_waited() -> bool:
    """Whether this process has compiled a wait, so that waiting again is waiting, in a rehearsal
    of launches too."""
    return any(compiled for compiled, *_ in wait_for_flag.device_caches.values())
