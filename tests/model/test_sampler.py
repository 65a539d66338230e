"""Drawing: distributions by chi-square, adjustments against a naive numpy version."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loongd.model.sampler import Drawn, begin_sample, sample
from loongd.wire import Sampling, pack_tokens

VOCAB = 40


def logits(rows: int = 1, *, vocab: int = VOCAB, scale: float = 1.5, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def exact(logits_V, p: Sampling) -> np.ndarray:
    """Probabilities of each token, the plain way: sort, cut, renormalize, one filter at a time."""
    scores = logits_V.double().numpy() / p.temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    if p.top_k:
        probs[order[p.top_k :]] = 0
        probs /= probs.sum()
    if p.top_p < 1:
        kept, mass = [], 0.0
        for token in order:
            kept.append(token)
            mass += probs[token]
            if mass >= p.top_p:
                break
        probs[np.setdiff1d(np.arange(len(probs)), kept)] = 0
        probs /= probs.sum()
    probs[probs < p.min_p * probs.max()] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "p",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6),
        Sampling(temperature=1.0, top_k=6),
        Sampling(temperature=1.3, top_p=0.7),
        Sampling(temperature=1.0, min_p=0.15),
        Sampling(temperature=1.1, top_k=12, top_p=0.8),
        Sampling(temperature=2.0, top_k=20, top_p=0.9, min_p=0.2),
        Sampling(temperature=1.0, top_k=VOCAB + 5),
    ],
)
def test_distribution(p):
    num_draws = 6_000
    logits_V = logits()[0]
    expected = exact(logits_V, p) * num_draws
    drawn = sample(logits_V.expand(num_draws, -1), [p] * num_draws, list(range(num_draws)))
    counts = np.bincount([d.token for d in drawn], minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    tested = expected > 5
    chi2 = float(((counts - expected)[tested] ** 2 / expected[tested]).sum())
    degrees = int(tested.sum()) - 1
    # Wilson and Hilferty: the cube root of chi2 / degrees is nearly normal; 4 sigma
    normal = ((chi2 / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert normal < 4, (chi2, degrees)


def test_random_numbers_of_seeds_are_independent():
    """Neighbouring seeds at one position draw like neighbouring positions of one seed."""
    p = [Sampling(temperature=1.0, seed=seed) for seed in range(6_000)]
    drawn = sample(torch.zeros(len(p), 10), p, [7] * len(p))
    counts = np.bincount([d.token for d in drawn], minlength=10)
    assert ((counts - 600) ** 2 / 600).sum() < 34  # 9 degrees: p is about 1e-4


MIXED = [
    Sampling(temperature=1.0, seed=11),
    Sampling(),
    Sampling(temperature=0.8, top_p=0.9, seed=12),
    Sampling(temperature=1.0, top_k=3, seed=13, num_logprobs=2),
    Sampling(temperature=1.0, min_p=0.1, seed=14),
    Sampling(
        temperature=0.9,
        seed=15,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        history=pack_tokens([1, 2, 3, 3]),
        num_prompt_tokens=2,
    ),
    Sampling(num_logprobs=3, banned=[0, 5], bias=[(7, 3.0)]),
    Sampling(temperature=1.0, top_p=0.5, seed=16),
]


@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_alone_and_in_a_batch_are_the_same(vocab):
    """100 rows, so that several blocks and both candidate passes take part."""
    params = [MIXED[i % len(MIXED)] for i in range(100)]
    logits_BV = logits(100, vocab=vocab)
    positions = list(range(50, 150))
    together = sample(logits_BV, params, positions)
    alone = [
        sample(logits_BV[i : i + 1], params[i : i + 1], positions[i : i + 1])[0] for i in range(100)
    ]
    assert together == alone
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = sample(logits_BV[order], [params[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_draw_depends_on_seed_and_position():
    logits_BV = torch.zeros(1, 100_000)
    tokens = {
        sample(logits_BV, [Sampling(temperature=1.0, seed=seed)], [position])[0].token
        for seed in (0, 1, -1, 2**63)
        for position in (0, 1, 2)
    }
    assert len(tokens) == 12


@pytest.mark.parametrize("p", [Sampling(temperature=1.0, top_p=0.95), Sampling(1.0, 0.9, 1500)])
def test_wide_top_p_beyond_the_first_candidates(p):
    """Nearly flat logits: top-p keeps thousands of tokens, all of which can be drawn."""
    logits_V = logits(vocab=3000, scale=0.1)[0]
    num_draws = 1000
    drawn = sample(logits_V.expand(num_draws, -1), [p] * num_draws, list(range(num_draws)))
    expected = exact(logits_V, p)
    tokens = np.array([d.token for d in drawn])
    assert (expected[tokens] > 0).all()
    # two halves of the kept tokens, of equal mass, are drawn equally often: 5 sigma
    below = expected.cumsum() < 0.5
    share = expected[below].sum()
    assert abs(below[tokens].mean() - share) < 5 * math.sqrt(0.25 / num_draws)


def test_ties_do_not_depend_on_the_sort():
    """Equal logits are kept or dropped together, so top_k = 1 over ties draws them all."""
    logits_V = torch.tensor([0.0, 2.0, 1.0, 2.0, 2.0])
    p = Sampling(temperature=1.0, top_k=1)
    drawn = sample(logits_V.expand(300, -1), [p] * 300, list(range(300)))
    assert {d.token for d in drawn} == {1, 3, 4}


def naive_adjust(logits_V, p: Sampling) -> np.ndarray:
    x = logits_V.double().numpy().copy()
    for token, value in p.bias:
        x[token] += value
    x[list(p.banned)] = -np.inf
    history = np.frombuffer(p.history, dtype="<i4").tolist()
    for token in set(history):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token in history[p.num_prompt_tokens :]:
        x[token] -= p.frequency_penalty
    for token in set(history[p.num_prompt_tokens :]):
        x[token] -= p.presence_penalty
    return x


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_bias_and_bans(temperature):
    """Greedy and drawn tokens equal those of the naively adjusted logits with nothing on."""
    rng = np.random.default_rng(0)
    changed = 0
    for trial in range(150):
        history = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
        p = Sampling(
            temperature=temperature,
            seed=trial,
            presence_penalty=float(rng.uniform(-2, 2)),
            frequency_penalty=float(rng.uniform(-2, 2)),
            repetition_penalty=float(rng.uniform(0.5, 2)),
            history=pack_tokens(history),
            num_prompt_tokens=int(rng.integers(0, len(history) + 1)),
            banned=[*rng.integers(0, VOCAB, 2).tolist(), VOCAB + 3],
            bias=[(int(rng.integers(0, VOCAB)), float(rng.uniform(-5, 5))) for _ in range(2)],
        )
        logits_BV = logits(seed=trial)
        plain = Sampling(temperature=temperature, seed=trial)
        inside = Sampling(
            bias=p.bias,
            banned=p.banned[:2],
            history=p.history,
            num_prompt_tokens=p.num_prompt_tokens,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            repetition_penalty=p.repetition_penalty,
        )
        adjusted = torch.tensor(naive_adjust(logits_BV[0], inside))[None].float()
        before = logits_BV.clone()
        [drawn] = sample(logits_BV, [p], [trial])
        assert torch.equal(logits_BV, before)
        assert [drawn] == sample(adjusted, [plain], [trial])
        changed += [drawn] != sample(logits_BV, [plain], [trial])
    assert changed > 50


def test_only_output_counts_for_presence_and_frequency():
    logits_BV = torch.tensor([[1.0, 0.9, 0.0]])
    prompt = Sampling(frequency_penalty=1.0, history=pack_tokens([0, 0]), num_prompt_tokens=2)
    output = Sampling(frequency_penalty=1.0, history=pack_tokens([0, 0]), num_prompt_tokens=1)
    assert sample(logits_BV, [prompt], [2])[0].token == 0
    assert sample(logits_BV, [output], [2])[0].token == 1


def test_logprobs_are_of_the_raw_logits():
    logits_BV = logits(3)
    params = [
        Sampling(num_logprobs=4, bias=[(3, 50.0)]),
        Sampling(),
        Sampling(temperature=0.5, seed=3, num_logprobs=0),
    ]
    first, second, third = sample(logits_BV, params, [5, 6, 7])
    raw = logits_BV.double().log_softmax(-1).numpy()
    best = np.argsort(-raw[0])[:4]
    assert first.token == 3
    assert first.logprob == pytest.approx(raw[0, 3], abs=1e-5)
    assert [token for token, _ in first.top] == best.tolist()
    assert [value for _, value in first.top] == pytest.approx(raw[0, best].tolist(), abs=1e-5)
    assert second == Drawn(int(raw[1].argmax()))
    assert third.logprob == pytest.approx(raw[2, third.token], abs=1e-5)
    assert third.top == ()


def test_more_logprobs_than_tokens():
    [drawn] = sample(logits(), [Sampling(num_logprobs=VOCAB + 10)], [0])
    assert len(drawn.top) == VOCAB


def test_nearly_zero_temperature_is_greedy():
    logits_BV = logits(4, scale=100.0)
    params = [Sampling(temperature=t, seed=1) for t in (0.0, 1e-8, 1e-5, 1e-4)]
    assert [d.token for d in sample(logits_BV, params, [0] * 4)] == logits_BV.argmax(-1).tolist()


@pytest.mark.parametrize("p", [Sampling(), Sampling(temperature=1.0, top_p=0.9)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_with_broken_logits_draws_nothing_and_harms_no_other(p, value):
    logits_BV = logits(3)
    alone = sample(logits_BV, [p] * 3, [7, 8, 9])
    logits_BV[1, 20] = value
    drawn = sample(logits_BV, [p] * 3, [7, 8, 9])
    assert drawn == [alone[0], Drawn(None), alone[2]]


def test_a_row_without_an_allowed_token_draws_nothing():
    params = [Sampling(banned=list(range(VOCAB)), num_logprobs=2), Sampling(num_logprobs=2)]
    logits_BV = logits(2)
    first, second = sample(logits_BV, params, [0, 0])
    assert first == Drawn(None)
    assert second.token == int(logits_BV[1].argmax())
    assert len(second.top) == 2


def test_empty_batch():
    assert sample(torch.empty(0, VOCAB), [], []) == []


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [VOCAB, 5000])
def test_a_gpu_draws_what_the_cpu_draws(vocab):
    params = [MIXED[i % len(MIXED)] for i in range(100)]
    logits_BV = logits(100, vocab=vocab)
    positions = list(range(100))
    expected = sample(logits_BV, params, positions)
    drawn = sample(logits_BV.cuda(), params, positions)
    assert [d.token for d in drawn] == [d.token for d in expected]
    for one, other in zip(drawn, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.gpu
def test_drawing_does_not_wait_for_the_device():
    """While the device is busy all is launched; the logits may then be overwritten."""
    params = [p for p in MIXED if not p.history] * 3
    logits_BV = logits(len(params), vocab=5000).cuda()
    positions = list(range(len(params)))
    expected = sample(logits_BV, params, positions)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    torch.cuda.set_sync_debug_mode("error")
    try:
        drawing = begin_sample(logits_BV, params, positions)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not drawing.ready()
    logits_BV.fill_(torch.nan)
    assert drawing.finish() == expected
    assert drawing.ready()
    assert drawing.tokens_B.tolist() == [d.token for d in expected]
