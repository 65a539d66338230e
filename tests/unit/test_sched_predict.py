"""Predicted times and admission: numbers worked out by hand.

With `make_sib`, a decode step takes 10 ms and 1 us for each token that it reads, a prefill 10 ms
and 1 ms a token.
"""

import msgspec
import pytest
from sched_kit import VirtualTime

from loongd.sched.events import InstanceLost


def world_of(*slots, **limits):
    world = VirtualTime(*slots, **limits)
    world.scheduler._sib = world.sib
    return world


def predict(world, prompt, max_tokens, **more):
    return world.scheduler.predict(prompt, max_tokens, world.now, **more)


def test_a_pool_that_is_promised_but_not_filled_is_not_free():
    """The hog has 99 tokens of 2,898: 2,901 slots are empty, but 102 are to be had."""
    world = world_of(3_000)
    world.arrive("hog", 98, max_tokens=2_800)
    world.run(until=0.1085)
    assert len(world.tokens["hog"]) == 1
    found = predict(world, 1_000, 128)
    # Until its end it decodes 2,799 more tokens; the last step reads 2,898.
    assert found.queue_s == pytest.approx(2_799 * (0.010 + 2_898e-6))
    assert found.reason.startswith(
        "wait at most 36.102 s for KV slots (1,128 needed, 102 of 3,000 free by admission's count "
        "beside 1 running and 0 waiting before it; 1 request must end first, after at most 2,799 "
        "more tokens) and 0.000 s for 0 requests ahead, then prefill 1,000 tokens on 1 instance, "
        "predicted "
    )
    assert found.rough
    assert found.at_most


def test_the_bound_holds_and_is_not_far_off():
    world = world_of(800)
    world.arrive("hog", 98, max_tokens=600)
    world.run(until=0.1085)
    found = predict(world, 500, 128)
    assert found.at_most
    world.arrive("next", 500, max_tokens=128)
    world.run()
    ttft_s = world.ttft_s("next")
    assert 0.9 * (found.queue_s + found.prefill_s) < ttft_s < found.queue_s + found.prefill_s


def test_what_fits_beside_the_promises_does_not_wait_for_them():
    world = world_of(3_000)
    world.arrive("hog", 98, max_tokens=2_800)
    world.run(until=0.1085)
    assert predict(world, 90, 12).queue_s == pytest.approx(0.0303, abs=1e-4), (
        "102 slots are free; after three tokens more of the hog an interruption pays"
    )
    found = predict(world, 90, 13)
    assert found.queue_s > 36
    assert "(103 needed, 102 of 3,000 free" in found.reason
    found = predict(world, 90, 2_000, reserve_tokens=12)
    assert not found.at_most, "admission counts on the reservation, not on max_tokens"


def test_as_many_requests_end_as_are_needed_soonest_first():
    """200, 300 and 400 slots are promised of 1,000: for 450, the first two must end."""
    world = world_of(1_000)
    world.arrive("c", 10, max_tokens=390)
    world.arrive("a", 10, max_tokens=190)
    world.arrive("b", 10, max_tokens=290)
    world.run(until=0.2)
    left = 290 - len(world.tokens["b"])
    assert len(world.tokens["b"]) > 1
    found = predict(world, 30, 420)
    assert "(450 needed, 100 of 1,000 free" in found.reason
    assert "2 requests must end first" in found.reason
    assert f"after at most {left:,} more tokens" in found.reason
    assert found.queue_s == pytest.approx(left * (0.010 + 900e-6))


def test_what_waits_before_it_has_its_slots_first():
    """Both documents of 600 slots wait for the hog; the second also for the first."""
    world = world_of(1_000)
    world.arrive("hog", 10, max_tokens=790)
    world.run(until=0.1)
    world.arrive("first", 400, max_tokens=200)
    left = 790 - len(world.tokens["hog"])
    found = predict(world, 400, 200)
    assert "(600 needed, 0 of 1,000 free" in found.reason
    assert "beside 1 running and 1 waiting before it; 2 requests must end first" in found.reason
    assert f"after at most {left + 200:,} more tokens" in found.reason


def test_a_short_prompt_passes_a_long_one_only_if_that_keeps_its_room():
    world = world_of(1_000)
    world.arrive("hog", 10, max_tokens=490)
    world.run(until=0.1)
    world.arrive("long", 800, max_tokens=100)
    assert not predict(world, 20, 80).at_most, "100 slots are left beside the long one"
    found = predict(world, 20, 81)
    assert found.at_most, "with 101 the long one would wait for it"
    assert "2 requests must end first" in found.reason


