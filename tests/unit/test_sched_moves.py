"""What an instance more, or KV on another instance, must save: more than its bare cost.

With `make_sib`, a prefill takes 10 ms and 1 ms a token, divided by the DoP, and `per_member_s` for
each further member; a move 1 ms and `move_token_s` a token.
"""

import pytest
from sched_kit import VirtualTime, make_sib


@pytest.mark.parametrize(("move_token_s", "moves"), [(0.0038, False), (0.0024, True)])
def test_decode_makes_way_when_that_saves_twice_its_cost(move_token_s, moves):
    """A prompt of 400 tokens gains 0.41 s from the instance; 65 to 70 tokens move."""
    world = VirtualTime(50_000, 50_000, sib=make_sib(move_token_s=move_token_s))
    for name in ("a", "b"):
        world.arrive(name, 20, max_tokens=1_000)
    world.arrive("long", 400, max_tokens=1, at=0.5)
    world.run()
    gain_s = world.sib.prefill_s(1, [(0, 400)])
    costs_s = [world.sib.migrate_s(num_tokens) for num_tokens in (65, 70)]
    assert all(cost_s < 0.3 for cost_s in costs_s), "a move longer than the bound is not made"
    assert all((gain_s > 2 * cost_s) == moves for cost_s in costs_s)
    assert all(gain_s > 1.4 * cost_s for cost_s in costs_s), "it gains more than it costs anyway"
    assert [65 <= move.num_tokens <= 70 for move in world.moves()] == [True] * moves


@pytest.mark.parametrize(("move_token_s", "moves"), [(0.006, False), (0.004, True)])
def test_a_group_is_drawn_together_when_that_saves_twice_its_cost(move_token_s, moves):
    """256 steps of 5 ms less on one instance gain 1.28 s, less what each longer one reads; 144
    tokens are to move, in 0.58 s or 0.87 s."""
    sib = make_sib(per_member_s=0.005, move_token_s=move_token_s)
    world = VirtualTime(2_000, 2_000, sib=sib)
    for name in ("x", "y"):
        world.arrive(name, 1_650, max_tokens=300)
    world.arrive("wide", 70, max_tokens=800, reserve=30, at=3.0)
    world.run()
    assert (len(world.decodes("wide")[-1].members) == 1) == moves
    assert len(world.moves()) == moves


@pytest.mark.parametrize(("per_member_s", "dop"), [(0.7, 1), (0.3, 2)])
def test_an_instance_joins_a_prefill_only_for_a_fair_share_of_its_time(per_member_s, dop):
    """Of some 1,740 tokens that are left when the other one is free, a second instance saves
    0.87 s less its cost: 0.17 s, which is not three tenths of 1.75 s / 2, or 0.57 s."""
    world = VirtualTime(50_000, 50_000, sib=make_sib(per_member_s=per_member_s))
    world.arrive("x", 200, max_tokens=1)
    world.arrive("long", 2_000, max_tokens=1, at=0.01)
    world.run()
    first, second, *_ = world.prefills("long")
    assert first[2].dop == 1
    assert first[0] < world.tokens["x"][0] < second[0], "both are free from the second chunk on"
    assert 1_700 < 2_000 - first[3].num_tokens < 1_780
    assert second[2].dop == dop
    saved_s = 0.5 * 0.001 * (2_000 - first[3].num_tokens) - per_member_s
    assert saved_s > 0.1, "it would be faster with both"
