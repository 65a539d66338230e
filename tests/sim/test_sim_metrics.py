"""Metrics, goodput and traces against numbers computed by hand."""

import gzip
import json

import pytest
from sim_kit import random_trace, simulate

from loongd.errors import ConfigError
from loongd.sched.policies.static import FixedGroups
from loongd.sim.goodput import Point, crossing, find_goodput
from loongd.sim.metrics import Slo, attainment, summarise
from loongd.sim.outcome import Outcome
from loongd.sim.picture import draw
from loongd.sim.report import as_json, as_table
from loongd.sim.trace import TracedRequest, at_rate, read_trace


def outcome(*, ttft_s, tpot_s, input_tokens=1000, num_tokens=11, failure=None):
    first_s = 100.0 + ttft_s
    return Outcome(
        request_id="r0",
        arrival_s=100.0,
        input_tokens=input_tokens,
        output_tokens=num_tokens,
        num_tokens=num_tokens,
        first_token_s=first_s,
        last_token_s=first_s,
        end_s=first_s + tpot_s * (num_tokens - 1),
        failure=failure,
    )


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "input_tokens", "good"),
    [
        (15.0, 0.049, 1000, True),
        (15.1, 0.010, 1000, False),
        (0.1, 0.051, 1000, False),
        # 25 * 100,000 * 10 us = 25 s is more than the floor.
        (24.9, 0.010, 100_000, True),
        (25.1, 0.010, 100_000, False),
    ],
)
def test_slo_of_figure_12(ttft_s, tpot_s, input_tokens, good):
    slo = Slo(lambda num_tokens: 1e-5 * num_tokens)
    assert slo.is_good(outcome(ttft_s=ttft_s, tpot_s=tpot_s, input_tokens=input_tokens)) is good


def test_failures_and_single_tokens_in_the_slo():
    slo = Slo(lambda num_tokens: 0.0)
    single = outcome(ttft_s=1.0, tpot_s=0.0, num_tokens=1)
    failed = outcome(ttft_s=1.0, tpot_s=0.0, failure="too long")
    assert single.tpot_s == 0.0
    assert attainment([single, single, single, failed], slo) == 0.75


def test_summary_by_hand():
    trace = [TracedRequest(0.0, 100, 3), TracedRequest(10.0, 8000, 1)]
    run = simulate(FixedGroups(together=True), trace, slots=[10_000])
    summary = summarise(run, Slo(lambda num_tokens: 0.0, ttft_floor_s=2.0))
    assert [c.name for c in summary.classes] == ["all", "< 4K", "4K to 32K"]
    everyone = summary.of("all")
    # TTFT 1.1 and 9.0 s; the first then takes 2 * 10 ms.
    assert everyone.ttft_s.mean == pytest.approx(5.05)
    assert everyone.ttft_s.p50 == pytest.approx(5.05)
    assert everyone.tpot_s.p99 == pytest.approx(0.010)
    assert everyone.output_s_per_token == pytest.approx(0.005)
    assert everyone.input_s_per_token == pytest.approx((1.1 / 100 + 9.0 / 8000) / 2)
    assert everyone.total_s_per_token == pytest.approx((1.12 / 103 + 9.0 / 8001) / 2)
    assert everyone.slo_attainment == 0.5
    assert summary.of("< 4K").slo_attainment == 1.0
    assert summary.offered_rps == pytest.approx(0.2)
    assert summary.busy["prefill"] == pytest.approx(10.1 / 19.0)
    with pytest.raises(KeyError):
        summary.of(">= 128K")
    assert json.loads(json.dumps(as_json(summary)))["classes"][0]["ttft_s"]["mean"] == 5.05
    assert as_table(summary).count("\n") == 5


def test_crossing_interpolates():
    points = [Point(1.0, 1.0), Point(3.0, 0.8), Point(2.0, 0.95)]
    assert crossing(points, 0.9) == pytest.approx(2.0 + 1 / 3)
    assert crossing(points[:1], 0.9) is None
    assert crossing(points, 0.5) is None


@pytest.mark.parametrize("guess_rps", [0.5, 2.0, 7.0, 40.0])
def test_goodput_finds_a_known_crossing(guess_rps):
    def linear(rate_rps):
        return max(0.0, 1.0 - rate_rps / 70)

    found = find_goodput(linear, guess_rps)
    assert found.rate_rps == pytest.approx(7.0)
    assert len(found.points) <= 16


def test_goodput_out_of_reach():
    assert find_goodput(lambda rate_rps: 0.0, 1.0).rate_rps is None


def write(path, text):
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz"])
def test_read_and_stretch_a_trace(tmp_path, name):
    path = write(tmp_path / name, "arrival_s,input_len,output_len\n1.0,10,2\n2.0,99,3\n5.0,7,1\n")
    assert read_trace(path, num_requests=2, input_cap=50) == [
        TracedRequest(1.0, 10, 2),
        TracedRequest(2.0, 50, 3),
    ]
    # Three requests at 0.5/s: the last at 6 s.
    assert [r.arrival_s for r in at_rate(read_trace(path), 0.5)] == [0.0, 1.5, 6.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", "columns are a,b"),
        ("arrival_s,input_len,output_len\n", "has no requests"),
        ("arrival_s,input_len,output_len\n1,x,2\n", "line 2"),
        ("arrival_s,input_len,output_len\n1,5,2\n1,5,0\n", "line 3.*at least 1"),
        ("arrival_s,input_len,output_len\n1,5\n", "line 2"),
    ],
)
def test_broken_traces_name_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path / "t.csv", text))


def test_missing_or_short_traces(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    path = write(tmp_path / "t.csv", "arrival_s,input_len,output_len\n1,5,2\n")
    with pytest.raises(ConfigError, match="has 1 requests, 2 wanted"):
        read_trace(path, num_requests=2)


def test_picture(tmp_path):
    policy = FixedGroups(together=False)
    run = simulate(policy, random_trace(1, 20), slots=[4000] * 3, record_steps=True)
    draw(run, tmp_path / "run.png")
    data = (tmp_path / "run.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
