"""Plans: what a group must do in one step, as frozen values.

Knows: lengths, instances, segments. Does not know: token ids (the manager has them) or slot
numbers (the workers have them).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class PrefillItem(msgspec.Struct, frozen=True, gc=False):
    """New prompt tokens of one request, dealt over the group in stripes.

    `keep` is the placement: consecutive runs `(instance, tokens)` in position order that sum to
    `num_tokens`. `cached` are segments of older tokens, `holders` the members that hold any of
    them, `holder_tokens` how many each of these holds. `samples` says whether a token is drawn at
    the end (false for all but the last chunk).
    """

    request_id: str
    start: int
    num_tokens: int
    segment: int
    keep: tuple[tuple[int, int], ...]
    cached: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    holder_tokens: tuple[int, ...] = ()
    samples: bool = True


class Layers(msgspec.Struct, frozen=True, gc=False):
    """The layers that one part of a chunk runs, `first` up to `end`, of `total`."""

    first: int
    end: int
    total: int

    @property
    def pauses(self) -> bool:
        """Some are left."""
        return self.end < self.total

    @property
    def share(self) -> float:
        """Of the chunk's work."""
        return (self.end - self.first) / self.total


class DecodeItem(msgspec.Struct, frozen=True, gc=False):
    """The newest token of one request: `master` computes it and keeps its KV in `segment`.

    How many tokens each holder has is not told, as in a `PrefillItem`: one query is always fewer
    bytes than the keys, and thousands of items are planned each second (hence a struct, which is
    made in a fifth of a dataclass's time).
    """

    request_id: str
    position: int
    master: int
    segment: int
    cached: tuple[int, ...]
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """One prefill step of a group; `members` in ring order, dop = len(members).

    With `layers` it is a part of a chunk, which takes several steps to pass through all of them;
    `resumes` is the part before it, on the same members; 0 for the first.
    """

    step_id: int
    members: tuple[int, ...]
    items: tuple[PrefillItem, ...]
    layers: Layers | None = None
    resumes: int = 0

    @property
    def dop(self) -> int:
        return len(self.members)

    @property
    def pauses(self) -> bool:
        """It ends before the last layer: nothing is drawn, and the rest is to come."""
        return self.layers is not None and self.layers.pauses

    @property
    def finished_tokens(self) -> list[int]:
        """Tokens of each item that have passed through all layers when it ends."""
        return [0 if self.pauses else item.num_tokens for item in self.items]

    @property
    def share(self) -> float:
        """The share of its chunk's work that it does."""
        return 1.0 if self.layers is None else self.layers.share


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One decode step of a group: every item one token.

    `follows` is the step in flight that this one goes on from, with the same members, requests
    and masters; its tokens are those that `follows` is going to draw. 0 when it follows none.
    """

    step_id: int
    members: tuple[int, ...]
    items: tuple[DecodeItem, ...]
    follows: int = 0

    @property
    def dop(self) -> int:
        return len(self.members)

    @property
    def masters(self) -> tuple[int, ...]:
        """The members that are master of at least one request, in group order."""
        used = {item.master for item in self.items}
        return tuple(m for m in self.members if m in used)


@dataclass(frozen=True, slots=True)
class MigratePlan:
    """A copy of KV from one instance to another, as a step of the two.

    `moves` are (segment, tokens): of each segment, the newest so many tokens that `source` holds
    go to `target` and leave `source`. A segment keeps its id and its place in its request.
    """

    step_id: int
    source: int
    target: int
    moves: tuple[tuple[int, int], ...]

    @property
    def members(self) -> tuple[int, ...]:
        return (self.source, self.target)

    @property
    def num_tokens(self) -> int:
        return sum(tokens for _, tokens in self.moves)
