"""The steps that workers run before they are ready: they run, on any world, and leave nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from cluster_kit import Cluster
from transformers import LlamaConfig, LlamaForCausalLM

from loongd.worker.warm import SEGMENTS, warm_steps


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
    )
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("num_instances", [1, 3])
def test_all_instances_run_them(model_dir: Path, num_instances: int) -> None:
    cluster = Cluster(model_dir, num_instances, num_slots=400)
    counts: dict[int, int] = {}

    def run(rank: int) -> None:
        runner = cluster.runners[rank]
        steps = list(warm_steps(rank, num_instances, 400))
        for step in steps:
            runner.run(step)
        runner.free(list(SEGMENTS))
        counts[rank] = len(steps)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_instances)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == {rank: 4 if num_instances == 1 else 8 for rank in range(num_instances)}
    cluster.check()


@pytest.mark.parametrize("most", [8, 400, 100_000])
def test_they_fit(most: int) -> None:
    """Both kinds of step together, with all that they keep."""
    kept = 0
    for step in warm_steps(0, 2, most):
        tokens = [len(extend.tokens) // 4 for extend in step.batch]
        assert all(count > 0 for count in tokens)
        kept += sum(tokens)
    assert kept <= max(most, 30)
