"""Element offsets past 2^31 and requests beyond 524,288 tokens on one instance."""

from __future__ import annotations

import numpy as np
import torch

from loongd.kernels.attention import CpuFlashBackend, dense_attention
from loongd.wire import Extend, RunStep, pack_tokens
from loongd.worker.attention import EspAttention
from loongd.worker.comm import LoopbackWorld
from loongd.worker.geometry import lay_out
from loongd.worker.kvcache import KvCache
from loongd.worker.layout import RowBytes

HEAD_DIM = 128
NUM_CACHED = 530_000
NUM_SLOTS = (1 << 31) // HEAD_DIM + NUM_CACHED + 64


def test_decode_over_a_long_request_at_the_end_of_a_large_pool() -> None:
    """Pages of the pool are taken only when touched, so only the request's own count."""
    device = torch.device("cpu")
    kv = KvCache(
        num_layers=1,
        num_slots=NUM_SLOTS,
        num_kv_heads=1,
        head_dim=HEAD_DIM,
        dtype=torch.bfloat16,
        device=device,
    )
    kv.extend(0, np.arange(NUM_SLOTS - NUM_CACHED - 64))
    slots = kv.extend(1, np.arange(NUM_CACHED))
    assert int(slots[0]) * HEAD_DIM >= (1 << 31) - 64 * HEAD_DIM
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(NUM_CACHED, 1, HEAD_DIM, generator=generator).bfloat16()
    v = torch.randn(NUM_CACHED, 1, HEAD_DIM, generator=generator).bfloat16()
    kv.k_LSKH[0, slots[0] : slots[-1] + 1] = k
    kv.v_LSKH[0, slots[0] : slots[-1] + 1] = v
    step = RunStep(
        step_id=1,
        epoch=0,
        members=[0],
        batch=[
            Extend(
                request_id="long",
                tokens=pack_tokens([7]),
                start=NUM_CACHED,
                master=0,
                segment=2,
                keep=[],
                cached=[1],
                holders=[0],
                sampling=None,
                holder_tokens=[NUM_CACHED],
            )
        ],
    )
    layout = lay_out(step, 0, kv, row_bytes=RowBytes(1, 1), windowed=False)
    attention = EspAttention(
        layout,
        kv,
        LoopbackWorld(1).transport(0),
        CpuFlashBackend(HEAD_DIM**-0.5),
        scale=HEAD_DIM**-0.5,
        windows=(None,),
    )
    q = torch.randn(1, 2, HEAD_DIM, generator=generator).bfloat16() * 4
    new_k = torch.randn(1, 1, HEAD_DIM, generator=generator).bfloat16()
    new_v = torch.randn(1, 1, HEAD_DIM, generator=generator).bfloat16()
    out = attention(0, q, new_k, new_v)
    expected, _ = dense_attention(
        q.double(),
        torch.cat((k, new_k)).double(),
        torch.cat((v, new_v)).double(),
        scale=HEAD_DIM**-0.5,
    )
    torch.testing.assert_close(out.float(), expected.float(), atol=2e-3, rtol=2e-2)
    assert kv.num_used == NUM_SLOTS - 64 + 1
