"""Whole systems with the real SIB: what each policy is for, and the command line."""

import json
import random
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from sim_kit import A800, PROFILES, random_trace

from loongd.errors import ConfigError
from loongd.sched.chunks import HOST_S
from loongd.sched.scheduler import Scheduler
from loongd.sched.sib import Sib
from loongd.sim.engine import Options
from loongd.sim.metrics import summarise
from loongd.sim.systems import LIMITS, System, choose_policy, load_profile
from loongd.sim.trace import TracedRequest

SIMULATE = Path(__file__).resolve().parents[2] / "tools" / "simulate.py"
SLOTS = 210_000


def mixed(num_shorts=40):
    """One prompt of 150,000 tokens at 0 s, and a short one every half second."""
    shorts = [TracedRequest(0.1 + 0.5 * i, 200, 20) for i in range(num_shorts)]
    return [TracedRequest(0.0, 150_000, 20), *shorts]


def longest_chunk_s(sib, dop):
    """The bound, or twenty times a chunk's fixed time where that is longer, rounded up a size."""
    fixed_s = sib.prefill_s(dop, [(0, 0)]) + HOST_S
    return max(LIMITS.max_prefill_wait_s, 1.25 * 20 * fixed_s)


def run(policy, trace, *, num_instances=4, **limits):
    system = System(policy, A800, num_instances, SLOTS).limited(**limits)
    return system.run(trace, Options())


def test_short_prompts_do_not_wait_behind_a_long_one():
    ours = summarise(run("loongserve", mixed())).of("< 4K")
    fixed = summarise(run("static_sp", mixed())).of("< 4K")
    # The long prompt takes at least six seconds on all four instances.
    assert A800.prefill[-1].coefficients.time_s([(0, 150_000)]) > 5.0
    assert fixed.ttft_s.max > 5.0
    # Its own prefill and a decode step beside the chunk that it waits for.
    assert ours.ttft_s.max < longest_chunk_s(Sib(A800), 4) + 0.1
    assert ours.tpot_s.max < 0.05


def check_leaps(system, trace, **options):
    """Many equal decode steps told at once, and each one told: the same run to the last digit."""
    leaping, stepping = (system.run(trace, Options(leap=leap, **options)) for leap in (True, False))
    assert leaping.outcomes == stepping.outcomes
    assert leaping.totals == stepping.totals
    assert leaping.num_events == stepping.num_events
    assert leaping.end_s == stepping.end_s
    for kind, busy_s in stepping.busy_s.items():
        assert leaping.busy_s[kind] == pytest.approx(busy_s, rel=1e-12)


@pytest.mark.parametrize("policy", ["loongserve", "fcfs", "replicas", "static_sp", "chunked"])
@pytest.mark.parametrize("rate_rps", [1.0, 8.0])
def test_leaps_change_nothing(policy, rate_rps):
    system = System(policy, A800, 4, 30_000)
    check_leaps(system, random_trace(7, 60, longest=25_000, rate_rps=rate_rps))


