"""Random plans for a set of instances, as a scheduler could have made them.

Knows: requests that come, get their prompts in chunks, decode, move and end; which instance holds
how many tokens of each; free slots. Every choice comes from one `random.Random`, so processes
with the same seed make the same plans and need not talk.
Does not know: tensors, processes, time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from loongd.wire import Extend, RunMigrate, RunStep, pack_tokens

MOST_REQUESTS = 10
"""Live requests at most."""
MOST_DECODED = 6
"""Tokens that a request decodes at most."""


@dataclass(frozen=True, slots=True)
class Free:
    """A request has ended: everyone forgets its segments."""

    request: int
    segments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A step of a group, and how its attention is made.

    `window` is the sliding window of the second layer in tokens, None for none. With
    `round_tokens`, keys of older tokens travel wherever that evens out the work, in rounds of so
    many tokens; without, as row sizes tell.
    """

    message: RunStep
    window: int | None
    round_tokens: int | None


Plan = Step | RunMigrate | Free


@dataclass(slots=True)
class Request:
    """One request: how far it is and where its tokens lie."""

    number: int
    prompt_tokens: int
    total_tokens: int
    done: int = 0
    segments: list[int] = field(default_factory=list)
    placed: dict[int, dict[int, int]] = field(default_factory=dict)
    """segment -> instance -> tokens"""
    home: int | None = None
    """The instance that keeps its tokens where it has room, None for any."""

    def on(self, instance: int) -> int:
        """Tokens that the instance holds."""
        return sum(where.get(instance, 0) for where in self.placed.values())

    def holders(self, instances: range | list[int]) -> list[int]:
        """Those of `instances` that hold a token, in that order."""
        return [i for i in instances if self.on(i)]


