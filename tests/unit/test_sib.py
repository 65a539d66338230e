"""The SIB against formulas written out by hand, and its correction against spoiled steps."""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongd.errors import ConfigError
from loongd.sched.sib import ModelFacts, Profile, Sib, default_profile, dump_profile, parse_profile
from loongd.sched.sib_profile import (
    Coefficients,
    DecodeCoefficients,
    DecodeFit,
    MigrateFit,
    PrefillFit,
)

LLAMA = ModelFacts(
    name="llama-2-7b",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    intermediate_size=11008,
    vocab_size=32000,
)


def prefill_fit(dop: int, alpha_s: float, beta_s: float, gamma_s: float) -> PrefillFit:
    return PrefillFit(
        dop=dop,
        coefficients=Coefficients(alpha_s=alpha_s, beta_s=beta_s, gamma_s=gamma_s),
        max_tokens=1000,
        max_square=1000**2,
        max_items=8,
    )


def decode_fit(dop: int, num_masters: int, alpha_s: float, request_s: float) -> DecodeFit:
    coefficients = DecodeCoefficients(alpha_s=alpha_s, request_s=request_s, kv_token_s=1e-6)
    return DecodeFit(
        dop=dop,
        num_masters=num_masters,
        coefficients=coefficients,
        max_batch=64,
        max_kv_tokens=10_000,
    )


def profile(*, measured: bool = True) -> Profile:
    return Profile(
        model="tiny",
        shape="s",
        device="d",
        tp=1,
        date="2026-01-01",
        source="made up",
        measured=measured,
        prefill=[prefill_fit(1, 0.010, 4e-5, 8e-9), prefill_fit(4, 0.040, 1e-5, 2e-9)],
        decode=[
            decode_fit(1, 1, 0.010, 1e-4),
            decode_fit(4, 1, 0.020, 1e-4),
            decode_fit(4, 4, 0.030, 3e-4),
        ],
        migrate=MigrateFit(alpha_s=0.001, token_s=1e-6),
        compute_bound_batch=100,
        kv_bytes_per_token=1000,
        link_bytes_per_s=1e9,
    )


def test_prefill_follows_the_formula() -> None:
    sib = Sib(profile())
    assert sib.prefill_s(1, [(0, 100)]) == pytest.approx(0.010 + 4e-3 + 8e-9 * 1e4)
    # A chunk of 100 after 300, and a prompt of 50: (400^2 - 300^2) + 50^2.
    expected = 0.010 + 4e-5 * 150 + 8e-9 * (70_000 + 2_500)
    assert sib.prefill_s(1, [(300, 100), (0, 50)]) == pytest.approx(expected)


def test_chunks_of_a_prompt_cost_as_much_as_the_whole_but_for_the_steps() -> None:
    sib = Sib(profile())
    alpha_s = sib.prefill_coefficients(1).alpha_s
    chunks = sum(sib.prefill_s(1, [(at, 100)]) for at in range(0, 800, 100))
    assert chunks - 8 * alpha_s == pytest.approx(sib.prefill_s(1, [(0, 800)]) - alpha_s)


def test_degrees_between_share_work_and_mix_steps() -> None:
    sib = Sib(profile())
    two = sib.prefill_coefficients(2)
    assert two.alpha_s == pytest.approx(0.020)  # a third of the way from 10 to 40 ms
    assert two.beta_s == pytest.approx(2e-5)  # 4e-5 at both ends, by dop
    assert two.gamma_s == pytest.approx(4e-9)
    eight = sib.prefill_coefficients(8)
    assert (eight.alpha_s, eight.beta_s) == pytest.approx((0.040, 5e-6))
    assert sib.max_dop == 4
    with pytest.raises(ValueError, match="at least one"):
        sib.prefill_s(0, [(0, 1)])


def test_decode_follows_the_formula_and_its_neighbours() -> None:
    sib = Sib(profile())
    one = sib.decode_s(dop=1, num_masters=1, batch=10, kv_tokens=5_000)
    assert one == pytest.approx(0.010 + 10 * 1e-4 + 5_000e-6)
    # Nine requests over four masters: the busiest has three; a member reads a quarter.
    four = sib.decode_s(dop=4, num_masters=4, batch=9, kv_tokens=8_000)
    assert four == pytest.approx(0.030 + 3 * 3e-4 + 2_000e-6)
    two = sib.decode_s(dop=2, num_masters=1, batch=1, kv_tokens=0)
    assert two == pytest.approx(0.010 + (0.020 - 0.010) / 3 + 1e-4)
    with pytest.raises(ValueError, match="3 masters in a group of 2"):
        sib.decode_s(dop=2, num_masters=3, batch=3, kv_tokens=0)