@pytest.mark.parametrize("seed", [0, 1, 12, 16, 17, 28])
def test_leaps_beside_queues_and_long_prefills_change_nothing(seed):
    """Prompts wait for gain, for their turn, for slots; documents are between two chunks."""
    draw = random.Random(seed)
    rate_rps = draw.choice([3.0, 12.0, 40.0])
    longest = draw.choice([1_000, 30_000, 120_000])
    trace = random_trace(seed, 50, longest=longest, rate_rps=rate_rps)
    slots = draw.choice([20_000, 60_000, 210_000])
    system = System("loongserve", A800, draw.choice([1, 2, 4]), max(slots, longest // 2))
    reserve = draw.choice([10, 64, 1024])
    check_leaps(system, trace, reserve_tokens=reserve, tick_s=draw.choice([0.0, 0.5]))


@pytest.mark.parametrize("policy", ["static_sp", "chunked", "fcfs"])
@pytest.mark.parametrize("seed", range(3))
def test_leaps_of_groups_of_several_instances_change_nothing(policy, seed):
    """Masters take turns, also where a prompt of a token or two has left members without KV."""
    draw = random.Random(seed)
    lengths = [1, 2, 30, 4_000]
    trace = [TracedRequest(0.7 * i, draw.choice(lengths), draw.randint(1, 150)) for i in range(30)]
    check_leaps(System(policy, A800, 3, 4_000), trace, overhead_s=draw.choice([0.0, 0.003]))


def test_leaps_of_large_batches_with_a_master_on_each_instance_change_nothing():
    trace = [TracedRequest(0.001 * i, 20, 100 + i) for i in range(150)]
    check_leaps(System("static_sp", A800, 3, SLOTS), trace)


@pytest.mark.parametrize("seed", [0, 87, 117])
def test_leaps_in_an_overload_of_documents_change_nothing(seed):
    """Instances are full, held, idle for want of room, or between two chunks."""
    draw = random.Random(seed)
    gap_s, answer = draw.choice([0.1, 0.4, 1.5]), draw.choice([30, 150, 600])
    lengths = draw.choice([[100, 2_000, 30_000, 90_000], [2_000, 90_000], [500, 3_000, 9_000]])
    trace = [
        TracedRequest(gap_s * i, draw.choice(lengths), draw.randint(1, answer)) for i in range(30)
    ]
    num_instances, slots = draw.choice([2, 3, 4]), draw.choice([46_000, 60_000, 100_000])
    system = System("loongserve", A800, num_instances, slots)
    system = system.limited(max_prefill_wait_s=draw.choice([0.05, 0.3]))
    reserve, most = draw.choice([1, 10, 1024]), draw.choice([600, 1024])
    check_leaps(system, trace, reserve_tokens=reserve, max_tokens=most)


def test_a_group_that_outgrows_its_instance_finds_the_other_as_it_was_then():
    trace = [TracedRequest(0.0, 1_000, 600), TracedRequest(0.01, 200, 900)]
    check_leaps(System("loongserve", A800, 2, 1_500), trace, reserve_tokens=1)


def documents_in_turn():
    """A chat, a document, and three that wait behind it until they are urgent."""
    documents = [TracedRequest(1.0 + 0.1 * i, 150_000 + i, 20) for i in range(4)]
    return [TracedRequest(0.0, 100, 900), *documents]


def document_that_needs_room():
    """Four chats are moved together for a document, and may not move again for a second."""
    return [
        *(TracedRequest(0.01 * i, 3_000, 900) for i in range(4)),
        TracedRequest(1.0, 2 * 10**5, 9),
    ]


def document_on_two():
    """It decodes on two instances beside a prefill on the third, which has little room left."""
    return [TracedRequest(0.0, 150_000, 500), TracedRequest(9.0, 80_000, 20)]


TO_LEAP = [
    ("loongserve", 4, SLOTS, documents_in_turn),
    ("loongserve", 2, SLOTS, documents_in_turn),
    ("loongserve", 4, SLOTS, document_that_needs_room),
    ("loongserve", 3, 100_000, document_on_two),
    ("static_sp", 4, SLOTS, documents_in_turn),
]


@pytest.mark.parametrize(("policy", "num_instances", "slots", "make_trace"), TO_LEAP)
def test_leaps_where_many_can_be_taken_change_nothing(policy, num_instances, slots, make_trace):
    check_leaps(System(policy, A800, num_instances, slots), make_trace())


@pytest.mark.parametrize(
    ("case", "most"), list(zip(TO_LEAP, [0.20, 0.25, 0.07, 0.5, 0.04], strict=True))
)
def test_most_decode_steps_are_leapt_over(monkeypatch, case, most):
    """At most such a share of the events is told one by one."""
    seen, handle = [], Scheduler.handle

    def spy(self, *events):
        seen.extend(events)
        return handle(self, *events)

    monkeypatch.setattr(Scheduler, "handle", spy)
    policy, num_instances, slots, make_trace = case
    run = System(policy, A800, num_instances, slots).run(make_trace(), Options())
    assert len(seen) < most * run.num_events


def test_a_smaller_bound_makes_short_prompts_wait_less():
    # One instance: nowhere else to go.
    waits = {
        bound_s: summarise(
            run("loongserve", mixed(), num_instances=1, max_prefill_wait_s=bound_s)
        ).of("< 4K")
        for bound_s in (0.2, 2.0)
    }
    assert waits[0.2].ttft_s.p90 < waits[2.0].ttft_s.p90 < 5.0


@pytest.mark.parametrize("num_tokens", [64_000, 150_000, 400_000])
def test_chunks_cost_a_lone_long_prompt_less_than_five_percent(num_tokens):
    assert 1.0 < cost_of_chunks("a800-llama2-7b-tp2", 4, num_tokens) < 1.05


@pytest.mark.parametrize("profile", ["h200-llama2-7b-tp1", "h200-llama3-8b-tp1"])
def test_a_lone_prompt_loses_little_where_chunks_cost_much(profile):
    """As measured on two H200: it runs in parts of chunks, which are as long as memory allows."""
    for num_tokens in (64_000, 150_000, 190_000):
        assert 1.0 < cost_of_chunks(profile, 2, num_tokens) < 1.03
    for num_tokens in (400_000, 560_000):
        assert 1.0 < cost_of_chunks(profile, 2, num_tokens, in_steps=True) < 1.05


def cost_of_chunks(profile, num_instances, num_tokens, *, in_steps=False):
    """Times a lone prompt takes in chunks beside one step, or with `in_steps` beside as few as
    memory allows. The host's work of each step is counted, beside what the profile says."""
    system = System("loongserve", load_profile(profile, PROFILES), num_instances, 300_000)
    trace, options = [TracedRequest(0.0, num_tokens, 2)], Options(overhead_s=HOST_S)
    run = system.run(trace, options)
    assert run.totals.num_prefill_steps >= 2
    whole_s = system.predict_alone_s(num_tokens) + HOST_S
    if in_steps:
        unbound = system.limited(max_prefill_wait_s=1e6)
        whole_s = unbound.run(trace, options).outcomes[0].ttft_s
    return run.outcomes[0].ttft_s / whole_s


@pytest.mark.parametrize("profile", ["h200-llama3-8b-tp1", "h200-llama2-7b-tp1"])
def test_a_short_prompt_waits_for_one_chunk_at_most(profile):
    """Two instances that compute a document, and a chat every 70 ms: in between two chunks."""
    system = System("loongserve", load_profile(profile, PROFILES), 2, 300_000)
    chats = [TracedRequest(0.1 + 0.07 * i, 200, 1) for i in range(60)]
    run = system.run([TracedRequest(0.0, 200_000, 2), *chats], Options())
    sib = Sib(system.profile)
    own_s = sib.prefill_s(1, [(0, 8 * 200)])
    slowest_s = max(outcome.ttft_s for outcome in run.outcomes[1:])
    assert slowest_s <= longest_chunk_s(sib, 2) + 2 * own_s


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


def test_shipped_profiles_that_were_measured_say_with_what():
    """Predictions from all others are called rough."""
    for path in PROFILES.glob("*.json"):
        profile = load_profile(path.stem, PROFILES)
        assert not profile.measured or profile.versions, path.name


@pytest.fixture
def command(monkeypatch):
    monkeypatch.syspath_prepend(SIMULATE.parent)
    return import_module("simulate")


@pytest.mark.parametrize(
    "arguments",
    [
        *("--rate nan", "--rate 0", "--rate -1", "--rate 1e400", "--instances 0", "--instances -2"),
        *("--slots 0", "--num-requests -3", "--input-cap 0", "--max-tokens -5", "--reserve -5"),
        *("--noise -1", "--noise inf", "--seed x", "--overhead-ms -100000", "--overhead-ms nan"),
        *("--max-batched-tokens 0", "--prefill-wait -1", "--picture-to nan", "--worst -1"),
        *("--json /none/x.json", "--json /", "--picture x.txt", "--picture /none/x.png"),
    ],
)
def test_a_nonsensical_option_is_one_line_that_names_it(command, capsys, arguments):
    flag, value = arguments.split()
    with pytest.raises(SystemExit) as stop:
        command.parse_arguments(["--trace", "t.csv", "--profile", "p", flag, value])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.startswith(f"tools/simulate: error: argument {flag}: ")
    assert repr(value) in said
    assert said.count("\n") == 1


def test_sensible_options_are_taken(command, tmp_path):
    options = {"rate": 0.5, "noise": 0.0, "prefill_wait": 0.0, "worst": 0, "slots": 1}
    options |= {"json": tmp_path / "new.json", "picture": tmp_path / "p.svg"}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    args = command.parse_arguments(["--trace", "t.csv", "--profile", "p", *flags])
    assert {name: getattr(args, name) for name in options} == options


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


def test_a_prompt_that_fits_no_single_instance_ends_with_as_much_on_each():
    """It starts on the one instance where nobody decodes, and goes on with the other too."""
    trace = [TracedRequest(0.0, 2_000, 150), TracedRequest(1.0, 50_000, 4)]
    options = Options(record_steps=True, check=True, max_tokens=16, reserve_tokens=16)
    result = System("loongserve", A800, 2, 30_000).run(trace, options)
    kept = dict.fromkeys((0, 1), 0)
    for step in result.steps:
        if step.kind == "prefill" and any(name == "r1" for name, _ in step.items):
            ((_, count),) = step.items
            words = step.reason.rpartition("keep ")[2].partition(";")[0]
            alone = re.match(r"all on instance (\d)", words)
            parts = re.findall(r"([\d,]+) on (\d)", words)
            for number, where in [(str(count), alone[1])] if alone else parts:
                kept[int(where)] += int(number.replace(",", ""))
    assert sum(kept.values()) == 50_000
    assert abs(kept[0] - kept[1]) < 5_000, "and not as many as one has room for"
