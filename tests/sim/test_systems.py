"""Whole systems with the real SIB: what each policy is for, and the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sim_kit import A800, PROFILES, random_trace

from loongd.errors import ConfigError
from loongd.sched.sib import Sib
from loongd.sim.engine import Options
from loongd.sim.metrics import summarise
from loongd.sim.systems import System, choose_policy, load_profile
from loongd.sim.trace import TracedRequest

SIMULATE = Path(__file__).resolve().parents[2] / "tools" / "simulate.py"
SLOTS = 210_000


def mixed(num_shorts=40):
    """One prompt of 150,000 tokens at 0 s, and a short one every half second."""
    shorts = [TracedRequest(0.1 + 0.5 * i, 200, 20) for i in range(num_shorts)]
    return [TracedRequest(0.0, 150_000, 20), *shorts]


def run(policy, trace, *, num_instances=4, **limits):
    system = System(policy, A800, num_instances, SLOTS).limited(**limits)
    return system.run(trace, Options())


def test_short_prompts_do_not_wait_behind_a_long_one():
    ours = summarise(run("loongserve", mixed())).of("< 4K")
    fixed = summarise(run("static_sp", mixed())).of("< 4K")
    # The long prompt takes at least six seconds on all four instances.
    assert A800.prefill[-1].coefficients.time_s([(0, 150_000)]) > 5.0
    assert fixed.ttft_s.max > 5.0
    assert ours.ttft_s.max < 0.6
    assert ours.tpot_s.max < 0.05


def test_a_smaller_bound_makes_short_prompts_wait_less():
    # One instance: nowhere else to go.
    waits = {
        bound_s: summarise(
            run("loongserve", mixed(), num_instances=1, max_prefill_wait_s=bound_s)
        ).of("< 4K")
        for bound_s in (0.2, 2.0)
    }
    assert waits[0.2].ttft_s.p90 < waits[2.0].ttft_s.p90 < 5.0


def test_chunks_cost_a_lone_long_prompt_little():
    alone = [TracedRequest(0.0, 150_000, 2)]
    chunked = run("loongserve", alone).outcomes[0].ttft_s
    whole = run("static_sp", alone).outcomes[0].ttft_s
    assert whole < chunked < 1.15 * whole


def test_all_policies_serve_the_same_trace():
    trace = random_trace(5, 50, longest=60_000)
    for policy in ("loongserve", "fcfs", "static_tp", "static_sp", "replicas", "chunked"):
        outcomes = run(policy, trace).outcomes
        assert [o.num_tokens for o in outcomes] == [r.output_tokens for r in trace], policy


def test_predict_alone_is_the_sib():
    system = System("static_sp", A800, 4, SLOTS)
    assert system.predict_alone_s(1000) == Sib(A800).prefill_s(4, [(0, 1000)])


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match="replicas"):
        choose_policy("magic", Sib(A800))
    with pytest.raises(ConfigError, match="known: a800-llama2-7b-tp1"):
        load_profile("z9000", PROFILES)


def simulate(*args):
    command = [sys.executable, SIMULATE, *map(str, args)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_command_line(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = [f"{i},{100 * i + 1},{i % 7 + 1}" for i in range(30)]
    trace.write_text("\n".join(["arrival_s,input_len,output_len", *rows, ""]))
    common = ("--trace", trace, "--profile", "a800-llama2-7b-tp2", "--instances", 2)
    picture, summary = tmp_path / "p.png", tmp_path / "s.json"
    done = simulate(*common, "--rate", 3, "--json", summary, "--picture", picture, "--check")
    assert done.returncode == 0, done.stderr
    assert "30 requests in" in done.stdout
    assert picture.stat().st_size > 5000
    written = json.loads(summary.read_text())
    assert written["num_requests"] == 30
    assert written["classes"][0]["num_failed"] == 0

    wrong = simulate(*common, "--policy", "magic")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("tools/simulate: error: policy 'magic' is unknown")
    assert wrong.stderr.count("\n") == 1