def test_arithmetic_takes_over_beyond_the_knee() -> None:
    one = DecodeCoefficients(alpha_s=1.0, request_s=0.0, kv_token_s=0.0, over_s=0.1, knee=10)
    assert one.time_s(dop=1, num_masters=1, batch=10, kv_tokens=0) == 1.0
    assert one.time_s(dop=1, num_masters=1, batch=20, kv_tokens=0) == pytest.approx(2.0)


def test_several_requests_cost_once_more_than_one() -> None:
    one = Coefficients(alpha_s=1.0, beta_s=0.0, gamma_s=0.0, item_s=0.1, many_s=0.5)
    assert [one.time_s([(0, 1)] * n) for n in (1, 2, 3)] == pytest.approx([1.1, 1.7, 1.8])


def test_decode_between_degrees_mixes_times() -> None:
    knee = DecodeCoefficients(
        alpha_s=0.030, request_s=0.0, kv_token_s=3e-6, over_s=5e-3, knee=2, floor_s=0.02
    )
    fits = [
        decode_fit(1, 1, 0.010, 1e-3),
        msgspec.structs.replace(decode_fit(3, 1, 0, 0), coefficients=knee),
    ]
    sib = Sib(msgspec.structs.replace(profile(), decode=fits))
    found = sib.decode_s(dop=2, num_masters=1, batch=4, kv_tokens=2000)
    assert found == pytest.approx((0.014 + 1e-3 + 0.040 + 3e-3) / 2)


def test_reach_says_how_far_a_prediction_is_extrapolated() -> None:
    sib = Sib(profile())
    assert sib.prefill_reach(1, [(0, 1000)]) == 1.0
    assert sib.prefill_reach(1, [(0, 2000)]) == 4.0
    assert sib.prefill_reach(1, [(0, 10)] * 16) == 2.0
    assert sib.decode_reach(dop=1, num_masters=1, batch=64, kv_tokens=9_000) == 1.0
    assert sib.decode_reach(dop=4, num_masters=2, batch=8, kv_tokens=50_000) == 5.0


def test_migration_costs_nothing_for_nothing() -> None:
    sib = Sib(profile())
    assert sib.migrate_s(0) == 0.0
    assert sib.migrate_s(1000) == pytest.approx(0.002)


# ---- correction ----------------------------------------------------------------------------------

STEP = [(0, 100)]


def feed(sib: Sib, *ratios: float) -> None:
    raw = Sib(profile()).prefill_s(1, STEP)
    for ratio in ratios:
        sib.observe_prefill(1, STEP, ratio * raw)


def factor(sib: Sib) -> float:
    return sib.prefill_s(1, STEP) / Sib(profile()).prefill_s(1, STEP)


def test_the_first_steps_after_a_start_teach_nothing() -> None:
    sib = Sib(profile())
    feed(sib, 50, 20, 10)
    assert factor(sib) == 1.0
    feed(sib, *[1.0] * 20)
    assert factor(sib) == pytest.approx(1.0)


def test_a_lasting_change_is_followed() -> None:
    sib = Sib(profile())
    feed(sib, *[1.3] * 20)
    assert factor(sib) == pytest.approx(1.3)
    feed(sib, *[0.8] * 20)
    assert factor(sib) == pytest.approx(0.8)


def test_a_hiccup_is_not_believed() -> None:
    sib = Sib(profile())
    feed(sib, *[1.1] * 20, 100.0, 100.0, 100.0, 100.0)
    assert factor(sib) == pytest.approx(1.1)


def test_one_observation_moves_little_and_all_together_not_without_bound() -> None:
    sib = Sib(profile())
    seen = [1.0]
    for _ in range(60):
        feed(sib, 1000.0)
        seen.append(factor(sib))
    assert max(b / a for a, b in pairwise(seen)) <= 1.25 + 1e-9
    assert seen[-1] == pytest.approx(2.0)
    modelled = Sib(profile(measured=False))
    feed(modelled, *[1000.0] * 60)
    assert factor(modelled) == pytest.approx(16.0)


@given(st.lists(st.floats(1e-6, 1e6), max_size=60))
def test_whatever_is_observed_the_factor_stays_in_bounds(ratios: list[float]) -> None:
    sib = Sib(profile())
    feed(sib, *ratios)
    assert 0.5 - 1e-9 <= factor(sib) <= 2.0 + 1e-9


