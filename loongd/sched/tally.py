"""What the running requests count for, kept up to date instead of counted anew for each decision.

With thousands of running requests a decision would spend most of its time on sums over all of
them, though an event changes a few. So whoever changes a request that runs (its phase, its part of
a prefill, master, holders, or what it waits for) calls `touch`, whoever lets decoding requests grow
calls `grew`, and `settle` counts anew what these name.

Knows: the sums that decisions start from. Does not know: decisions, or why a request changed.
`State` owns it, settles it before each look, and proves it against a full count in `check`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from loongd.sched.components import Component, connect, links_of
from loongd.sched.instance import InstanceView
from loongd.sched.request import Phase, Request

Links = tuple[int, ...]


@dataclass(slots=True, eq=False)
class _Share:
    """What some requests were last counted for; `reserved` by master."""

    committed: int = 0
    reserved: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Linked:
    """Decoding requests with the same links, in the order in which they began to run, except
    while not `in_order`."""

    requests: dict[str, Request] = field(default_factory=dict)
    share: _Share = field(default_factory=_Share)
    in_order: bool = True


class Tally:
    """Sums over the running requests, as of the last `settle`.

    Attributes:
        committed: slots that they may need, as admission counts.
        reserved: of each instance, slots that they count on beyond those they have; may lack
            instances, which then have none.
        prefilling: those in prefill, by id.
        unfinished: of these, those with a part of their prefill to come, in a step or not.
    """

    def __init__(self) -> None:
        self.committed = 0
        self.reserved: dict[int, int] = {}
        self.prefilling: dict[str, Request] = {}
        self.unfinished: dict[str, Request] = {}
        self._touched: dict[str, Request] = {}
        self._grown: set[int] = set()
        self._stale: set[Links] = set()
        # Requests that wait for a slot on a busy instance: their links change with its step.
        self._wanting: dict[str, Request] = {}
        self._by_links: dict[Links, _Linked] = {}
        self._prefills: dict[str, _Share] = {}
        self._links: dict[str, Links] = {}
        # None when a decoding request came, went or got other links since they were found.
        self._components: tuple[Component, ...] | None = None
        self._component_of: dict[int, Component] = {}

    @property
    def components(self) -> Sequence[Component]:
        """Decode groups, busy or not, by lowest instance."""
        if self._components is None:
            self._find_components()
        assert self._components is not None
        return self._components

    @property
    def component_of(self) -> Mapping[int, Component]:
        """The decode group of each instance that has one."""
        if self._components is None:
            self._find_components()
        return self._component_of

    def touch(self, request: Request) -> None:
        """A request began or ceased to run, or changed in what it counts for."""
        self._touched[request.request_id] = request

    def grew(self, instances: Iterable[int]) -> None:
        """Decoding requests whose links are among these instances have generated tokens."""
        self._grown.update(instances)

    def settle(self, instances: Mapping[int, InstanceView]) -> None:
        """Count anew what was touched or grew."""
        for request in (self._touched | self._wanting).values():
            self._place(request, instances)
        self._touched.clear()
        if self._stale or self._grown:
            for links, linked in self._by_links.items():
                if links in self._stale or not self._grown.isdisjoint(links):
                    self._count(linked)
            self._stale.clear()
            self._grown.clear()

    def _place(self, request: Request, instances: Mapping[int, InstanceView]) -> None:
        """Put a request where it belongs now, and count it there."""
        request_id, links = request.request_id, links_of(request, instances)
        before = self._links.get(request_id)
        if before is not None and before != links:
            self._unlink(request_id, before)
        self._drop_prefill(request_id)
        if links is not None:
            if before != links:
                self._link(request, links)
            self._stale.add(links)
        elif request.phase is Phase.PREFILL:
            self._add_prefill(request)
        if links is not None and request.wanted is not None:
            self._wanting[request_id] = request
        else:
            self._wanting.pop(request_id, None)

    def _add_prefill(self, request: Request) -> None:
        request_id, left = request.request_id, request.left_tokens
        self.prefilling[request_id] = request
        if request.is_unfinished:
            self.unfinished[request_id] = request
        share = self._prefills[request_id] = _Share(request.committed_tokens)
        if request.master is not None:
            share.reserved[request.master] = request.growth_tokens + left
        self._add(share)

    def _drop_prefill(self, request_id: str) -> None:
        share = self._prefills.pop(request_id, None)
        if share is not None:
            del self.prefilling[request_id]
            self.unfinished.pop(request_id, None)
            self._subtract(share)

    def _count(self, linked: _Linked) -> None:
        """What these requests count for, instead of what they did before."""
        self._subtract(linked.share)
        requests = linked.requests.values()
        share = linked.share = _Share(sum([r.committed_tokens for r in requests]))
        for master in {r.master for r in requests}:
            if master is not None:
                # Of their prefills nothing is left.
                beyond = sum([r.growth_tokens for r in requests if r.master == master])
                share.reserved[master] = beyond
        self._add(share)

    def _add(self, share: _Share) -> None:
        self.committed += share.committed
        for master, beyond in share.reserved.items():
            self.reserved[master] = self.reserved.get(master, 0) + beyond

    def _subtract(self, share: _Share) -> None:
        self.committed -= share.committed
        for master, beyond in share.reserved.items():
            self.reserved[master] -= beyond

    # ---- decode groups -------------------------------------------------------------------------

    def _link(self, request: Request, links: Links) -> None:
        linked = self._by_links.get(links)
        if linked is None:
            linked = self._by_links[links] = _Linked()
        last = next(reversed(linked.requests.values()), request)
        linked.in_order = linked.in_order and last.run_order <= request.run_order
        linked.requests[request.request_id] = request
        self._links[request.request_id] = links
        self._components = None

    def _unlink(self, request_id: str, links: Links) -> None:
        linked = self._by_links[links]
        del linked.requests[request_id], self._links[request_id]
        if linked.requests:
            self._stale.add(links)
        else:
            self._subtract(linked.share)
            del self._by_links[links]
        self._components = None

    def _find_components(self) -> None:
        for linked in self._by_links.values():
            if not linked.in_order:
                in_order = sorted(linked.requests.values(), key=lambda r: r.run_order)
                linked.requests = {r.request_id: r for r in in_order}
                linked.in_order = True
        requests = {links: linked.requests for links, linked in self._by_links.items()}
        self._components = connect(requests)
        self._component_of = {i: c for c in self._components for i in c.instances}

    # ---- proof ---------------------------------------------------------------------------------

    def check(self, running: Mapping[str, Request], instances: Mapping[int, InstanceView]) -> None:
        """Raises AssertionError when anything differs from a full count over `running`."""
        self.settle(instances)
        prefilling = {i: r for i, r in running.items() if r.phase is Phase.PREFILL}
        assert self.prefilling == prefilling, "requests in prefill differ"
        assert self.unfinished == {i: r for i, r in prefilling.items() if r.is_unfinished}
        committed = sum(r.committed_tokens for r in running.values())
        assert self.committed == committed, f"committed {self.committed}, counted {committed}"
        reserved = dict.fromkeys(self.reserved, 0)
        for request in running.values():
            if request.master is not None:
                reserved[request.master] += request.growth_tokens + request.left_tokens
        assert self.reserved == reserved, f"reserved {self.reserved}, counted {reserved}"
        by_links: dict[Links, dict[str, Request]] = {}
        for request in running.values():
            links = links_of(request, instances)
            if links is not None:
                by_links.setdefault(links, {})[request.request_id] = request
        found = [(c.instances, c.requests) for c in self.components]
        counted = [(c.instances, c.requests) for c in connect(by_links)]
        assert found == counted, f"decode groups {found}, counted {counted}"
        assert all(self._component_of[i] is c for c in self.components for i in c.instances)
