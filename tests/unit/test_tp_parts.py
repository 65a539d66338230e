"""What the daemon does with instances of several workers: GPUs, cores, reports made into one."""

from __future__ import annotations

import pytest

from loongd import node
from loongd.config import Config
from loongd.errors import ConfigError
from loongd.pool import StepParts, merge_ready
from loongd.wire import Ready, Sampled, Start, StepDone, StepFailed


@pytest.fixture
def six_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5")


@pytest.mark.usefixtures("six_gpus")
@pytest.mark.parametrize(
    ("instances", "size", "expected"),
    [(None, 1, 6), (None, 2, 3), (None, 4, 1), (3, 2, 3), (1, 6, 1), (2, 2, 2)],
)
def test_instances_share_the_gpus(instances: int | None, size: int, expected: int) -> None:
    config = Config(instances=instances, tensor_parallel_size=size)
    assert node.num_instances(config, "cuda") == expected


@pytest.mark.usefixtures("six_gpus")
@pytest.mark.parametrize(
    ("instances", "size", "words"),
    [
        (7, 1, "instances is 7, but 6 GPUs are visible"),
        (None, 8, "tensor_parallel_size is 8, but 6 GPUs are visible"),
        (
            4,
            2,
            "instances is 4 and tensor_parallel_size is 2, which takes 8 GPUs, "
            "but 6 GPUs are visible",
        ),
    ],
)
def test_too_few_gpus_are_named(instances: int | None, size: int, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        node.num_instances(Config(instances=instances, tensor_parallel_size=size), "cuda")
    assert str(raised.value) == words


def test_the_cpu_takes_any_number() -> None:
    assert node.num_instances(Config(tensor_parallel_size=4), "cpu") == 1


def test_cores_are_shared() -> None:
    cores = list(range(3, 12))
    halves = [(cores[:4], 4), (cores[4:8], 4)]
    assert node.share_cores(cores, 2, device="cuda") == halves
    assert node.share_cores(cores, 2, device="cpu") == halves
    assert node.share_cores([3, 4], 4, device="cuda") == [([3], 1), ([4], 1), ([3], 1), ([4], 1)]


def test_workers_with_few_cores_each_may_run_on_all_of_them() -> None:
    assert node.share_cores([3, 4, 5, 6, 7], 2, device="cpu") == [([3, 4, 5, 6, 7], 2)] * 2
    assert node.share_cores([3, 4], 4, device="cpu") == [([3, 4], 1)] * 4


def test_workers_of_an_instance_are_consecutive() -> None:
    starts = [
        Start(
            rank=rank,
            world_size=6,
            epoch=1,
            rendezvous="",
            model_dir="",
            load_format="auto",
            dtype="float32",
            device="cpu",
            cores=[],
            kv_pool_tokens=None,
            gpu_memory_utilization=0.9,
            max_step_tokens=1,
            seed=0,
            tensor_parallel_size=3,
        )
        for rank in range(6)
    ]
    assert [(start.instance, start.tp_rank) for start in starts] == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1), (1, 2)),
    ]


def done(instance: int, step_id: int, elapsed_s: float, *tokens: int) -> StepDone:
    sampled = [Sampled("r", token) for token in tokens]
    return StepDone(instance=instance, step_id=step_id, elapsed_s=elapsed_s, sampled=sampled)


def test_a_step_is_done_when_all_workers_have_done_it() -> None:
    parts = StepParts(2)
    assert parts.add(done(0, 5, 0.1, 42)) is None
    assert parts.add(done(1, 5, 0.4)) is None
    assert parts.add(done(0, 6, 0.2, 43)) is None
    assert parts.add(done(0, 5, 0.3)) == done(0, 5, 0.3, 42)
    assert parts.add(done(1, 5, 0.1, 44)) == done(1, 5, 0.4, 44)
    assert parts.add(done(0, 6, 0.1)) == done(0, 6, 0.2, 43)
    one = StepParts(1)
    assert one.add(done(0, 5, 0.1, 42)) == done(0, 5, 0.1, 42)


def test_a_failure_of_one_worker_fails_the_step_once() -> None:
    failed = StepFailed(instance=0, step_id=5, message="broken")
    for first, second in ((failed, done(0, 5, 0.1)), (done(0, 5, 0.1), failed), (failed, failed)):
        parts = StepParts(2)
        assert parts.add(first) is None
        assert parts.add(second) == failed


def test_an_instance_offers_the_fewest_slots_of_its_workers() -> None:
    ready = [
        Ready(
            instance=1,
            pool_tokens=tokens,
            kv_bytes_per_token=64,
            weights_bytes=size,
            device_name="cpu",
            attention_backend="flash",
        )
        for tokens, size in ((100, 7), (90, 8))
    ]
    whole = merge_ready(ready)
    assert (whole.instance, whole.pool_tokens) == (1, 90)
    assert (whole.kv_bytes_per_token, whole.weights_bytes) == (128, 15)