def test_corrections_are_per_phase_and_degree_and_end_with_the_profile() -> None:
    sib = Sib(profile())
    feed(sib, *[1.5] * 20)
    for _ in range(20):
        elapsed = 0.5 * Sib(profile()).decode_s(dop=4, num_masters=2, batch=4, kv_tokens=100)
        sib.observe_decode(dop=4, num_masters=2, batch=4, kv_tokens=100, elapsed_s=elapsed)
    assert sib.corrections() == pytest.approx({"decode@4": 0.5, "prefill@1": 1.5})
    # What was never observed has most of what the others have learned.
    ratio = sib.prefill_s(4, STEP) / Sib(profile()).prefill_s(4, STEP)
    assert 1.2 < ratio < 1.5
    assert 0.005 < sib.decode_s(dop=1, num_masters=1, batch=1, kv_tokens=0) < 0.0085
    sib.replace(profile())
    assert factor(sib) == 1.0


def observe(sib: Sib, dop: int, ratio: float, times: int = 1) -> None:
    raw = Sib(profile()).prefill_s(dop, STEP)
    for _ in range(times):
        sib.observe_prefill(dop, STEP, ratio * raw)


def belief(sib: Sib, dop: int) -> float:
    return sib.prefill_s(dop, STEP) / Sib(profile()).prefill_s(dop, STEP)


def test_a_degree_once_believed_slow_is_tried_again_though_nobody_observes_it() -> None:
    sib = Sib(profile())
    observe(sib, 1, 1.0, 20)
    observe(sib, 4, 2.0, 20)
    observe(sib, 1, 1.0, 9)
    assert belief(sib, 4) > 1.5
    seen = []
    for _ in range(300):
        observe(sib, 1, 1.0)
        seen.append(belief(sib, 4))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 1.03
    assert belief(sib, 1) == pytest.approx(1.0)


def test_what_a_faded_belief_rested_on_is_forgotten() -> None:
    sib = Sib(profile())
    observe(sib, 1, 1.0, 20)
    observe(sib, 4, 2.0, 20)
    observe(sib, 1, 1.0, 300)
    # One good step, or three, leave no old ratio that would bring the belief back.
    observe(sib, 4, 1.0, 3)
    assert belief(sib, 4) < 1.05


def test_a_degree_that_is_slow_stays_believed_slow_while_it_is_observed_now_and_then() -> None:
    sib = Sib(profile())
    observe(sib, 1, 1.0, 20)
    observe(sib, 4, 1.6, 20)
    for _ in range(40):
        observe(sib, 1, 1.0, 5)
        assert belief(sib, 4) > 1.4
        observe(sib, 4, 1.6)
        assert belief(sib, 4) == pytest.approx(1.6, rel=0.01)
        assert belief(sib, 1) == pytest.approx(1.0, rel=0.05)


def test_a_hiccup_of_one_degree_moves_no_other() -> None:
    sib = Sib(profile())
    observe(sib, 1, 1.0, 20)
    observe(sib, 4, 1.0, 20)
    observe(sib, 4, 100.0, 4)
    assert belief(sib, 1) == pytest.approx(1.0)
    assert belief(sib, 4) == pytest.approx(1.0)


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.floats(1e-6, 1e6)), max_size=80))
def test_whatever_is_observed_of_several_degrees_all_factors_stay_in_bounds(
    steps: list[tuple[int, float]],
) -> None:
    sib = Sib(profile())
    for dop, ratio in steps:
        observe(sib, dop, ratio)
    for dop in (1, 2, 4, 8):
        assert 0.5 - 1e-9 <= belief(sib, dop) <= 2.0 + 1e-9


# ---- monotony: more work is never predicted to take less -----------------------------------------


def test_no_prediction_falls_when_work_is_added() -> None:
    rng = random.Random(3)
    for one in (profile(), default_profile(LLAMA, "NVIDIA H200"), default_profile(LLAMA, "cpu")):
        sib = Sib(one)
        for _ in range(300):
            dop = rng.randint(1, 8)
            items = [(rng.randrange(5000), rng.randint(1, 5000)) for _ in range(rng.randint(1, 5))]
            more = [*items, (rng.randrange(5000), rng.randint(1, 5000))]
            assert sib.prefill_s(dop, more) >= sib.prefill_s(dop, items)
            masters, batch, kv = rng.randint(1, dop), rng.randint(1, 500), rng.randrange(10**6)
            base = sib.decode_s(dop=dop, num_masters=masters, batch=batch, kv_tokens=kv)
            step = {"dop": dop, "num_masters": masters}
            assert sib.decode_s(**step, batch=batch + 1, kv_tokens=kv) >= base
            assert sib.decode_s(**step, batch=batch, kv_tokens=kv + 1000) >= base