def test_who_passed_counts_too():
    world = world_of(1_000)
    world.arrive("hog", 10, max_tokens=490)
    world.run(until=0.1)
    world.arrive("long", 800, max_tokens=100)
    world.arrive("passer", 20, max_tokens=30)
    world.run(until=0.2)
    assert world.tokens["passer"]
    assert not world.tokens["long"]
    assert not predict(world, 20, 30).at_most
    assert predict(world, 20, 31).at_most, "of the 100 slots `passer` has 50"


def test_slots_of_a_cancelled_request_are_free_as_soon_as_its_step_ends():
    world = world_of(3_000)
    world.arrive("hog", 98, max_tokens=2_800)
    world.run(until=0.1085)
    world.cancel("hog")
    found = predict(world, 2_000, 950)
    assert not found.at_most
    assert found.queue_s < 0.02


def test_places_are_counted_as_slots_are():
    world = world_of(50_000, max_num_seqs=2)
    world.arrive("a", 10, max_tokens=100)
    world.arrive("b", 10, max_tokens=300)
    world.run(until=0.2)
    left = 100 - len(world.tokens["a"])
    found = predict(world, 20, 10)
    assert "for its turn to run (30 needed, 49,580 of 50,000 free" in found.reason
    assert f"1 request must end first, after at most {left} more tokens" in found.reason
    assert found.queue_s == pytest.approx(left * (0.010 + 420e-6))


def test_a_deep_queue_is_counted_in_proportion():
    """Each of 400 like it needs the pool alone for 100 tokens; 256 of them are looked at."""
    world = world_of(200)
    world.arrive("hog", 50, max_tokens=101)
    world.run(until=0.0605)
    assert len(world.tokens["hog"]) == 1
    for n in range(400):
        world.arrive(f"w{n}", 51, max_tokens=100)
    found = predict(world, 51, 100)
    assert "and 400 waiting before it; 401 requests must end first" in found.reason
    assert "after at most 40,100 more tokens" in found.reason


def test_a_deep_queue_that_has_room_ends_nobody():
    """300 waiting ones fit beside the hog, each with 10 slots, and 100 slots more."""
    world = world_of(6_100, max_num_seqs=1_000)
    world.arrive("hog", 1_000, max_tokens=2_000)
    for n in range(300):
        world.arrive(f"w{n}", 9, max_tokens=1)
    assert not predict(world, 90, 10).at_most
    found = predict(world, 91, 10)
    assert "(101 needed, 100 of 6,100 free" in found.reason
    assert "300 waiting before it; 1 request must end first, after at most 1 more token" in (
        found.reason
    )


def test_a_prompt_that_never_fits_has_no_times():
    world = world_of(3_000)
    world.arrive("hog", 98, max_tokens=2_800)
    found = predict(world, 3_000, 1)
    assert (found.dop, found.queue_s, found.rough) == (0, 0.0, False)
    assert "needs 3,001 KV slots" in found.reason
    assert "but the pool has only 3,000 now" in found.reason


def test_a_prompt_too_large_for_who_is_left_has_no_times():
    world = world_of(3_000, 3_000)
    world.handle(InstanceLost(0.0, 1, "killed"))
    world.arrive("hog", 98, max_tokens=2_800)
    found = predict(world, 4_000, 1)
    assert found.dop == 0
    assert "it needs 4,001 KV slots, but the instances that are up have 3,000" in found.reason


def test_times_that_were_measured_on_a_busy_machine_are_rough():
    world = world_of(3_000)
    assert not predict(world, 100, 10).rough
    world.sib.replace(msgspec.structs.replace(world.sib.profile, noise=0.2))
    assert predict(world, 100, 10).rough


def test_who_waits_for_a_lost_instance_is_not_waited_for():
    world = world_of(3_000, 3_000)
    world.handle(InstanceLost(0.0, 1, "killed"))
    world.arrive("hog", 98, max_tokens=2_800)
    world.run(until=0.1085)
    world.arrive("large", 4_000, max_tokens=1)
    found = predict(world, 1_000, 128)
    assert "102 of 3,000 free" in found.reason
    assert "0 waiting before it; 1 request must end first" in found.reason