def rows_of(step: RunStep, member: int) -> list[tuple[int, list[int]]]:
    """(request, positions) of the new tokens that a member computes, in the order of its rows."""
    index, dop = step.members.index(member), len(step.members)
    rows = []
    for extend in sorted(step.batch, key=lambda e: e.master is not None):
        new = range(extend.start, extend.start + len(extend.tokens) // 4)
        mine = new[index::dop] if extend.master is None else new if extend.master == member else []
        rows.append((int(extend.request_id), list(mine)))
    return rows


class RandomPlans:
    """An endless sequence of plans over instances 0 .. `num_instances` - 1."""

    def __init__(self, seed: int, num_instances: int, *, num_slots: int, longest: int) -> None:
        """`longest` is the longest prompt in tokens, `num_slots` the pool of each instance.

        All pools together must hold all live requests, or the sequence may come to an end.
        """
        self._random = random.Random(seed)
        self._instances = range(num_instances)
        self._free = dict.fromkeys(self._instances, num_slots)
        self._longest = longest
        self._live: list[Request] = []
        self._ids = 0

    def __iter__(self) -> Iterator[Plan]:
        while True:
            self._arrive()
            ended = next((r for r in self._live if r.done == r.total_tokens), None)
            if ended is not None:
                yield self._end(ended)
            elif len(self._instances) > 1 and self._random.random() < 0.15:
                yield from self._migration()
            else:
                yield from self._step()

    def _new_id(self) -> int:
        self._ids += 1
        return self._ids

    def _arrive(self) -> None:
        draw = self._random
        if len(self._live) < MOST_REQUESTS and draw.random() < 0.5:
            short = draw.choice((1, 2, 3, 5, 8, 17))
            prompt = min(draw.choice((short, draw.randint(1, self._longest))), self._longest)
            home = draw.choice((None, draw.choice(self._instances)))
            total = prompt + draw.randint(1, MOST_DECODED)
            self._live.append(Request(self._new_id(), prompt, total, home=home))

    def _end(self, request: Request) -> Free:
        self._live.remove(request)
        for instance in self._instances:
            self._free[instance] += request.on(instance)
        return Free(request.number, tuple(request.segments))

    def _migration(self) -> Iterator[RunMigrate]:
        """Some of the newest tokens of a request, from any holder to any other instance."""
        draw = self._random
        held = [r for r in self._live if r.holders(self._instances)]
        if not held:
            return
        request = draw.choice(held)
        source = draw.choice(request.holders(self._instances))
        target = draw.choice([i for i in self._instances if i != source])
        count = min(draw.randint(1, request.on(source)), self._free[target])
        moves = []
        for segment in reversed(request.segments):
            where = request.placed[segment]
            tokens = min(count, where.get(source, 0))
            if tokens:
                moves.append((segment, tokens))
                self._put(where, source, -tokens)
                self._put(where, target, tokens)
                count -= tokens
        if moves:
            yield RunMigrate(
                step_id=self._new_id(),
                epoch=1,
                source=source,
                target=target,
                moves=moves,
                verify=True,
            )

    def _put(self, where: dict[int, int], instance: int, tokens: int) -> None:
        where[instance] = where.get(instance, 0) + tokens
        self._free[instance] -= tokens

    def _step(self) -> Iterator[Step]:
        """Requests whose holders are all in a random group, small groups most often."""
        draw = self._random
        size = min(draw.randint(1, len(self._instances)), draw.randint(1, len(self._instances)))
        members = draw.sample(self._instances, size)
        fitting = [r for r in self._live if set(r.holders(self._instances)) <= set(members)]
        fitting = [r for r in fitting if r.done < r.total_tokens]
        chosen = draw.sample(fitting, min(draw.randint(1, 4), len(fitting)))
        batch = [extend for r in chosen for extend in self._extend(r, members)]
        if batch:
            window = draw.choice((None, None, draw.randint(1, self._longest)))
            rounds = draw.choice((None, draw.randint(1, 8), draw.randint(1, self._longest)))
            message = RunStep(step_id=self._new_id(), epoch=1, members=members, batch=batch)
            yield Step(message, window, rounds)

    def _extend(self, request: Request, members: list[int]) -> Iterator[Extend]:
        """The request's next chunk, or its next token; none when nothing fits."""
        draw, dop = self._random, len(members)
        left = max(request.prompt_tokens - request.done, 1)
        # one that has a home gets a large second chunk, whose older tokens are all there
        most = left if request.home is None or request.done else max(left // 2, 1)
        wanted = draw.choice((most, most, draw.randint(1, left), 1, dop - 1, dop, dop + 1))
        count = min(max(wanted, 1), left)
        master = None if draw.random() < 0.6 else draw.choice(members)
        keep = self._placement(members if master is None else [master], count, request.home)
        if not keep:
            return
        holders = request.holders(members)
        tells = draw.random() < 0.7
        segment = self._new_id()
        yield Extend(
            request_id=str(request.number),
            tokens=pack_tokens([0] * count),
            start=request.done,
            master=master,
            segment=segment,
            keep=keep if master is None else [],
            cached=list(request.segments),
            holders=holders,
            sampling=None,
            holder_tokens=[request.on(h) for h in holders] if tells else [],
        )
        where = request.placed[segment] = {}
        for instance, tokens in keep:
            self._put(where, instance, tokens)
        request.segments.append(segment)
        request.done += count

    def _placement(self, allowed: list[int], count: int, home: int | None) -> list[tuple[int, int]]:
        """Consecutive runs at home or on random instances, as free slots allow; [] when they do
        not."""
        draw = self._random
        free = {i: self._free[i] for i in allowed}
        if sum(free.values()) < count:
            return []
        keep: list[tuple[int, int]] = []
        while count:
            at_home = home is not None and free.get(home, 0) > 0
            instance = home if at_home else draw.choice([i for i, slots in free.items() if slots])
            most = min(count, free[instance])
            tokens = most if at_home else draw.choice((most, draw.randint(1, most)))
            keep.append((instance, tokens))
            free[instance] -= tokens
            count -= tokens
        return keep