# ---- the default, against the roofline tables and vLLM's measured times --------------------------


@pytest.mark.parametrize(
    ("tokens", "limit_ms", "vllm_ms"), [(1_000, 17, 27), (16_000, 371, 477), (128_000, 9030, 10508)]
)
def test_the_h200_default_lies_between_the_limit_and_a_real_server(
    tokens: int, limit_ms: float, vllm_ms: float
) -> None:
    predicted = Sib(default_profile(LLAMA, "NVIDIA H200")).prefill_s(1, [(0, tokens)]) * 1e3
    assert 0.95 * limit_ms <= predicted <= 1.1 * vllm_ms


@pytest.mark.parametrize(
    ("batch", "context", "limit_ms", "vllm_ms"),
    [(1, 1000, 3.27, 4.7), (32, 4000, 19.1, 21.0), (64, 1000, 11.1, 14.2)],
)
def test_the_h200_default_for_decode_lies_there_too(
    batch: int, context: int, limit_ms: float, vllm_ms: float
) -> None:
    sib = Sib(default_profile(LLAMA, "NVIDIA H200"))
    found = sib.decode_s(dop=1, num_masters=1, batch=batch, kv_tokens=batch * context) * 1e3
    assert 0.95 * limit_ms <= found <= 1.25 * vllm_ms


def test_compute_bound_batches_are_those_of_the_roofline() -> None:
    assert default_profile(LLAMA, "NVIDIA H200").compute_bound_batch == pytest.approx(188, rel=0.02)
    assert default_profile(LLAMA, "NVIDIA A800-SXM4-80GB").compute_bound_batch == pytest.approx(
        156, rel=0.02
    )


def test_an_unknown_gpu_is_slower_than_a_known_one() -> None:
    known, unknown = (Sib(default_profile(LLAMA, d)) for d in ("NVIDIA A100", "GeForce 9"))
    assert unknown.prefill_s(1, STEP) > known.prefill_s(1, STEP)


# ---- files ---------------------------------------------------------------------------------------


def test_a_profile_survives_its_file() -> None:
    one = default_profile(LLAMA, "NVIDIA H200", max_dop=2)
    assert parse_profile(dump_profile(one), where="x") == one


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 7}, "x: format is 7, this loongd reads 1"),
        ({"prefill": []}, "x: a profile needs prefill and decode coefficients"),
        ({"tp": "two"}, "x: not a profile: Expected `int`, got `str` - at `$.tp`"),
    ],
)
def test_a_bad_file_is_refused_in_words(change: dict[str, object], message: str) -> None:
    data = msgspec.json.decode(dump_profile(profile()))
    with pytest.raises(ConfigError) as caught:
        parse_profile(msgspec.json.encode({**data, **change}), where="x")
    assert str(caught.value) == message


def test_negative_coefficients_are_refused() -> None:
    data = msgspec.json.decode(dump_profile(profile()))
    data["prefill"][0]["coefficients"]["gamma_s"] = -1e-9
    with pytest.raises(ConfigError, match=r"x: \['gamma_s'\] of dop 1 must not be negative"):
        parse_profile(msgspec.json.encode(data), where="x")


def test_by_default_a_group_pays_from_some_hundred_tokens_on() -> None:
    """Its small steps are graphs: no host holds them up."""
    sib = Sib(default_profile(LLAMA, "NVIDIA H200"))
    assert sib.prefill_s(2, [(0, 50)]) >= sib.prefill_s(1, [(0, 50)])
    assert sib.prefill_s(2, [(0, 1_000)]) < 0.8 * sib.prefill_s(1, [(0, 1_000)])
    assert sib.prefill_s(2, [(0, 20_000)]) < 0.6 * sib.prefill_s(1, [(0, 20_000)])


def test_one_more_prompt_adds_to_a_step_what_the_step_takes_longer() -> None:
    costs = Coefficients(alpha_s=0.1, beta_s=0.001, gamma_s=1e-6, item_s=0.02)
    two_s, three_s = (costs.time_s([(0, 100)] * count) for count in (2, 3))
    assert costs.added_s(100) == pytest.approx(three_s - two_s)
