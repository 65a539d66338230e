"""Migration moves exactly the newest tokens of a segment, content and positions."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loongd.errors import LoongError, PlanError, WorkerError
from loongd.wire import RunMigrate
from loongd.worker import migrate as migrate_module
from loongd.worker.comm import LoopbackTransport, LoopbackWorld
from loongd.worker.kvcache import KvCache
from loongd.worker.migrate import migrate

CPU = torch.device("cpu")


def _pool(dtype: torch.dtype = torch.float32, num_slots: int = 64) -> KvCache:
    pool = KvCache(
        num_layers=3, num_slots=num_slots, num_kv_heads=2, head_dim=4, dtype=dtype, device=CPU
    )
    pool.k_LSKH.normal_()
    pool.v_LSKH.normal_()
    return pool


def _content(pool: KvCache, segment: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    slots, positions = pool.slots_of([segment]), pool.positions_of([segment])
    return {
        int(p): (pool.k_LSKH[:, s].clone(), pool.v_LSKH[:, s].clone())
        for s, p in zip(slots, positions, strict=True)
    }


def _run(
    message: RunMigrate,
    pools: dict[int, KvCache],
    wrap: Callable[[LoopbackTransport], LoopbackTransport] = lambda transport: transport,
) -> list[LoongError]:
    world = LoopbackWorld(4, timeout_s=1)
    errors: list[LoongError] = []

    def side(rank: int) -> None:
        try:
            migrate(message, rank, pools[rank], wrap(world.transport(rank)))
        except LoongError as error:
            errors.append(error)

    threads = [threading.Thread(target=side, args=(rank,)) for rank in message.members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    st.sampled_from((torch.float32, torch.bfloat16, torch.float16)),
    st.booleans(),
    st.integers(1, 2000),
)
def test_the_newest_tokens_move_and_the_rest_stays(
    sizes: list[tuple[int, int]], dtype: torch.dtype, verify: bool, part_bytes: int
) -> None:
    pools = {0: _pool(dtype), 2: _pool(dtype)}
    moves, before = [], {}
    for segment, (held, moved) in enumerate(sizes):
        pools[0].extend(segment, np.arange(held) * 3 + segment)
        pools[2].extend(segment, np.array([1000 + segment]))
        moves.append((segment, min(held, moved)))
        before[segment] = (_content(pools[0], segment), _content(pools[2], segment))
    message = RunMigrate(step_id=1, epoch=0, source=0, target=2, moves=moves, verify=verify)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migrate_module, "_PART_BYTES", part_bytes)
        assert _run(message, pools) == []
    for segment, moved in moves:
        source, target = before[segment]
        newest = list(source)[len(source) - moved :]
        _same(_content(pools[0], segment), {p: source[p] for p in source if p not in newest})
        _same(_content(pools[2], segment), target | {p: source[p] for p in newest})
    for pool in pools.values():
        pool.check()


def _same(
    got: dict[int, tuple[torch.Tensor, ...]], want: dict[int, tuple[torch.Tensor, ...]]
) -> None:
    assert sorted(got) == sorted(want)
    for position, tensors in want.items():
        for mine, theirs in zip(got[position], tensors, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("moves", [[(5, 1)], [(0, 4)], [(0, 0)]])
def test_more_than_is_held_is_refused(moves: list[tuple[int, int]]) -> None:
    pools = {0: _pool(), 1: _pool()}
    pools[0].extend(0, np.arange(3))
    errors = _run(RunMigrate(step_id=1, epoch=0, source=0, target=1, moves=moves), pools)
    assert any(isinstance(error, PlanError) for error in errors)
    assert pools[0].num_used == 3


def test_a_target_without_room_refuses() -> None:
    pools = {0: _pool(), 1: _pool(num_slots=2)}
    pools[0].extend(0, np.arange(3))
    errors = _run(RunMigrate(step_id=1, epoch=0, source=0, target=1, moves=[(0, 3)]), pools)
    assert "2 free slots" in str(errors[0])
    assert pools[1].num_used == 0


def test_damage_on_the_way_is_noticed() -> None:
    class Damaging(LoopbackTransport):
        def post(self, sends, receives):  # type: ignore[no-untyped-def]
            for _, tensor in sends:
                if tensor.dim() == 5:
                    tensor[0, 1, 0, 0, 0] += 1
            return super().post(sends, receives)

    pools = {0: _pool(), 1: _pool()}
    pools[0].extend(0, np.arange(3))
    message = RunMigrate(step_id=1, epoch=0, source=0, target=1, moves=[(0, 3)], verify=True)
    errors = _run(message, pools, lambda end: Damaging(end.world, end.rank))
    assert any(isinstance(error, WorkerError) and "damaged" in str(error) for error in errors)
