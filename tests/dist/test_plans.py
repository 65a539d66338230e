"""Whole requests under random plans: any chunking, group, placement, master and migration.

The oracle is transformers: a full forward pass over the tokens so far, after every sampling step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster_kit import Cluster, Sequence
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from loongd.wire import Sampling
from loongd.worker import geometry
from loongd.worker.layout import JointPart, RowBytes
from loongd.worker.shares import Shares

NUM_INSTANCES = 4


def _save(model: torch.nn.Module, path: Path) -> Path:
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def mistral_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sliding window of 7 tokens in every layer."""
    torch.manual_seed(1)
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=199,
        initializer_range=0.2,
        sliding_window=7,
        max_position_embeddings=1024,
    )
    return _save(MistralForCausalLM(config), tmp_path_factory.mktemp("mistral"))


def _expected(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, -1]
    return torch.log_softmax(logits.float(), -1)


@st.composite
def _groups(draw: st.DrawFn, must: list[int]) -> list[int]:
    others = [i for i in range(NUM_INSTANCES) if i not in must]
    extra = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
    group = list(draw(st.permutations([*must, *extra])))
    return group or [draw(st.integers(0, NUM_INSTANCES - 1))]


def _keep(draw: st.DrawFn, group: list[int], count: int, home: int | None) -> list[tuple[int, int]]:
    if home in group:
        return [(home, count)]
    cuts = sorted(draw(st.lists(st.integers(0, count), max_size=2)))
    ends = zip([0, *cuts], [*cuts, count], strict=True)
    return [(draw(st.sampled_from(group)), hi - lo) for lo, hi in ends if hi > lo]


def _pauses(draw: st.DrawFn, cluster: Cluster) -> list[int]:
    """Layers before which a step pauses, often none."""
    layers = st.integers(1, cluster.spec.num_layers - 1)
    return sorted(draw(st.just(set()) | st.sets(layers)))


def _other(draw: st.DrawFn, cluster: Cluster) -> None:
    """A step of another request on any group, which is gone after it."""
    other = Sequence("other", [3, 1, 4, 1, 5, 9][: draw(st.integers(1, 6))])
    group = draw(_groups([]))
    master = draw(st.none() | st.sampled_from(group))
    keep = _keep(draw, group, len(other.tokens), None)
    cluster.extend(group, [(other, len(other.tokens), master, keep)])
    cluster.free(other)


def _live(draw: st.DrawFn, cluster: Cluster, model: torch.nn.Module, length: int) -> None:
    """One request: its prompt in random chunks, of which any may pause between layers while
    another request runs, then decode, with migrations in between."""
    prompt = [(37 * i + 11 * length) % 199 for i in range(length)]
    sequence = Sequence("r", prompt)
    home = draw(st.none() | st.integers(0, NUM_INSTANCES - 1))
    cluster.reset()
    while sequence.done < len(prompt):
        count = draw(st.integers(1, len(prompt) - sequence.done))
        group = draw(_groups(sequence.holders))
        master = draw(st.none() | st.sampled_from(group))
        last = sequence.done + count == len(prompt)
        work = [(sequence, count, master, _keep(draw, group, count, home))]
        pauses = _pauses(draw, cluster)
        between = partial(_other, draw, cluster)
        sampled = cluster.extend(group, work, sample=last, pauses=pauses, between=between)
        cluster.check(sequence)
    for _ in range(4):
        logprobs = _expected(model, sequence.tokens)
        token = sampled["r"].token
        assert logprobs[token] >= logprobs.max() - 1e-4
        assert sampled["r"].logprob == pytest.approx(float(logprobs[token]), abs=2e-3)
        sequence.tokens.append(token)
        if draw(st.booleans()):
            source = draw(st.sampled_from(sequence.holders))
            target = draw(st.sampled_from([i for i in range(NUM_INSTANCES) if i != source]))
            cluster.migrate(sequence, source, target, draw(st.integers(1, sequence.on(source))))
            cluster.check(sequence)
        group = draw(_groups(sequence.holders))
        master = draw(st.sampled_from(group))
        sampled = cluster.extend(group, [(sequence, 1, master, [])])
        cluster.check(sequence)
    cluster.free(sequence)
    cluster.check()


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Size of the group for each member that attended to own and others' queries in one."""
    found: list[int] = []
    joint = geometry.joint

    def counting(shares: Shares, *parts: Any) -> JointPart | None:
        part = joint(shares, *parts)
        found.extend([shares.dop] * (part is not None))
        return part

    monkeypatch.setattr(geometry, "joint", counting)
    return found


SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def _eager(monkeypatch: pytest.MonkeyPatch, llama_dir: Path, round_tokens: int) -> Cluster:
    """Instances that compute so slowly that keys of older tokens travel wherever it helps."""
    of = RowBytes.of

    def slow(*sizes: int) -> RowBytes:
        return replace(of(*sizes), pair_flops=1 << 30, round_tokens=round_tokens)

    return _costing(monkeypatch, llama_dir, slow)


def _asking(monkeypatch: pytest.MonkeyPatch, llama_dir: Path) -> Cluster:
    """Instances of whose older tokens queries come to all, and are joined however few they are."""
    return _costing(monkeypatch, llama_dir, lambda *_: RowBytes(query=1, key=1 << 20, joint_rows=0))


def _costing(
    monkeypatch: pytest.MonkeyPatch, llama_dir: Path, of: Callable[..., RowBytes]
) -> Cluster:
    with monkeypatch.context() as patch:
        patch.setattr(RowBytes, "of", of)
        return Cluster(llama_dir, NUM_INSTANCES)


@pytest.mark.timeout(300)
def test_llama_under_any_plan(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    clusters = [Cluster(llama_dir, NUM_INSTANCES), _asking(monkeypatch, llama_dir)]
    clusters += [_eager(monkeypatch, llama_dir, round_tokens) for round_tokens in (3, 16)]

    @settings(max_examples=40, **SLOW)
    @given(st.data(), st.sampled_from(clusters), st.sampled_from((1, 2, 3, 4, 5, 17, 40)))
    def live(data: st.DataObject, cluster: Cluster, length: int) -> None:
        _live(data.draw, cluster, model, length)

    live()


@pytest.mark.parametrize("dop", [2, 3, 4])
def test_chunks_of_one_group_in_which_queries_are_joined(
    dop: int, llama_dir: Path, monkeypatch: pytest.MonkeyPatch, joined: list[int]
) -> None:
    """Three chunks, kept anywhere; every holder of the first is asked by the others in each."""
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    cluster = _asking(monkeypatch, llama_dir)
    chunk = st.integers(dop, 20)

    @settings(max_examples=10, **SLOW)
    @given(st.data(), st.permutations(range(NUM_INSTANCES)), st.tuples(chunk, chunk, chunk))
    def live(data: st.DataObject, order: list[int], counts: tuple[int, ...]) -> None:
        cluster.reset()
        joined.clear()
        group = order[:dop]
        sequence = Sequence("r", [(37 * i + 11 * dop) % 199 for i in range(sum(counts))])
        num_holders = []
        for number, count in enumerate(counts):
            num_holders.append(len(sequence.holders))
            work = [(sequence, count, None, _keep(data.draw, group, count, None))]
            sampled = cluster.extend(group, work, sample=number == 2)
        logprobs = _expected(model, sequence.tokens)
        assert sampled["r"].logprob == pytest.approx(float(logprobs.max()), abs=2e-3)
        assert joined == [dop] * sum(num_holders)
        cluster.check(sequence)

    live()


@pytest.mark.timeout(300)
def test_sliding_windows_under_any_plan(mistral_dir: Path) -> None:
    model = MistralForCausalLM.from_pretrained(
        mistral_dir, dtype=torch.float32, attn_implementation="eager"
    )
    cluster = Cluster(mistral_dir, NUM_INSTANCES)

    @settings(max_examples=20, **SLOW)
    @given(st.data(), st.sampled_from((1, 5, 7, 8, 30)))
    def live(data: st.DataObject, length: int) -> None:
        _live(data.draw, cluster, model, length)

    live()


def test_a_batch_of_ragged_requests_with_targets_and_masters_of_their_own(
    llama_dir: Path,
) -> None:
    """Prefill together with different placements, then decode together with different masters."""
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    cluster = Cluster(llama_dir, NUM_INSTANCES)
    lengths = (1, 2, 3, 4, 50, 200)
    sequences = [
        Sequence(str(n), [(31 * i + n) % 199 for i in range(length)])
        for n, length in enumerate(lengths)
    ]
    keeps = [[(0, 1)], [(3, 2)], [(1, 1), (2, 2)], [(2, 4)], [(0, 20), (3, 30)], [(1, 199), (2, 1)]]
    work = [
        (sequence, len(sequence.tokens), None, keep)
        for sequence, keep in zip(sequences, keeps, strict=True)
    ]
    sampled = cluster.extend([2, 0, 3, 1], work)
    cluster.check(*sequences)
    for step in range(3):
        for sequence in sequences:
            token = sampled[sequence.name].token
            assert token == int(_expected(model, sequence.tokens).argmax())
            sequence.tokens.append(token)
        masters = [(n + step) % NUM_INSTANCES for n in range(len(sequences))]
        work = [
            (sequence, 1, master, []) for sequence, master in zip(sequences, masters, strict=True)
        ]
        sampled = cluster.extend([1, 3, 0, 2], work)
        cluster.check(*sequences)


def test_two_requests_go_on_from_one_prefix(llama_dir: Path) -> None:
    """A segment of another request, spread over two instances, is the beginning of both."""
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    cluster = Cluster(llama_dir, NUM_INSTANCES)
    prefix = [(29 * i + 5) % 199 for i in range(30)]
    first = Sequence("first", [*prefix, 7, 8, 9])
    cluster.extend([0, 1, 2], [(first, 30, None, [(1, 17), (2, 13)])], sample=False)
    second = Sequence("second", [*prefix, 150, 3], 30, list(first.segments), dict(first.placed))
    work = [(first, 3, None, [(0, 2), (3, 1)]), (second, 2, 1, [])]
    for _ in range(3):
        sampled = cluster.extend([3, 1, 2, 0], work)
        for sequence in (first, second):
            token = sampled[sequence.name].token
            assert token == int(_expected(model, sequence.tokens).argmax())
            sequence.tokens.append(token)
        work = [(first, 1, 2, []), (second, 1, 0, [])]
    for pool in cluster.pools:
        pool.check()
    assert sum(pool.num_used for pool in cluster.pools) == 30 + (3 + 2) + (2 + 2)


def test_a_request_without_a_drawable_token_is_left_out_and_harms_no_other(
    llama_dir: Path,
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    cluster = Cluster(llama_dir, NUM_INSTANCES)
    sequences = [Sequence(str(n), [(31 * i + n) % 199 for i in range(9)]) for n in range(3)]
    work = [(sequence, 9, None, [(0, 9)]) for sequence in sequences]
    none_allowed = {"1": Sampling(banned=list(range(199)), num_logprobs=1)}
    sampled = cluster.extend([0, 1], work, sampling=none_allowed)
    assert sorted(sampled) == ["0", "2"]
    for sequence in (sequences[0], sequences[2]):
        expected = int(_expected(model, sequence.tokens).argmax())
        assert sampled[sequence.name].token == expected
    cluster.check(*sequences)


PLANS = (
    ("whole on one", [1], [(0,)], None),
    ("striped, kept on the first", [2], [(0,)], None),
    ("striped, kept on the last", [4], [(3,)], None),
    ("striped, kept on two", [4], [(1, 2)], None),
    ("striped, kept on all", [3], [(0, 1, 2)], None),
    ("two chunks, other groups", [2, 3], [(0,), (1, 0)], None),
    ("four chunks, shrinking", [4, 3, 2, 1], [(0,), (0,), (0,), (0,)], None),
    ("two chunks, then migrated", [3, 2], [(0, 1), (1,)], (1, 3)),
    ("scaled up twice", [1], [(0,)], "grow"),
    ("three chunks on alternating keepers", [4, 4, 4], [(0,), (1,), (2,)], None),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("length", [9, 70, 333])
def test_smollm2_goldens(length: int, smollm2_dir: Path) -> None:
    """Thirty (prompt, plan) pairs of the real model, token for token against transformers."""
    model = LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    prompt = [(53 * i * i + 7 * i) % 40000 + 100 for i in range(length)]
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, length, dtype=torch.int64),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    expected = output[0, length:].tolist()
    cluster = Cluster(smollm2_dir, NUM_INSTANCES)
    for name, dops, keepers, then in PLANS:
        assert _golden(cluster, prompt, dops, keepers, then) == expected, name


def _golden(
    cluster: Cluster,
    prompt: list[int],
    dops: list[int],
    keepers: list[tuple[int, ...]],
    then: tuple[int, int] | str | None,
) -> list[int]:
    sequence = Sequence("r", list(prompt))
    for number, (dop, keep_on) in enumerate(zip(dops, keepers, strict=True)):
        count = len(prompt) * (number + 1) // len(dops) - sequence.done
        group = sorted({*range(dop), *keep_on, *sequence.holders})
        share, left = divmod(count, len(keep_on))
        keep = [(i, share + (n < left)) for n, i in enumerate(keep_on)]
        last = sequence.done + count == len(prompt)
        sampled = cluster.extend(group, [(sequence, count, None, keep)], sample=last)
    if isinstance(then, tuple):
        cluster.migrate(sequence, *then, sequence.on(then[0]) // 2)
    for step in range(5):
        sequence.tokens.append(sampled["r"].token)
        group = sequence.holders
        if then == "grow":
            group = sorted({*group, *range(1 + step // 2)})
        sampled = cluster.extend(group, [(sequence, 1, group[-1], [])])
    cluster.check(sequence)
    sequence.tokens.append(sampled["r"].token)
    cluster.free(sequence)
    return sequence.tokens[len(prompt) :]
