"""A batch of requests lived through under different plans, with all the bits it leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from cluster_kit import Cluster, Sequence
from torch import Tensor

from loongd.wire import Sampled, Sampling

NUM_INSTANCES = 4
SAMPLING = Sampling(num_logprobs=3)


@dataclass(frozen=True)
class Life:
    """What became of a request: its new tokens, their log-probabilities, and its K and V.

    `kv` is (2, layers, tokens, kv heads, head dim) in order of position, wherever they lay: but for
    the last layer's output, every hidden state leaves its mark there.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    kv: Tensor


Plan = Callable[[Cluster, list[Sequence], int], list[list[float | None]]]
"""Prefills the sequences and appends so many tokens to each; their log-probabilities."""


def live(cluster: Cluster, prompts: list[list[int]], num_new: int, plan: Plan) -> list[Life]:
    """All prompts in one batch under a plan, in an empty cluster."""
    cluster.reset()
    sequences = [Sequence(str(n), list(prompt)) for n, prompt in enumerate(prompts)]
    logprobs = plan(cluster, sequences, num_new)
    cluster.check(*sequences)
    return [
        Life(tuple(sequence.tokens[len(prompt) :]), tuple(told), kv_of(cluster, sequence))
        for sequence, prompt, told in zip(sequences, prompts, logprobs, strict=True)
    ]


def kv_of(cluster: Cluster, sequence: Sequence) -> Tensor:
    """The request's K and V from all pools, in order of position, on the CPU."""
    positions, blocks = [], []
    for pool in cluster.pools:
        positions.extend(pool.positions_of(sequence.segments).tolist())
        blocks.append(pool.read(pool.slots_of(sequence.segments)).cpu())
    assert sorted(positions) == list(range(sequence.done))
    return torch.cat(blocks, dim=2)[:, :, torch.tensor(positions).argsort()]


def differing(mine: Life, theirs: Life) -> int:
    """Values of K and V whose bits differ (NaN equals nothing)."""
    length = min(mine.kv.shape[2], theirs.kv.shape[2])
    return int((mine.kv[:, :, :length] != theirs.kv[:, :, :length]).sum())


# ---- plans ------------------------------------------------------------------------------------


def on_one(cluster: Cluster, sequences: list[Sequence], num_new: int) -> list[list[float | None]]:
    """Instance 0 alone: one step for all prompts, then decode."""
    work = [(one, len(one.tokens), None, [(0, len(one.tokens))]) for one in sequences]
    drawn = cluster.extend([0], work, sampling=_sampling(sequences))
    return _decode(cluster, sequences, drawn, num_new, lambda *_: ([0], [0] * len(sequences)))


def elastic(seed: int) -> Plan:
    """Everything that scheduling may do, at random.

    The batch in two or three chunks, each striped over its own group in its own order and kept
    wherever it falls (scaled down as it is made); decode with masters that wander and groups that
    grow; migrations between; one request preempted and prefilled again in the middle.
    """

    def plan(cluster: Cluster, sequences: list[Sequence], num_new: int) -> list[list[float | None]]:
        draw = random.Random(seed)
        order = list(sequences)
        draw.shuffle(order)
        drawn = {}
        for part in (order[: len(order) // 3], order[len(order) // 3 :]):
            drawn |= _prefill(cluster, part, draw, draw.randint(1, 3))
        victim = draw.choice(sequences)

        def group(step: int) -> tuple[list[int], list[int]]:
            for one in draw.sample(sequences, min(2, len(sequences))):
                source = draw.choice(one.holders)
                target = draw.choice([i for i in range(NUM_INSTANCES) if i != source])
                cluster.migrate(one, source, target, draw.randint(1, one.on(source)))
            if step == num_new // 2:
                _preempt(cluster, victim, draw)
            held = {i for one in sequences for i in one.holders}
            members = sorted(held | set(range(min(step, NUM_INSTANCES))))
            draw.shuffle(members)
            return members, [draw.choice(members) for _ in sequences]

        return _decode(cluster, sequences, drawn, num_new, group)

    return plan


def _prefill(
    cluster: Cluster, sequences: list[Sequence], draw: random.Random, num_chunks: int
) -> dict[str, Sampled]:
    drawn: dict[str, Sampled] = {}
    for chunk in range(num_chunks):
        last = chunk == num_chunks - 1
        held = {i for one in sequences for i in one.holders}
        extra = draw.randint(0 if held else 1, NUM_INSTANCES - len(held))
        others = [i for i in range(NUM_INSTANCES) if i not in held]
        members = [*held, *draw.sample(others, extra)]
        draw.shuffle(members)
        work = []
        for one in sequences:
            left = len(one.tokens) - one.done
            count = left if last else draw.randint(0, left - 1)
            if count:
                cut = draw.randint(0, count)
                keep = [(draw.choice(members), cut), (draw.choice(members), count - cut)]
                work.append((one, count, None, [(i, n) for i, n in keep if n]))
        if work:
            drawn = cluster.extend(members, work, sample=last, sampling=_sampling(sequences))
    return drawn


def _preempt(cluster: Cluster, victim: Sequence, draw: random.Random) -> None:
    """Forget the request's KV and make it again, all but the token that decode is about to add."""
    cluster.free(victim)
    victim.segments, victim.placed, victim.done = [], {}, 0
    newest = victim.tokens.pop()
    _prefill(cluster, [victim], draw, 2)
    victim.tokens.append(newest)


def _decode(
    cluster: Cluster,
    sequences: list[Sequence],
    drawn: dict[str, Sampled],
    num_new: int,
    group: Callable[[int], tuple[list[int], list[int]]],
) -> list[list[float | None]]:
    logprobs: list[list[float | None]] = [[] for _ in sequences]
    for step in range(num_new):
        for one, told in zip(sequences, logprobs, strict=True):
            sampled = drawn[one.name]
            one.tokens.append(sampled.token)
            told.append(sampled.logprob)
        if step + 1 < num_new:
            members, masters = group(step)
            work = [(one, 1, m, []) for one, m in zip(sequences, masters, strict=True)]
            drawn = cluster.extend(members, work, sampling=_sampling(sequences))
    return logprobs


def _sampling(sequences: list[Sequence]) -> dict[str, Sampling]:
    return {one.name: SAMPLING for one in sequences}
