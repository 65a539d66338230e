"""One step's attention of all instances in one process, against dense attention in float32."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from loongd.kernels.attention import AttentionBackend, dense_attention
from loongd.kernels.partials import FloatPartials, Partials
from loongd.wire import Extend, RunStep, pack_tokens
from loongd.worker.attention import EspAttention
from loongd.worker.comm import LoopbackTransport, LoopbackWorld
from loongd.worker.geometry import lay_out
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import RowBytes, StepLayout

HEAD_DIM = 16
HEADS = ((4, 2), (3, 1), (3, 3), (6, 2), (5, 1), (7, 7))
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """How the attention is made: `row_bytes` as for float32 when None, the same `layers` times.

    `in_ring` passes small blocks round too, which are otherwise gathered; a request's own and
    others' queries are joined where they are more than `joint_rows`.
    """

    window: int | None = None
    num_slots: int = 256
    row_bytes: RowBytes | None = None
    num_layers: int = 1
    lingers: bool = True
    in_ring: bool = False
    joint_rows: int = 0
    partials: Partials = field(default_factory=FloatPartials)


PLAIN = Options()


@dataclass(frozen=True)
class Case:
    """One request of a step: where its older tokens lie, how many are new, who works on them."""

    cached_on: tuple[int, ...]
    num_new: int
    master: int | None
    keep: tuple[tuple[int, int], ...]


@dataclass
class Truth:
    """Random q, k, v of all positions of one request."""

    q: Tensor
    k: Tensor
    v: Tensor


def make_truths(cases: list[Case], seed: int, num_heads: int, num_kv_heads: int) -> list[Truth]:
    generator = torch.Generator().manual_seed(seed)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=generator)

    totals = [len(case.cached_on) + case.num_new for case in cases]
    return [
        Truth(random(n, num_heads), random(n, num_kv_heads), random(n, num_kv_heads))
        for n in totals
    ]


def make_pools(
    members: tuple[int, ...], cases: list[Case], truths: list[Truth], options: Options = PLAIN
) -> dict[int, KvCache]:
    """Each member's pool with the older tokens that it holds, the rest no numbers.

    Those of all layers but the last are others than the truth.
    """
    pools = {
        m: KvCache(
            num_layers=options.num_layers,
            num_slots=options.num_slots,
            num_kv_heads=truths[0].k.shape[1],
            head_dim=HEAD_DIM,
            dtype=torch.float32,
            device=CPU,
        )
        for m in members
    }
    for pool in pools.values():
        pool.k_LSKH.fill_(torch.nan)
        pool.v_LSKH.fill_(torch.nan)
    for number, (case, truth) in enumerate(zip(cases, truths, strict=True)):
        cached_on = np.array(case.cached_on, dtype=np.int64)
        for holder in np.unique(cached_on).tolist():
            positions = np.flatnonzero(cached_on == holder)
            slots = pools[holder].extend(2 * number, positions)
            for layer in range(options.num_layers):
                other = 1.0 if layer == options.num_layers - 1 else -2.0
                pools[holder].k_LSKH[layer, slots] = truth.k[positions] * other
                pools[holder].v_LSKH[layer, slots] = truth.v[positions] * other
    return pools


def make_step(members: tuple[int, ...], cases: list[Case]) -> RunStep:
    batch = [
        Extend(
            request_id=str(number),
            tokens=pack_tokens(list(range(case.num_new))),
            start=len(case.cached_on),
            master=case.master,
            segment=2 * number + 1,
            keep=list(case.keep),
            cached=[2 * number] if case.cached_on else [],
            holders=[m for m in members if m in case.cached_on],
            sampling=None,
            holder_tokens=[case.cached_on.count(m) for m in members if m in case.cached_on],
        )
        for number, case in enumerate(cases)
    ]
    return RunStep(step_id=1, epoch=0, members=list(members), batch=batch)


def rows_of(
    member: int, members: tuple[int, ...], cases: list[Case]
) -> Iterator[tuple[int, list[int]]]:
    """(case number, positions) of the packed rows of one member, striped cases first."""
    index, dop = members.index(member), len(members)
    order = [n for n, c in enumerate(cases) if c.master is None]
    order += [n for n, c in enumerate(cases) if c.master is not None]
    for number in order:
        case = cases[number]
        start = len(case.cached_on)
        if case.master is None:
            yield number, list(range(start + index, start + case.num_new, dop))
        elif case.master == member:
            yield number, list(range(start, start + case.num_new))


@dataclass
class Ran:
    """What a step has left: by member its output and layout, its pool, and what it has sent."""

    outs: dict[int, Tensor]
    layouts: dict[int, StepLayout]
    pools: dict[int, KvCache]
    sent_bytes: dict[int, int]

    @property
    def sent(self) -> int:
        return sum(self.sent_bytes.values())


def run_all(
    members: tuple[int, ...],
    cases: list[Case],
    truths: list[Truth],
    backend: AttentionBackend,
    options: Options = PLAIN,
) -> Ran:
    """All members' attention, in the last layer, by one thread each."""
    pools, step = make_pools(members, cases, truths, options), make_step(members, cases)
    heads = (truths[0].q.shape[1], truths[0].k.shape[1])
    row_bytes = options.row_bytes or RowBytes.of(*heads, HEAD_DIM, 4)
    row_bytes = replace(row_bytes, joint_rows=options.joint_rows)
    if options.in_ring:
        row_bytes = replace(row_bytes, gathered_rows=0)
    world = LoopbackWorld(8, timeout_s=2 if options.num_slots == 256 else 60)
    outs: dict[int, Tensor] = {}
    layouts: dict[int, StepLayout] = {}
    transports: dict[int, LoopbackTransport] = {m: world.transport(m) for m in members}

    def run(member: int) -> None:
        transports[member].lingers = options.lingers
        windowed = options.window is not None
        layout = lay_out(step, member, pools[member], row_bytes=row_bytes, windowed=windowed)
        layouts[member] = layout
        parts = list(rows_of(member, members, cases))

        def pick(name: str) -> Tensor:
            rows = [getattr(truths[n], name)[positions] for n, positions in parts]
            return torch.cat(rows) if rows else getattr(truths[0], name)[:0]

        attention = EspAttention(
            layout,
            pools[member],
            transports[member],
            backend,
            scale=HEAD_DIM**-0.5,
            windows=(options.window,) * options.num_layers,
            partials=options.partials,
        )
        for layer in range(options.num_layers):
            outs[member] = attention(layer, pick("q"), pick("k"), pick("v"))

    threads = [threading.Thread(target=run, args=(m,)) for m in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Ran(outs, layouts, pools, {m: one.sent_bytes for m, one in transports.items()})


def check(
    members: tuple[int, ...],
    cases: list[Case],
    truths: list[Truth],
    backend: AttentionBackend,
    options: Options = PLAIN,
    *,
    every: int = 1,
) -> Ran:
    """Compares every `every`-th row of each request, from its last row on, and what is kept."""
    ran = run_all(members, cases, truths, backend, options)
    assert set(ran.outs) == set(members), "a member failed or hung"
    for member in members:
        row = 0
        for number, positions in rows_of(member, members, cases):
            truth = truths[number]
            rows = torch.arange(len(positions) - 1, -1, -every)
            chosen = torch.tensor(positions, dtype=torch.int64)[rows]
            expected, _ = dense_attention(
                truth.q[chosen],
                truth.k,
                truth.v,
                scale=HEAD_DIM**-0.5,
                q_positions=chosen,
                k_positions=torch.arange(len(truth.k)),
                window=options.window,
            )
            got = ran.outs[member][row : row + len(positions)][rows]
            torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
            row += len(positions)
        assert row == len(ran.outs[member])
        ran.pools[member].check()
    _check_kept(cases, truths, ran.pools)
    return ran


def _check_kept(cases: list[Case], truths: list[Truth], pools: dict[int, KvCache]) -> None:
    for number, (case, truth) in enumerate(zip(cases, truths, strict=True)):
        keep = case.keep if case.master is None else ((case.master, case.num_new),)
        position = len(case.cached_on)
        expected: dict[int, list[int]] = {}
        for holder, count in keep:
            expected.setdefault(holder, []).extend(range(position, position + count))
            position += count
        for holder, pool in pools.items():
            slots = pool.slots_of([2 * number + 1])
            positions = pool.positions_of([2 * number + 1])
            assert positions.tolist() == expected.get(holder, [])
            for layer in range(len(pool.k_LSKH)):
                assert torch.equal(pool.k_LSKH[layer, slots], truth.k[positions])
                assert torch.equal(pool.v_LSKH[layer, slots], truth.v[positions])
