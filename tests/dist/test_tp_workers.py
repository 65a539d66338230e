"""Instances of several workers over sockets: logits and greedy tokens equal transformers'."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loongd.errors import WorkerError
from loongd.pool import WorkerLost, WorkerPool
from loongd.vigil import Vigil
from loongd.wire import (
    Audit,
    AuditRequest,
    Extend,
    FreeSegments,
    Ready,
    RunStep,
    Sampled,
    Sampling,
    Start,
    StepDone,
    StepFailed,
    pack_tokens,
    unpack_tokens,
)

VOCAB = 96
SLOTS = 200
PROMPTS = ([*range(5, 42)], [*range(90, 70, -1)], [7])
NUM_NEW = 6

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@dataclass
class Cluster:
    """A started pool and what its instances said."""

    pool: WorkerPool
    ready: list[Ready]
    step_id: int = 0

    @property
    def instances(self) -> list[int]:
        return [ready.instance for ready in self.ready]

    async def run(self, members: list[int], batch: list[Extend]) -> dict[str, Sampled]:
        """One step; what all members together have drawn."""
        self.step_id += 1
        step = RunStep(step_id=self.step_id, epoch=1, members=members, batch=batch)
        for member in members:
            self.pool.send(member, step)
        drawn: dict[str, Sampled] = {}
        for _ in members:
            report = await self.pool.receive()
            assert isinstance(report, StepDone), report
            assert report.step_id == self.step_id
            for sampled in report.sampled:
                assert sampled.request_id not in drawn
                drawn[sampled.request_id] = sampled
        return drawn

    async def used(self) -> list[tuple[int, int]]:
        """(instance, used slots) by each worker's own account."""
        found = []
        for instance, pids in self.pool.pids.items():
            self.pool.send(instance, AuditRequest())
            for _ in pids:
                audit = await self.pool.receive()
                assert isinstance(audit, Audit)
                assert audit.used + audit.free == audit.total == SLOTS
                found.append((audit.instance, audit.used))
        return sorted(found)


