"""The steps that workers run before they are ready: they run, on any world, and leave nothing."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from cluster_kit import Cluster

from loongd.worker.warm import SEGMENTS, warm_steps


@pytest.mark.parametrize("num_instances", [1, 3])
def test_all_instances_run_them(llama_dir: Path, num_instances: int) -> None:
    cluster = Cluster(llama_dir, num_instances, num_slots=400)
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
    assert counts == dict.fromkeys(range(num_instances), 4 if num_instances == 1 else 8)
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
