"""The world as it will be when the decisions made so far are carried out.

A policy may not change its view; it counts in a draft instead.
"""

from __future__ import annotations

from loongd.sched.components import Component
from loongd.sched.policy import Hold, Placed, View
from loongd.sched.request import Request


class Draft:
    """Slots, idle instances and admitted tokens of one round of decisions.

    Attributes:
        free: free slots of each alive instance.
        reserved: of these, slots that running requests count on.
        idle: instances that can start a step.
        total_slots: of all alive instances; `known_slots` adds lost ones that may come back.
        committed: slots that running and admitted requests may need, as admission counts.
        components, component_of: decode groups before this round, as in `Tally`.
        hold: instances that the head of the queue waits for.
        started: ids of requests whose prefill, or a chunk of it, starts in this round.
        held: instances on which only decode steps that are owed may start.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        tally, instances = view.tally, view.instances
        self.free = free = dict(view.free)
        self.idle = {i for i in free if instances[i].step is None}
        self.total_slots = sum([instances[i].slots for i in free])
        self.known_slots = sum([instance.slots for instance in instances.values()])
        self.num_running = len(view.running)
        self.committed = view.num_ending_tokens + tally.committed
        reserved = tally.reserved
        self.reserved = {i: reserved.get(i, 0) for i in free}
        self.components = tally.components
        self.component_of = tally.component_of
        self.hold: Hold | None = None
        self.held: set[int] = set()
        self.started: set[str] = set()

    def room(self, instance: int) -> int:
        """Free slots that nobody counts on; negative when too many do."""
        return self.free[instance] - self.reserved[instance]

    def owes_decode(self, component: Component) -> bool:
        """A member has finished a prefill since the component's last step."""
        instances, members = self.view.instances, component.instances
        if len(members) == 1:
            return instances[members[0]].owes_decode and members[0] in self.idle
        return any(instances[i].owes_decode and i in self.idle for i in members)

    def is_prefills_turn(self, instance: int) -> bool:
        """The instance is idle and no decode step is owed there."""
        if instance not in self.idle:
            return False
        component = self.component_of.get(instance)
        return component is None or not self.owes_decode(component)

    def runs_decode(self, instance: int) -> bool:
        step = self.view.instances[instance].step
        return step is not None and step.is_decode

    def admit(self, placed: Placed) -> None:
        """Count a waiting request that is going to prefill, all of it or a first chunk."""
        self.keep(placed)
        self.num_running += 1
        self.committed += placed.request.committed_tokens

    def keep(self, placed: Placed) -> None:
        """Charge what a prefill keeps, and reserve what the request needs beyond that."""
        request = placed.request
        self.started.add(request.request_id)
        for instance, num_tokens in placed.keep:
            self.free[instance] -= num_tokens
        later = request.left_tokens - placed.num_tokens
        self.reserved[placed.master] += request.growth_tokens + later

    def forget_reservation(self, request: Request) -> None:
        """Stop counting what a running request reserves; `keep` counts it anew."""
        if request.master is not None:
            self.reserved[request.master] -= request.growth_tokens + request.left_tokens

    def restore_reservation(self, request: Request) -> None:
        """Undo `forget_reservation`."""
        if request.master is not None:
            self.reserved[request.master] += request.growth_tokens + request.left_tokens
