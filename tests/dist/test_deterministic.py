"""Deterministic mode: the same bits alone, in a batch of 44, and under any plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cluster_kit import Cluster
from deterministic_kit import NUM_INSTANCES, Life, differing, elastic, live, on_one
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

BATCH = 44
NUM_NEW = 5
NUM_SLOTS = 2048
VOCAB = 199


@pytest.fixture(scope="module")
def tiny_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Grouped heads, 6 over 2, plain or with a window of 7 tokens; weights large enough to differ
    over."""
    torch.manual_seed(2)
    shape = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
    }
    models = {
        "llama": LlamaForCausalLM(LlamaConfig(**shape)),
        "mistral": MistralForCausalLM(MistralConfig(**shape, sliding_window=7)),
    }
    found = {}
    for name, model in models.items():
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def prompts_of(count: int, vocab: int, *, longest: int) -> list[list[int]]:
    """Ragged: from one token up."""
    lengths = [1 + (7 * n) % longest for n in range(count)]
    return [[(53 * i * i + 31 * n + 7) % vocab for i in range(k)] for n, k in enumerate(lengths)]


def same(mine: list[Life], theirs: list[Life]) -> None:
    """Not one bit differs."""
    for number, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert one.tokens == other.tokens, number
        assert one.logprobs == other.logprobs, number
        assert differing(one, other) == 0, number


def check_plans(cluster: Cluster, prompts: list[list[int]], alone: range, seeds: range) -> None:
    """Each plan, and some requests alone, against the batch on one instance."""
    together = live(cluster, prompts, NUM_NEW, on_one)
    for number in alone:
        same(live(cluster, [prompts[number]], NUM_NEW, on_one), [together[number]])
    for seed in seeds:
        same(live(cluster, prompts, NUM_NEW, elastic(seed)), together)


def check_that_fast_differs(cluster: Cluster, prompts: list[list[int]], seed: int) -> None:
    """The control: without the mode, the same two plans leave different bits."""
    lives = [live(cluster, prompts, 2, plan) for plan in (on_one, elastic(seed))]
    assert sum(differing(*pair) for pair in zip(*lives, strict=True)) > 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("llama", torch.float16),
        ("mistral", torch.bfloat16),
    ],
)
def test_no_plan_changes_a_bit(name: str, dtype: torch.dtype, tiny_dirs: dict[str, Path]) -> None:
    cluster = Cluster(
        tiny_dirs[name], NUM_INSTANCES, num_slots=NUM_SLOTS, dtype=dtype, deterministic=True
    )
    prompts = prompts_of(BATCH, VOCAB, longest=33)
    check_plans(cluster, prompts, range(0, BATCH, 11), range(2))


@pytest.mark.timeout(300)
def test_smollm2_in_bfloat16(smollm2_dir: Path) -> None:
    """The first layers of a real model, its rows as uneven as training leaves them."""
    prompts = prompts_of(BATCH, 40_000, longest=9)
    options = {"num_slots": NUM_SLOTS, "dtype": torch.bfloat16, "num_layers": 4}
    cluster = Cluster(smollm2_dir, NUM_INSTANCES, deterministic=True, **options)
    check_plans(cluster, prompts, range(30, 31), range(5, 6))
    check_that_fast_differs(Cluster(smollm2_dir, NUM_INSTANCES, **options), prompts[:8], 5)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_plan_changes_a_bit_on_a_gpu(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Sizes at which a GPU picks other kernels for other batches; all instances on one device."""
    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=8192,
        initializer_range=0.05,
        max_position_embeddings=2048,
    )
    path = tmp_path_factory.mktemp("gpu-llama")
    LlamaForCausalLM(config).save_pretrained(path)
    options = {"num_slots": 16384, "dtype": dtype, "device": torch.device("cuda")}
    prompts = [*prompts_of(BATCH - 1, 8192, longest=150), prompts_of(1, 8192, longest=1)[0] * 900]
    cluster = Cluster(path, NUM_INSTANCES, deterministic=True, **options)
    check_plans(cluster, prompts, range(1, BATCH, 14), range(2))
    check_that_fast_differs(Cluster(path, NUM_INSTANCES, **options), prompts[:8], 1)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_gpu_and_a_cpu_make_the_same_bits(dtype: torch.dtype, tiny_dirs: dict[str, Path]) -> None:
    prompts = prompts_of(BATCH, VOCAB, longest=33)
    options = {"num_slots": NUM_SLOTS, "dtype": dtype, "deterministic": True}
    on_cpu = Cluster(tiny_dirs["llama"], NUM_INSTANCES, **options)
    on_gpu = Cluster(tiny_dirs["llama"], NUM_INSTANCES, device=torch.device("cuda"), **options)
    pairs = zip(
        live(on_cpu, prompts, NUM_NEW, on_one),
        live(on_gpu, prompts, NUM_NEW, elastic(0)),
        strict=True,
    )
    for mine, theirs in pairs:
        assert mine.tokens == theirs.tokens
        assert differing(mine, theirs) == 0
