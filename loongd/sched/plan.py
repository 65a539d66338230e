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
    """One prefill step of a group; `members` in ring order, dop = len(members)."""

    step_id: int
    members: tuple[int, ...]
    items: tuple[PrefillItem, ...]

    @property
    def dop(self) -> int:
        return len(self.members)


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
