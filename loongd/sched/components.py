"""Decode groups: connected components of the instances that hold the decoding requests' KV.

Requests that share an instance step together, so a request whose KV spans two instances cannot
be starved by their other requests: nothing steps on either until both are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from loongd.sched.instance import InstanceView
from loongd.sched.request import Phase, Request


@dataclass(frozen=True, slots=True)
class Component:
    """Decoding requests and all instances with any of their KV, ascending."""

    instances: tuple[int, ...]
    requests: tuple[Request, ...]


def find_components(
    running: Iterable[Request], instances: Mapping[int, InstanceView]
) -> list[Component]:
    """Components of all decoding requests, busy or not, by lowest instance.

    A request that waits for a slot on a busy instance links that one too, except while a prefill
    runs there: its companions need not stand still for so long.
    """
    by_links: dict[tuple[int, ...], list[Request]] = {}
    for request in running:
        if request.phase is Phase.DECODE:
            links = request.holders
            if request.wanted is not None and not _prefills(instances[request.wanted]):
                links = (*links, request.wanted)
            by_links.setdefault(links, []).append(request)
    root = {i: i for links in by_links for i in links}
    for links in by_links:
        for instance in links[1:]:
            low, high = sorted((_find(root, links[0]), _find(root, instance)))
            root[high] = low
    members: dict[int, list[int]] = {}
    for instance in sorted(root):
        members.setdefault(_find(root, instance), []).append(instance)
    requests: dict[int, list[Request]] = {low: [] for low in members}
    for links, linked in by_links.items():
        requests[_find(root, links[0])].extend(linked)
    return [Component(tuple(members[low]), tuple(requests[low])) for low in sorted(members)]


def _prefills(view: InstanceView) -> bool:
    return view.step is not None and view.step.is_prefill


def _find(root: dict[int, int], instance: int) -> int:
    while root[instance] != instance:
        root[instance] = root[root[instance]]
        instance = root[instance]
    return instance
