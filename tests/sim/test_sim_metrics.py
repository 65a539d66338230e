"""Metrics, goodput and traces against numbers computed by hand."""

import gzip
import json

import pytest
from sim_kit import random_trace, simulate

from loongd.errors import ConfigError
from loongd.sched.policies.static import FixedGroups
from loongd.sim.goodput import Point, crossing, find_goodput
from loongd.sim.metrics import Slo, attainment, summarise
from loongd.sim.outcome import Outcome, StepRecord
from loongd.sim.picture import draw, lanes
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


def test_a_summary_says_what_failed_and_why():
    """Longer than the pool, all at 0 s: refused at once, so that the run takes no time."""
    trace = [TracedRequest(0.0, 7000 + i, 3) for i in range(5)]
    run = simulate(FixedGroups(together=True), trace, slots=[500])
    summary = summarise(run, Slo(lambda num_tokens: 0.0))
    assert run.end_s == summary.achieved_rps == 0.0
    assert summary.failures == tuple(f"r{i}: {run.outcomes[i].failure}" for i in range(3))
    assert "500 slots" in summary.failures[0]
    table = as_table(summary).splitlines()
    assert table[3].split() == ["all", "5", "5", *"|---|---|-|---|", "0.0"]
    assert table[5:] == [*(f"failed: {why}" for why in summary.failures), "and 2 more failed"]


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


HEAD = "arrival_s,input_len,output_len\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n", "columns are a,b"),
        (HEAD, "has no requests"),
        (HEAD + "1,x,2\n", "t.csv, line 2: input_len is 'x'"),
        (HEAD + "1,5,2\n1,5,0\n", "line 3: output_len is '0', not a whole number from 1"),
        (HEAD + "1,-5,2\n", "line 2: input_len is '-5'"),
        (HEAD + f"1,5,{'9' * 5000}\n", "line 2: output_len is '999"),
        (HEAD + "1,5\n", "line 2: columns are '1,5', not 3 numbers"),
        (HEAD + "1,5,2,7\n", "line 2: columns are '1,5,2,7'"),
        (HEAD + "nan,5,2\n", "line 2: arrival_s is 'nan'"),
        (HEAD + "1,5,2\n\ninf,5,2\n", "line 4: arrival_s is 'inf'"),
        (HEAD + "-1,5,2\n", "line 2: arrival_s is '-1'"),
        (HEAD + "1,5é,2\n", "line 2: input_len is '5"),
        (HEAD + '1,5,"' + "7" * 200_000 + '"\n', "line 2: field larger"),
    ],
)
def test_broken_traces_name_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(write(tmp_path / "t.csv", text))


def test_empty_lines_of_a_trace_are_skipped(tmp_path):
    path = write(tmp_path / "t.csv", HEAD + "1,10,2\n\n2,20,3\n\n")
    assert read_trace(path) == [TracedRequest(1.0, 10, 2), TracedRequest(2.0, 20, 3)]


def spoil(data, at):
    return data[:at] + bytes([data[at] ^ 255]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-20],
        lambda data: b"arrival_s",
        lambda data: spoil(data, 12),
        lambda data: spoil(data, -8),
    ],
    ids=["cut", "plain", "deflate", "checksum"],
)
def test_broken_gzip_files_name_the_file(tmp_path, damage):
    path = write(tmp_path / "t.csv.gz", HEAD + "1,10,2\n")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=r"t\.csv\.gz: "):
        read_trace(path)


def test_a_rate_so_low_that_the_run_never_ends():
    with pytest.raises(ConfigError, match="the last would arrive after"):
        at_rate([TracedRequest(0.0, 1, 1), TracedRequest(1.0, 1, 1)], 1e-300)


def test_missing_or_short_traces(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    path = write(tmp_path / "t.csv", "arrival_s,input_len,output_len\n1,5,2\n")
    with pytest.raises(ConfigError, match="has 1 requests, 2 wanted"):
        read_trace(path, num_requests=2)


def test_lanes_of_a_picture_by_hand():
    def step(from_s, to_s, members, *requests):
        return StepRecord("decode", from_s, to_s, members, tuple((r, 1) for r in requests), "")

    found = lanes(
        [
            step(0.0, 1.0, (0, 1), "r1", "r2"),
            step(1.0, 2.0, (0,), "r1", "r2"),
            # r2 has ended, r3 takes its lane; r1 keeps its own over the pause.
            step(5.0, 6.0, (0,), "r3", "r1"),
            step(6.0, 7.0, (0,), "r1", "r3", "r4"),
        ]
    )
    assert {(s.instance, s.owner, s.lane, s.from_s, s.to_s) for s in found} == {
        (0, "r1", 0, 0.0, 2.0),
        (0, "r2", 1, 0.0, 2.0),
        (1, "r1", 0, 0.0, 1.0),
        (1, "r2", 1, 0.0, 1.0),
        (0, "r1", 0, 5.0, 7.0),
        (0, "r3", 1, 5.0, 7.0),
        (0, "r4", 2, 6.0, 7.0),
    }


def test_picture(tmp_path):
    policy = FixedGroups(together=False)
    run = simulate(policy, random_trace(1, 20), slots=[4000] * 3, record_steps=True)
    draw(run, tmp_path / "run.png")
    data = (tmp_path / "run.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000
