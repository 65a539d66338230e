"""Memory that runs out fails the step, with all members of it, and nothing else.

Runners of a loopback world; what torch says of its memory is made up.
"""

from __future__ import annotations

import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from cluster_kit import CPU, Cluster
from torch import Tensor
from transformers import LlamaConfig

from loongd.errors import LoongError, StepRefusedError, WorkerError
from loongd.wire import Extend, RunStep, Sampled, Sampling, Start, pack_tokens
from loongd.worker import decoder, group_graphs, peers, room, striped_graphs
from loongd.worker.geometry import lay_out
from loongd.worker.heart import Pulse
from loongd.worker.layout import RowBytes
from loongd.worker.memory import StepBytes, exchange_bytes
from loongd.worker.prefill_graphs import PrefillParts
from loongd.worker.prefiller import Prefiller
from loongd.worker.room import Room, new_tokens
from loongd.worker.runner import Runner
from loongd.worker.slot_table import SlotTable

MEASURED = StepBytes(tokens=8, most_bytes=80, token_bytes=5.0, knee_tokens=4)


def extend(
    number: int, count: int, *, master: int | None = None, keep: list[tuple[int, int]] | None = None
) -> Extend:
    return Extend(
        request_id=str(number),
        tokens=pack_tokens([(7 * i + number) % 199 for i in range(count)]),
        start=0,
        master=master,
        segment=number,
        keep=keep or [],
        cached=[],
        holders=[],
        sampling=Sampling(),
    )


def prefill(number: int, members: list[int], count: int) -> RunStep:
    """A striped prefill that its last member keeps."""
    batch = [extend(number, count, keep=[(members[-1], count)])]
    return RunStep(step_id=number, epoch=1, members=members, batch=batch)


def outcomes(cluster: Cluster, step: RunStep) -> list[list[Sampled] | LoongError]:
    """What each member returns or raises."""

    def run(member: int) -> list[Sampled] | LoongError:
        try:
            return cluster.runners[member].run(step)
        except LoongError as error:
            return error

    with ThreadPoolExecutor(len(step.members)) as threads:
        return list(threads.map(run, step.members))


def used(cluster: Cluster) -> list[int]:
    for pool in cluster.pools:
        pool.check()
    return [pool.num_used for pool in cluster.pools]