Serve = Callable[..., AbstractAsyncContextManager[Cluster]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A random model of 8 heads over 4 KV heads, and where it is saved."""
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.3,
        attention_bias=True,
        mlp_bias=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    directory = tmp_path_factory.mktemp("tp") / "model"
    model.save_pretrained(directory)
    return directory, model


@pytest.fixture
def serve(reference: tuple[Path, LlamaForCausalLM], tmp_path: Path) -> Serve:
    """`serve(num_instances, tensor_parallel_size, device)`: a pool that is stopped on leaving."""

    @asynccontextmanager
    async def run(
        num_instances: int, size: int, device: str = "cpu", *, deterministic: bool = False
    ) -> AsyncIterator[Cluster]:
        world = num_instances * size
        starts = [
            Start(
                rank=rank,
                world_size=world,
                epoch=1,
                rendezvous=str(tmp_path / "rendezvous #1?"),  # no URL
                model_dir=str(reference[0]),
                load_format="auto",
                dtype="float32",
                device=device,
                cores=[],
                kv_pool_tokens=SLOTS,
                gpu_memory_utilization=0.9,
                max_step_tokens=256,
                seed=0,
                tensor_parallel_size=size,
                deterministic=deterministic,
            )
            for rank in range(world)
        ]
        pool = WorkerPool(
            runtime_dir=tmp_path,
            startup_timeout_s=60,
            vigil=Vigil(silence_s=30, stall_s=60),
            log_level="warning",
        )
        try:
            ready = await pool.start(starts, lambda instance, stage, fraction: None)
            yield Cluster(pool, ready)
        finally:
            await pool.stop()

    return run


def extend(number: int, tokens: list[int], start: int, **fields: object) -> Extend:
    """Request `number`, its next token wanted with the log-probabilities of all tokens."""
    base: dict[str, object] = {
        "request_id": str(number),
        "tokens": pack_tokens(tokens),
        "start": start,
        "master": None,
        "segment": 10 * number,
        "keep": [],
        "cached": [],
        "holders": [],
        "sampling": Sampling(num_logprobs=VOCAB),
    }
    return Extend(**(base | fields))


def split(total: int, instances: list[int], number: int) -> list[tuple[int, int]]:
    """An uneven placement that differs between requests: the first gets the smaller part."""
    order = instances[number % len(instances) :] + instances[: number % len(instances)]
    first = total // 3 if len(order) > 1 else total
    return [(order[0], first), (order[-1], total - first)]


def check_logprobs(sampled: Sampled, logits_V: torch.Tensor, tolerance: float = 2e-4) -> None:
    expected_V = logits_V.log_softmax(-1)
    values = array("f")
    values.frombytes(sampled.top_logprobs)
    found_V = torch.empty(VOCAB)
    found_V[torch.tensor(unpack_tokens(sampled.top_ids))] = torch.tensor(values)
    torch.testing.assert_close(found_V, expected_V, atol=tolerance, rtol=tolerance)


async def check_generation(cluster: Cluster, model: LlamaForCausalLM, tolerance: float) -> None:
    """Striped prefill scaled down to an uneven placement, then decode with changing masters."""
    members = cluster.instances
    texts = [list(prompt) for prompt in PROMPTS]
    batch = [
        extend(number, text, 0, keep=split(len(text), members, number))
        for number, text in enumerate(texts)
    ]
    for round_number in range(NUM_NEW):
        drawn = await cluster.run(members, batch)
        for number, text in enumerate(texts):
            with torch.inference_mode():
                logits_V = model(torch.tensor([text])).logits[0, -1]
            check_logprobs(drawn[str(number)], logits_V, tolerance)
            assert drawn[str(number)].token == int(logits_V.argmax())
            text.append(drawn[str(number)].token)
        batch = [
            extend(
                number,
                text[-1:],
                len(text) - 1,
                master=members[(number + round_number) % len(members)],
                cached=[10 * number],
                holders=members,
            )
            for number, text in enumerate(texts)
        ]


async def check_accounts(cluster: Cluster, size: int) -> None:
    """Workers of an instance agree, and freeing reaches all of them."""
    used = await cluster.used()
    assert len(used) == len(cluster.instances) * size
    kept = sum(len(prompt) + NUM_NEW - 1 for prompt in PROMPTS)
    assert sum(count for _, count in used) == kept * size
    for instance in cluster.instances:
        assert len({count for owner, count in used if owner == instance}) == 1
        cluster.pool.send(instance, FreeSegments(segments=[0, 10, 20]))
    assert {count for _, count in await cluster.used()} == {0}


@pytest.mark.parametrize(("num_instances", "size"), [(1, 2), (2, 1), (2, 2), (1, 4)])
async def test_prefill_and_decode_equal_transformers(
    num_instances: int, size: int, reference: tuple[Path, LlamaForCausalLM], serve: Serve
) -> None:
    async with serve(num_instances, size) as cluster:
        assert cluster.instances == list(range(num_instances))
        assert [len(pids) for pids in cluster.pool.pids.values()] == [size] * num_instances
        whole_token_bytes = 2 * 2 * 4 * 16 * 4
        assert {ready.kv_bytes_per_token for ready in cluster.ready} == {whole_token_bytes}
        await check_generation(cluster, reference[1], 2e-4)
        await check_accounts(cluster, size)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_instances", "size"),
    [(n, t) for n, t in ((1, 2), (2, 1), (2, 2), (1, 4)) if n * t <= torch.cuda.device_count()],
)
async def test_the_same_over_nccl(
    num_instances: int, size: int, reference: tuple[Path, LlamaForCausalLM], serve: Serve
) -> None:
    async with serve(num_instances, size, "cuda") as cluster:
        await check_generation(cluster, reference[1], 2e-3)
        await check_accounts(cluster, size)


async def generate(cluster: Cluster, members: list[int], numbers: list[int]) -> list[list[bytes]]:
    """Log-probabilities of the first four tokens of some prompts, as bytes; frees everything."""
    texts = {number: list(PROMPTS[number]) for number in numbers}
    batch = [extend(n, t, 0, keep=split(len(t), members, n)) for n, t in texts.items()]
    found: list[list[bytes]] = [[] for _ in numbers]
    for step in range(4):
        drawn = await cluster.run(members, batch)
        for told, (number, text) in zip(found, texts.items(), strict=True):
            sampled = drawn[str(number)]
            told.append(sampled.top_ids + sampled.top_logprobs)
            text.append(sampled.token)
        master = members[step % len(members)]
        batch = [
            extend(n, t[-1:], len(t) - 1, master=master, cached=[10 * n], holders=members)
            for n, t in texts.items()
        ]
    for instance in cluster.instances:
        cluster.pool.send(instance, FreeSegments(segments=[10 * n for n in numbers]))
    return found


async def test_deterministic_mode_gives_the_same_bits_in_any_group(
    reference: tuple[Path, LlamaForCausalLM], serve: Serve
) -> None:
    """Two workers an instance, over sockets: equal to transformers, and alone equal to together."""
    numbers = list(range(len(PROMPTS)))
    async with serve(2, 2, deterministic=True) as cluster:
        assert {ready.attention_backend for ready in cluster.ready} == {"exact (deterministic)"}
        await check_generation(cluster, reference[1], 2e-4)
        await check_accounts(cluster, 2)
        together = await generate(cluster, [1, 0], numbers)
        alone = [(await generate(cluster, [number % 2], [number]))[0] for number in numbers]
        assert alone == together


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_instances", "size"),
    [(n, t) for n, t in ((1, 2), (2, 1), (2, 2)) if n * t <= torch.cuda.device_count()],
)
async def test_deterministic_mode_over_nccl(
    num_instances: int, size: int, reference: tuple[Path, LlamaForCausalLM], serve: Serve
) -> None:
    numbers = list(range(len(PROMPTS)))
    async with serve(num_instances, size, "cuda", deterministic=True) as cluster:
        await check_generation(cluster, reference[1], 2e-3)
        await check_accounts(cluster, size)
        together = await generate(cluster, cluster.instances[::-1], numbers)
        alone = [(await generate(cluster, [0], [number]))[0] for number in numbers]
        assert alone == together


async def test_a_refused_step_leaves_an_instance_of_two_workers_working(
    reference: tuple[Path, LlamaForCausalLM], serve: Serve
) -> None:
    """Too many tokens for the pool: both workers refuse, the pool reports once, both go on."""
    async with serve(1, 2) as cluster:
        tokens = [3] * (SLOTS + 1)
        step = RunStep(
            step_id=50, epoch=1, members=[0], batch=[extend(1, tokens, 0, keep=[(0, len(tokens))])]
        )
        cluster.pool.send(0, step)
        report = await cluster.pool.receive()
        assert isinstance(report, StepFailed)
        assert "201 KV slots needed, 200 of 200 free" in report.message
        assert await cluster.used() == [(0, 0), (0, 0)]
        text = list(PROMPTS[0])
        drawn = await cluster.run([0], [extend(0, text, 0, keep=[(0, len(text))])])
        with torch.inference_mode():
            check_logprobs(drawn["0"], reference[1](torch.tensor([text])).logits[0, -1])


@pytest.mark.parametrize("victim", [0, 1])
async def test_an_instance_is_lost_with_any_of_its_workers(victim: int, serve: Serve) -> None:
    async with serve(1, 2) as cluster:
        os.kill(cluster.pool.pids[0][victim], signal.SIGKILL)
        lost = await cluster.pool.receive()
        assert lost == WorkerLost(0, f"worker tp_rank {victim} process was killed by signal 9")
        await cluster.pool.kill()
        assert cluster.pool.pids == {}


async def test_a_size_that_does_not_divide_stops_the_start(serve: Serve) -> None:
    with pytest.raises(WorkerError, match="tensor_parallel_size = 3 does not divide num_att"):
        async with serve(1, 3):
            pass
