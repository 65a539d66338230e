"""The status that `loongctl` reads, from a scheduler that has worked."""

from sched_kit import VirtualTime

from loongd.pool import WorkerLost
from loongd.sched.events import InstanceJoined, InstanceLost
from loongd.sched.story import Story, StoryEntry
from loongd.status import engine_status, story_json


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


def test_a_request_that_waits_has_the_time_and_the_reason_in_its_story() -> None:
    world = VirtualTime(1_000)
    world.arrive("a", 100, max_tokens=700)
    world.arrive("b", 34, max_tokens=400, at=0.5)
    world.arrive("c", 34, max_tokens=400, at=0.75)
    found = world.scheduler.story("c")
    assert found is not None
    shown = story_json("c", found, now=2.0)
    assert (shown["state"], shown["elapsed_s"]) == ("live", 1.25)
    assert found.wait is not None
    assert shown["waiting"] == {
        "request_id": "c",
        "at_s": 0.0,
        "duration_s": 1.25,
        "for": "slots",
        "text": found.wait.describe(),
        "ahead": 1,
        "needed_slots": 434,
        "prompt_tokens": 34,
        "answer_tokens": 400,
        "spare_slots": 200,
        "total_slots": 1_000,
    }
    first = engine_status(world.scheduler.snapshot(), {}, {})["queue"]["first"]
    assert first["request_id"] == "b"
    assert first["for"] == "slots"
    assert first["ahead"] == 0


def test_one_that_runs_has_lasted_until_now_and_one_that_has_ended_until_its_end() -> None:
    world = VirtualTime(1_000)
    world.arrive("a", 100, max_tokens=5)
    found = world.scheduler.story("a")
    assert found is not None
    shown = story_json("a", found, now=3.0)
    assert (shown["state"], shown["elapsed_s"], shown["waiting"]) == ("live", 3.0, None)
    world.run()
    found = world.scheduler.story("a")
    assert found is not None
    shown = story_json("a", found, now=3.0)
    assert (shown["state"], shown["waiting"]) == ("finished", None)
    assert shown["elapsed_s"] == round(world.now, 4) < 1.0
    assert engine_status(world.scheduler.snapshot(), {}, {})["queue"]["first"] is None


def test_time_without_a_step_is_told_of_all_entries_but_the_last() -> None:
    times = [("arrived", 10.0, 0.0, 0), ("prefill", 10.5, 1.0, 1), ("decode", 11.5, 0.4, 8)]
    entries = tuple(
        StoryEntry(at_s, event, "", num_steps=steps, duration_s=duration_s)
        for event, at_s, duration_s, steps in times
    )
    live = story_json("a", Story(5, 8, entries), now=20.0)
    assert [entry["idle_s"] for entry in live["entries"]] == [0.0, 0.0, 0.0]
    ended = story_json("a", Story(5, 8, (*entries, StoryEntry(14.0, "finished", ""))), now=20.0)
    assert [entry["idle_s"] for entry in ended["entries"]] == [0.0, 0.0, 2.1, 0.0]
