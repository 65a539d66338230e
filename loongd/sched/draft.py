"""The world as it will be when the decisions made so far are carried out.

A policy may not change its view; it counts in a draft instead.
"""

from __future__ import annotations

from loongd.sched.components import Component, find_components
from loongd.sched.policy import Hold, Placed, View


class Draft:
    """Slots, idle instances and admitted tokens of one round of decisions.

    Attributes:
        free: free slots of each alive instance.
        reserved: of these, slots that running requests count on.
        idle: instances that can start a step.
        total_slots: of all alive instances; `known_slots` adds lost ones that may come back.
        committed: slots that running and admitted requests may need, as admission counts.
        hold: instances that the head of the queue waits for.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self.free = dict(view.free)
        self.idle = {i for i in self.free if view.instances[i].idle}
        self.total_slots = sum(view.instances[i].slots for i in self.free)
        self.known_slots = sum(instance.slots for instance in view.instances.values())
        self.num_running = len(view.running)
        self.committed = view.num_ending_tokens
        self.reserved = dict.fromkeys(self.free, 0)
        for request in view.running.values():
            self.committed += request.committed_tokens
            if request.master is not None:
                self.reserved[request.master] += request.growth_tokens
        self.components = find_components(view.running.values(), view.instances)
        self.component_of = {i: c for c in self.components for i in c.instances}
        self.hold: Hold | None = None

    def room(self, instance: int) -> int:
        """Free slots that nobody counts on; negative when too many do."""
        return self.free[instance] - self.reserved[instance]

    def owes_decode(self, component: Component) -> bool:
        """A member has finished a prefill since the component's last step."""
        instances = self.view.instances
        return any(instances[i].owes_decode and i in self.idle for i in component.instances)

    def is_prefills_turn(self, instance: int) -> bool:
        """The instance is idle and no decode step is owed there."""
        component = self.component_of.get(instance)
        return instance in self.idle and not (component and self.owes_decode(component))

    def runs_decode(self, instance: int) -> bool:
        step = self.view.instances[instance].step
        return step is not None and not step.is_prefill

    def admit(self, placed: Placed) -> None:
        """Count a request that is going to prefill."""
        for instance, num_tokens in placed.keep:
            self.free[instance] -= num_tokens
        self.reserved[placed.master] += placed.request.growth_tokens
        self.num_running += 1
        self.committed += placed.request.committed_tokens
