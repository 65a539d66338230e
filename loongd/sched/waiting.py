"""The waiting queue: requests that were running before, then new ones, each in arrival order."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from loongd.sched.request import Request


class WaitingQueue:
    """Adding, removing and looking at the front are cheap at any length; requeueing is rare."""

    def __init__(self) -> None:
        # Not dicts: looking at the front of a dict passes all places that removals left empty.
        self._resumed: OrderedDict[str, Request] = OrderedDict()
        self._new: OrderedDict[str, Request] = OrderedDict()

    def add(self, request: Request) -> None:
        """A new request joins the end."""
        self._new[request.request_id] = request

    def requeue(self, request: Request) -> None:
        """A request that lost its KV joins the front, behind older ones of its kind."""
        resumed = sorted([*self._resumed.values(), request], key=lambda r: r.order)
        self._resumed = OrderedDict((r.request_id, r) for r in resumed)

    def remove(self, request_id: str) -> Request | None:
        """Take a request out, wherever it is; None when it does not wait."""
        return self._resumed.pop(request_id, None) or self._new.pop(request_id, None)

    def get(self, request_id: str) -> Request | None:
        return self._resumed.get(request_id) or self._new.get(request_id)

    def __iter__(self) -> Iterator[Request]:
        return chain(self._resumed.values(), self._new.values())

    def __len__(self) -> int:
        return len(self._resumed) + len(self._new)
