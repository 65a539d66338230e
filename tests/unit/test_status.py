"""The status that `loongctl` reads, from a scheduler that has worked."""

from sched_kit import VirtualTime

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