def test_a_step_that_runs_out_is_undone_and_the_next_one_runs(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(llama_dir, 1)
    runner = cluster.runners[0]
    runner.run(prefill(1, [0], 20))
    held: list[weakref.ref[Tensor]] = []

    def runs_out(*_: object, **__: object) -> Tensor:
        activations = torch.ones(10)
        held.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")

    def ran_out(self: Room, num_tokens: int) -> WorkerError:
        assert held[0]() is None, "what the step had taken is still held"
        return original(self, num_tokens)

    original = Room.ran_out
    monkeypatch.setattr(Room, "ran_out", ran_out)
    with monkeypatch.context() as patch:
        patch.setattr(runner.parts.model, "layers", runs_out)
        with pytest.raises(WorkerError, match=r"out of memory .* 31 new tokens on instance 0; low"):
            runner.run(prefill(2, [0], 31))
    assert used(cluster) == [20]
    again = runner.run(prefill(2, [0], 31))
    assert used(cluster) == [51]
    assert again == Cluster(llama_dir, 1).runners[0].run(prefill(2, [0], 31))


@pytest.fixture
def wary(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Three instances that look at their memory from 8 tokens on."""
    monkeypatch.setattr(room, "LEAST_CHECKED_TOKENS", 8)
    cluster = Cluster(llama_dir, 3)
    for rank, runner in enumerate(cluster.runners):
        parts = replace(runner.parts, step_bytes=MEASURED)
        cluster.runners[rank] = Runner(parts, rank, Pulse())
    return cluster


def test_all_members_refuse_when_one_has_no_room(
    wary: Cluster, llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def fits(self: Room, wanted_bytes: int) -> bool:
        asked.append((self.instance, wanted_bytes))
        return self.instance != 2

    expected = outcomes(Cluster(llama_dir, 3), prefill(1, [1, 2], 31))
    assert sum(map(len, expected)) == 1
    monkeypatch.setattr(Room, "fits", fits)
    refused = outcomes(wary, prefill(1, [1, 2], 31))
    assert all(type(error) is StepRefusedError for error in refused)
    assert len({str(error) for error in refused}) == 1
    assert "16 new tokens an instance" in str(refused[0])
    assert "instances [2] do not have" in str(refused[0])
    assert sorted(asked) == [(1, MEASURED.of(16)), (2, MEASURED.of(16))]
    assert used(wary) == [0, 0, 0]
    # members that have room run it, and a smaller step is not asked about
    assert sum(map(len, outcomes(wary, prefill(2, [0, 1], 31)))) == 1
    asked.clear()
    assert sum(map(len, outcomes(wary, prefill(3, [1, 2], 14)))) == 1
    assert asked == []
    monkeypatch.undo()
    assert used(wary) == [0, 31, 14]
    assert outcomes(wary, prefill(1, [1, 2], 31)) == expected


def test_a_step_of_one_member_is_not_asked_about(
    wary: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "fits", lambda *_: False)
    assert len(wary.runners[1].run(prefill(1, [1], 31))) == 1


class TwoWorkers:
    """The group of an instance whose other worker has no room."""

    rank, size = 0, 2

    def smallest(self, value: int, _: torch.device) -> int:
        return min(value, 0)


def test_a_worker_refuses_when_another_of_its_instance_has_no_room(wary: Cluster) -> None:
    alone = Room(MEASURED, wary.transports[0], None, CPU)
    two = Room(MEASURED, wary.transports[0], TwoWorkers(), CPU)
    alone.agree(prefill(1, [0], 31))
    two.agree(prefill(1, [0], 7))
    with pytest.raises(StepRefusedError, match=r"31 new tokens .* instances \[0\] do not have"):
        two.agree(prefill(1, [0], 31))


@pytest.mark.parametrize("count", [1, 2, 3, 30, 31])
def test_new_tokens_are_those_of_the_layout(wary: Cluster, count: int) -> None:
    members = [2, 0, 1]
    batch = [
        extend(1, count, keep=[(0, count)]),
        extend(2, 5, master=0),
        extend(3, 17, keep=[(1, 17)]),
    ]
    step = RunStep(step_id=1, epoch=1, members=members, batch=batch)
    for member in members:
        layout = lay_out(
            step, member, wary.pools[member], row_bytes=RowBytes.of(6, 2, 16, 4), windowed=False
        )
        assert new_tokens(step, member) == len(layout.tokens)


def test_a_step_over_older_tokens_of_several_members_needs_room_for_their_keys(
    wary: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fits(_: Room, wanted_bytes: int) -> bool:
        asked.append(wanted_bytes)
        return True

    measured = replace(MEASURED, rounds_bytes=1000)
    for rank in (0, 1):
        parts = replace(wary.runners[rank].parts, step_bytes=measured)
        wary.runners[rank] = Runner(parts, rank, Pulse())
    monkeypatch.setattr(Room, "fits", fits)
    outcomes(wary, prefill(1, [0, 1], 32))
    chunk = msgspec.structs.replace(
        extend(2, 32, keep=[(0, 32)]), cached=[1], holders=[1], start=32
    )
    outcomes(wary, RunStep(step_id=2, epoch=1, members=[0, 1], batch=[chunk]))
    assert asked == [MEASURED.of(16)] * 2 + [MEASURED.of(16) + 1000] * 2
    assert used(wary) == [32, 32, 0]


def test_bytes_of_a_step_lie_on_a_line_and_below_its_knee_go_to_none() -> None:
    assert [MEASURED.of(n) for n in (0, 2, 4, 6, 8, 20)] == [0, 30, 60, 70, 80, 140]


@pytest.mark.gpu
def test_a_full_gpu_fails_a_step_and_runs_it_when_there_is_room(tmp_path: Path) -> None:
    """The same runner, with all but little of the memory taken by something else meanwhile."""
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=2000,
        max_position_embeddings=65536,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    start = Start(
        rank=0,
        world_size=1,
        epoch=1,
        rendezvous=str(tmp_path / "rendezvous"),
        model_dir=str(tmp_path),
        load_format="dummy",
        dtype="bfloat16",
        device="cuda",
        cores=[],
        kv_pool_tokens=60_000,
        gpu_memory_utilization=0.5,
        max_step_tokens=65536,
        seed=0,
    )
    runner = Runner.start(start, lambda *_: None, Pulse())
    step_bytes = runner.parts.step_bytes
    assert step_bytes is not None
    wanted_bytes = step_bytes.of(50_000)
    room = Room(step_bytes, runner.parts.transport, None, runner.parts.device)
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    filler = torch.empty(free_bytes - wanted_bytes // 4, dtype=torch.uint8, device="cuda")
    assert not room.fits(wanted_bytes)
    with pytest.raises(WorkerError, match="out of memory in a step of 50,000 new tokens"):
        runner.run(prefill(1, [0], 50_000))
    assert runner.audit().used == 0
    assert len(runner.run(prefill(2, [0], 100))) == 1
    del filler
    torch.cuda.empty_cache()
    assert room.fits(wanted_bytes)
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    assert len(runner.run(prefill(1, [0], 50_000))) == 1
    assert runner.audit().used == 50_100
    # the estimate is one of this step: neither far too small nor far too large
    taken_bytes = torch.cuda.max_memory_allocated() - before_bytes
    assert 0.5 < taken_bytes / wanted_bytes < 1.25


@pytest.mark.parametrize("num_instances", [1, 2, 8])
def test_the_pool_leaves_what_workers_map_for_each_other(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch, num_instances: int
) -> None:
    cluster = Cluster(llama_dir, 1)
    mapped: list[int] = []

    def noted(num_bytes: int, device: torch.device) -> peers.MappedBuffers | None:
        mapped.append(num_bytes)
        return peers.map_buffers(num_bytes, device)

    for module in (group_graphs, striped_graphs, decoder):
        monkeypatch.setattr(module, "map_buffers", noted)
    kv = cluster.pools[0]
    table = SlotTable(kv)
    small = PrefillParts(cluster._model, cluster.spec, kv, table, cluster.runners[0].parts.backend)
    Prefiller.build(small, 0, num_instances, None)
    decoder.Decoder.build(
        cluster._model, cluster.spec, table, kv, instance=0, world_size=num_instances
    )
    assert len(mapped) == (3 if num_instances > 1 else 0)
    dtype = kv.k_LSKH.dtype
    assert exchange_bytes(cluster.spec, dtype, num_instances) == sum(mapped)
