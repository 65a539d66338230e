"""The waiting queue: requests that were running before, then new ones, each in arrival order."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from heapq import merge
from itertools import chain
from operator import attrgetter

from loongd.sched.request import Request


class WaitingQueue:
    """Adding, removing and looking at the front are cheap at any length; requeueing is rare."""

    def __init__(self) -> None:
        # Not dicts: looking at the front of a dict passes all places that removals left empty.
        self._resumed: OrderedDict[str, Request] = OrderedDict()
        self._new: OrderedDict[str, Request] = OrderedDict()
        # New ones once more, by the octave of their length.
        self._octaves: defaultdict[int, OrderedDict[str, Request]] = defaultdict(OrderedDict)

    def add(self, request: Request) -> None:
        """A new request joins the end."""
        self._new[request.request_id] = request
        self._octaves[request.num_tokens.bit_length()][request.request_id] = request

    def requeue(self, request: Request) -> None:
        """A request that lost its KV joins the front, behind older ones of its kind."""
        resumed = sorted([*self._resumed.values(), request], key=lambda r: r.order)
        self._resumed = OrderedDict((r.request_id, r) for r in resumed)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, wherever it is; None when it does not wait."""
        request = self._resumed.pop(request_id, None)
        if request is None:
            request = self._new.pop(request_id, None)
            if request is not None:
                del self._octaves[request.num_tokens.bit_length()][request_id]
        return request

    def get(self, request_id: str) -> Request | None:
        return self._resumed.get(request_id) or self._new.get(request_id)

    def shorter(self, most_tokens: int) -> Iterator[Request]:
        """New requests of at most so many tokens, in order of arrival, however many longer ones
        wait between them."""
        octaves = [o for o in sorted(self._octaves) if o <= most_tokens.bit_length()]
        queues = (self._octaves[octave].values() for octave in octaves)
        ordered = merge(*queues, key=attrgetter("order"))
        return (request for request in ordered if request.num_tokens <= most_tokens)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._resumed.values(), self._new.values())

    def __len__(self) -> int:
        return len(self._resumed) + len(self._new)
