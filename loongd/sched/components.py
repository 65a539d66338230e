"""Decode groups: connected components of the instances that hold the decoding requests' KV.

Requests that share an instance step together, so a request whose KV spans two instances cannot
be starved by their other requests: nothing steps on either until both are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from loongd.sched.instance import InstanceView
from loongd.sched.request import Phase, Request


@dataclass(frozen=True, slots=True)
class Component:
    """Decoding requests and all instances with any of their KV, ascending."""

    instances: tuple[int, ...]
    requests: tuple[Request, ...]


def links_of(request: Request, instances: Mapping[int, InstanceView]) -> tuple[int, ...] | None:
    """The instances that a decoding request joins into one group; None when it does not decode.

    A request that waits for a slot on a busy instance links that one too, except while a prefill
    runs there: its companions need not stand still for so long.
    """
    if request.phase is not Phase.DECODE:
        return None
    if request.wanted is not None and not _prefills(instances[request.wanted]):
        return (*request.holders, request.wanted)
    return request.holders


def connect(by_links: Mapping[tuple[int, ...], Mapping[str, Request]]) -> tuple[Component, ...]:
    """Components of requests that are given by their links, by lowest instance.

    The requests of each links are in the order in which they began to run; so are those of a
    component, links by links.
    """
    if max(map(len, by_links), default=0) == 1:
        return tuple([Component(i, tuple(by_links[i].values())) for i in sorted(by_links)])
    linked = sorted(by_links.items(), key=lambda item: next(iter(item[1].values())).run_order)
    root = {i: i for links in by_links for i in links}
    for links in by_links:
        for instance in links[1:]:
            low, high = sorted((_find(root, links[0]), _find(root, instance)))
            root[high] = low
    members: dict[int, list[int]] = {}
    for instance in sorted(root):
        members.setdefault(_find(root, instance), []).append(instance)
    requests: dict[int, list[Request]] = {low: [] for low in members}
    for links, of_links in linked:
        requests[_find(root, links[0])].extend(of_links.values())
    return tuple(Component(tuple(members[low]), tuple(requests[low])) for low in sorted(members))


def _prefills(view: InstanceView) -> bool:
    return view.step is not None and view.step.is_prefill


def _find(root: dict[int, int], instance: int) -> int:
    while root[instance] != instance:
        root[instance] = root[root[instance]]
        instance = root[instance]
    return instance
