"""The last layer of a prefill attends with the last tokens alone: they equal dense attention."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from loongd.kernels.attention import CpuFlashBackend, dense_attention
from loongd.wire import Extend, RunStep, Sampling, pack_tokens
from loongd.worker.attention import EspAttention
from loongd.worker.comm import LoopbackWorld
from loongd.worker.geometry import lay_out
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import RowBytes

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SCALE = HEAD_DIM**-0.5
CPU = torch.device("cpu")
Truth = tuple[Tensor, Tensor, Tensor]


def make_step(dop: int, requests: list[tuple[int, bool]]) -> RunStep:
    """Striped requests of (tokens, whether the next one is drawn), all kept by the last member."""
    batch = [
        Extend(
            request_id=str(number),
            tokens=pack_tokens([0] * length),
            start=0,
            master=None,
            segment=number,
            keep=[(dop - 1, length)],
            cached=[],
            holders=[],
            sampling=Sampling() if drawn else None,
        )
        for number, (length, drawn) in enumerate(requests)
    ]
    return RunStep(step_id=1, epoch=0, members=list(range(dop)), batch=batch)


def make_pool() -> KvCache:
    sizes = {"num_layers": 2, "num_slots": 200, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    return KvCache(**sizes, dtype=torch.float32, device=CPU)


def run(
    step: RunStep, truths: list[Truth], *, in_ring: bool
) -> tuple[list[list[Tensor]], list[KvCache]]:
    """Both layers' outputs by member, and the pools."""
    dop = len(step.members)
    world, pools = LoopbackWorld(dop), [make_pool() for _ in range(dop)]
    outs: list[list[Tensor]] = [[] for _ in range(dop)]
    row_bytes = RowBytes.of(HEADS, KV_HEADS, HEAD_DIM, 4)
    if in_ring:
        row_bytes = replace(row_bytes, gathered_rows=0)

    def work(member: int) -> None:
        layout = lay_out(step, member, pools[member], row_bytes=row_bytes, windowed=False)
        q, k, v = (torch.cat([truth[i][member::dop] for truth in truths]) for i in range(3))
        attention = EspAttention(
            layout,
            pools[member],
            world.transport(member),
            CpuFlashBackend(SCALE),
            scale=SCALE,
            windows=(None, None),
            sampled_only=True,
        )
        outs[member] = [attention(layer, q, k, v) for layer in range(2)]

    threads = [threading.Thread(target=work, args=(member,)) for member in range(dop)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outs, pools


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 23), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 1 << 30),
    st.booleans(),
)
def test_last_tokens_see_all_of_their_requests(
    dop: int, requests: list[tuple[int, bool]], seed: int, in_ring: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    truths: list[Truth] = [
        tuple(
            torch.randn(length, heads, HEAD_DIM, generator=generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        for length, _ in requests
    ]
    outs, pools = run(make_step(dop, requests), truths, in_ring=in_ring)
    for member in range(dop):
        every_row, last_rows = outs[member]
        assert len(every_row) == sum(len(range(member, n, dop)) for n, _ in requests)
        owned = [
            number
            for number, (length, drawn) in enumerate(requests)
            if drawn and (length - 1) % dop == member
        ]
        assert len(last_rows) == len(owned)
        for row, number in enumerate(owned):
            q, k, v = truths[number]
            expected, _ = dense_attention(q[-1:], k, v, scale=SCALE)
            torch.testing.assert_close(last_rows[row : row + 1], expected, atol=2e-5, rtol=2e-5)
    for number, (_, k, v) in enumerate(truths):
        slots = pools[-1].slots_of([number])
        assert torch.equal(pools[-1].k_LSKH[1, slots], k)
        assert torch.equal(pools[-1].v_LSKH[1, slots], v)
