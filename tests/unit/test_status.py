"""The status that `loongctl` reads, from a scheduler that has worked."""

from sched_kit import VirtualTime

from loongd.pool import WorkerLost
from loongd.sched.events import InstanceJoined, InstanceLost
from loongd.status import engine_status


def test_totals_count_what_the_scheduler_has_done() -> None:
    world = VirtualTime(50_000, 50_000)
    for name in ("a", "b"):
        world.arrive(name, 20, max_tokens=1000)
    world.arrive("long", 5_000, max_tokens=1, at=0.5)
    world.run(until=0.6)
    (move,) = world.moves()
    totals = engine_status(world.scheduler.snapshot(), {}, {})["totals"]
    assert totals["migrations"] == 1
    assert totals["migrated_tokens"] == move.num_tokens > 0
    assert totals["started"] == 3
    assert totals["finished"] == 0


def test_the_lost_instance_is_told_from_those_that_start_again_with_it() -> None:
    world = VirtualTime(1_000, 1_000)
    for instance in range(2):
        world.handle(InstanceLost(world.now, instance, "gone"))
    lost = WorkerLost(1, "worker process was killed by signal 9")
    shown = engine_status(world.scheduler.snapshot(), {}, {}, lost)["instances"]
    assert [(one["state"], one["why"], one["phase"]) for one in shown] == [
        ("starting", None, None),
        ("lost", "worker process was killed by signal 9", None),
    ]
    for instance in range(2):
        world.handle(InstanceJoined(world.now, instance, 1_000))
    shown = engine_status(world.scheduler.snapshot(), {}, {})["instances"]
    assert [(one["state"], one["why"]) for one in shown] == [("ready", None)] * 2
