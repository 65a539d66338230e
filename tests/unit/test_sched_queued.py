"""Why a request waits: what its story and the snapshot say, with numbers."""

from sched_kit import VirtualTime

from loongd.sched.events import InstanceJoined, InstanceLost
from loongd.sched.queued import first_wait


def wait_of(world, request_id):
    """What a waiting request's story says of it; it is there."""
    wait = world.scheduler.story(request_id).wait
    assert wait is not None
    assert wait.request_id == request_id
    return wait


def full_world(**limits):
    """`a` has 800 of 1,000 slots: 100 for its prompt, 700 for its answer."""
    world = VirtualTime(500, 500, **limits)
    world.arrive("a", 100, max_tokens=700)
    return world


def test_slots_that_others_use_or_reserve():
    world = full_world()
    world.arrive("b", 34, max_tokens=900, reserve=400, at=0.5)
    world.arrive("c", 50, max_tokens=300, at=0.6)
    b, c = wait_of(world, "b"), wait_of(world, "c")
    assert b.describe() == (
        "for 434 slots (34 prompt tokens, 400 reserved for its answer by default_reserve_tokens); "
        "200 of 1,000 are neither used nor reserved"
    )
    assert c.describe() == (
        "for 350 slots (50 prompt tokens, 300 reserved for its answer by max_tokens or "
        "default_reserve_tokens); 200 of 1,000 are neither used nor reserved; 1 ahead of it"
    )
    assert (b.kind, b.since_s, b.num_ahead) == ("slots", 0.5, 0)
    assert (b.needed_slots, b.prompt_tokens, b.answer_tokens) == (434, 34, 400)
    assert (c.spare_slots, c.total_slots, c.num_ahead) == (200, 1_000, 1)
    assert world.scheduler.snapshot().first_wait == b


def test_slots_of_a_cancelled_request_are_used_until_its_step_ends():
    world = VirtualTime(1_000)
    world.arrive("a", 100, max_tokens=700)
    world.arrive("b", 34, max_tokens=400, at=0.5)
    world.cancel("a")
    used = world.scheduler.snapshot().pool.used
    assert world.scheduler.snapshot().num_ending == 1
    assert used > 100
    wait = wait_of(world, "b")
    assert (wait.kind, wait.spare_slots) == ("instance", 1_000 - used)


def test_one_that_has_room_waits_for_its_turn():
    world = full_world(max_passes=0)
    world.arrive("b", 34, max_tokens=400, at=0.5)
    world.arrive("c", 10, max_tokens=10, at=0.6)
    wait = wait_of(world, "c")
    assert (wait.kind, wait.num_ahead, wait.needed_slots) == ("turn", 1, 20)
    assert wait.describe() == (
        "for its turn; the first waits for 434 slots (34 prompt tokens, 400 reserved for its "
        "answer by max_tokens or default_reserve_tokens); 200 of 1,000 are neither used nor "
        "reserved; 1 ahead of it"
    )


def test_an_instance_when_there_is_room():
    world = VirtualTime(5_000)
    world.arrive("a", 100)
    world.arrive("b", 100, at=0.01)
    wait = wait_of(world, "b")
    assert (wait.kind, wait.describe()) == ("instance", "for an instance; 1 of 1 are in a step")


def test_instances_that_are_held_for_it():
    world = VirtualTime(5_000, 5_000, policy="fcfs", prefill_tokens_per_instance=100)
    world.arrive("a", 50, max_tokens=100)
    world.arrive("b", 50, max_tokens=100)
    world.run(until=0.1)
    world.arrive("long", 200)
    world.step()
    assert world.scheduler.snapshot().held == (0, 1)
    wait = wait_of(world, "long")
    assert wait.describe() == "for instances 0,1, which are held for it"


def test_a_place_among_those_that_may_run():
    world = VirtualTime(5_000, max_num_seqs=1)
    world.arrive("a", 100)
    world.arrive("b", 100)
    wait = wait_of(world, "b")
    assert (wait.kind, wait.what) == (
        "places",
        "a place; 1 of at most 1 are running (max_num_seqs)",
    )


def test_workers_that_are_gone():
    world = full_world()
    world.arrive("b", 300, max_tokens=400)
    world.handle(InstanceLost(world.now, 0, "gone"))
    wait = wait_of(world, "b")
    assert wait.kind == "workers"
    assert wait.what == (
        "700 slots (300 prompt tokens, 400 reserved for its answer by max_tokens or "
        "default_reserve_tokens); 500 of 1,000 are there until the lost instances return"
    )
    world.handle(InstanceLost(world.now, 1, "gone"))
    assert wait_of(world, "b").describe() == (
        "for the workers: no instance is ready; 1 ahead of it"
    )
    for instance in range(2):
        world.handle(InstanceJoined(world.now, instance, 500))
    assert world.scheduler.story("a").wait is None, "it runs again"
    assert wait_of(world, "b").kind == "slots"


def test_one_that_lost_its_kv_has_a_part_of_its_answer():
    world = full_world()
    world.run(until=0.5)
    for instance in range(2):
        world.handle(InstanceLost(world.now, instance, "gone"))
    world.handle(InstanceJoined(world.now, 0, 500))
    has = world.request("a").num_generated
    assert has > 0
    wait = wait_of(world, "a")
    assert wait.what.startswith(
        f"800 slots (100 prompt tokens, 700 reserved for its answer by max_tokens or "
        f"default_reserve_tokens, of which it has {has});"
    )
    assert wait.since_s == world.now


def test_an_answer_beyond_its_reservation():
    world = VirtualTime(100, 100)
    world.arrive("a", 100, max_tokens=90, reserve=2)
    world.run(until=0.3)
    for instance in range(2):
        world.handle(InstanceLost(world.now, instance, "gone"))
    has = world.request("a").num_generated
    assert has > 2
    world.handle(InstanceJoined(world.now, 0, 100))
    wait = wait_of(world, "a")
    assert wait.needed_slots == 101 + has
    assert wait.what.startswith(
        f"{101 + has} slots (100 prompt tokens, {has + 1} for its answer, of which it has {has});"
    )


def test_who_runs_or_has_ended_waits_for_nothing():
    world = VirtualTime(500)
    assert first_wait(world.scheduler._state) is None
    world.arrive("a", 100)
    assert world.scheduler.story("a").wait is None
    assert world.scheduler.snapshot().first_wait is None
    world.run()
    assert world.scheduler.story("a").wait is None
    assert world.scheduler.story("nobody") is None


def test_one_that_is_cancelled_in_the_queue_tells_what_it_waited_for():
    world = full_world()
    world.arrive("b", 34, max_tokens=400, at=0.5)
    waited = wait_of(world, "b").describe()
    world.cancel("b")
    story = world.scheduler.story("b")
    assert story.wait is None
    assert story.entries[-1].text == (
        f"b ended after 0 tokens: cancelled (client); it waited {waited}"
    )
    world.cancel("a")
    assert "waited" not in world.scheduler.story("a").entries[-1].text
