"""Steps that a worker runs before it is ready, so that no request pays for first times.

Knows: plans that reach every way through prefill: alone, together, over older tokens here and
elsewhere, kept by all and by few. Kernels are compiled, connections opened, memory taken.
Does not know: how steps run, requests.
"""

from __future__ import annotations

from collections.abc import Iterator

from loongd.wire import Extend, RunStep, Sampling, pack_tokens

SEGMENTS = tuple(range(-12, 0))
"""Ids of the steps' segments, to be freed after; the scheduler's are positive."""
_ALONE = (3000, 700, 90, 1)
_TOGETHER = (4500, 1100, 130, 9)
"""Prompts of a step: a square for a library, and shorter ones for the kernels."""
_PART = 600


def warm_steps(instance: int, world_size: int, most_tokens: int) -> Iterator[RunStep]:
    """Steps for one instance, and then, with others, for all of them in the same order.

    No step has more than `most_tokens` tokens, nor have all of them together.
    """
    yield from _steps([instance], _fitting(_ALONE, most_tokens // 2), SEGMENTS[:6])
    if world_size > 1:
        members = list(range(world_size))
        yield from _steps(members, _fitting(_TOGETHER, most_tokens // 2), SEGMENTS[6:])


def _fitting(lengths: tuple[int, ...], most: int) -> tuple[int, ...]:
    scale = min(1.0, most / (2 * sum(lengths) + 4))  # a prompt grows by no more than its length
    return tuple(max(1, int(length * scale)) for length in lengths)


def _steps(
    members: list[int], lengths: tuple[int, ...], segments: tuple[int, ...]
) -> Iterator[RunStep]:
    """Prompts, and then a longer and a shorter part more of the first one."""
    first = [_prompt(members, n, s) for n, s in zip(lengths, segments, strict=False)]
    yield RunStep(step_id=0, epoch=0, members=members, batch=first[:-1])
    yield RunStep(step_id=0, epoch=0, members=members, batch=first[-1:])
    for count, segment in zip((min(_PART, lengths[0]), 2), segments[-2:], strict=True):
        more = _more(members, first[0], count, segment)
        yield RunStep(step_id=0, epoch=0, members=members, batch=[more])


def _prompt(members: list[int], num_tokens: int, segment: int) -> Extend:
    # kept by the first member, as after a scale-down
    return Extend(
        request_id=f"warm-up {segment}",
        tokens=pack_tokens([0] * num_tokens),
        start=0,
        master=None,
        segment=segment,
        keep=[(members[0], num_tokens)],
        cached=[],
        holders=[],
        sampling=Sampling(),
    )


def _more(members: list[int], before: Extend, num_tokens: int, segment: int) -> Extend:
    return Extend(
        request_id=before.request_id,
        tokens=pack_tokens([0] * num_tokens),
        start=len(before.tokens) // 4,
        master=None,
        segment=segment,
        keep=[(members[-1], num_tokens)],
        cached=[before.segment],
        holders=[members[0]],
        sampling=Sampling(),
    )
