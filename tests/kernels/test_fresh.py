"""Decode attention that rotates and stores the new tokens itself.

Oracle: the torch twin in float64 on the same rounded inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import pytest
import torch
from kernel_kit import Problem, assert_close, make_problem, poisoned
from torch import Tensor

from loongd.kernels import reference
from loongd.kernels.fresh import Fresh
from loongd.kernels.gpu import attend
from loongd.kernels.gpu.plan import Tiling

SMALL = Tiling(block_m=16, block_k=16, num_warps=4, num_stages=2, programs=14, merge_rows=1)
HALF = torch.float16
FULL = torch.float32
BRAIN = torch.bfloat16

SPANS: tuple[tuple[int, ...], ...] = (
    (1,),
    (400,),
    (70, 0, 1, 16, 17),
    (0, 0),
    (0, 150, 0, 0, 3, 2, 1, 0),
    (600, *(3, 40) * 9),
)


@dataclass
class Step:
    """A step's new tokens: the pool does not have their keys yet."""

    p: Problem
    fresh: Fresh

    @classmethod
    def of(cls, p: Problem, k_lens: Sequence[int]) -> Step:
        generator = torch.Generator().manual_seed(len(k_lens))
        num_kv_heads, head_dim = p.k.shape[1:]
        kind, device = p.k.dtype, p.k.device
        ends = zip(accumulate(k_lens), k_lens, strict=True)
        owned = p.slots.tolist()
        last = [owned[end - 1] if length else -1 for end, length in ends]
        for pool in (p.k, p.v):
            pool[[slot for slot in last if slot >= 0]] = torch.nan
        # all strides differ, so that none stands in for another
        qkv = torch.randn(len(k_lens), 3 * num_kv_heads, head_dim, generator=generator)
        qkv = qkv.to(device, kind)
        v = torch.randn(len(k_lens), num_kv_heads, head_dim + 8, generator=generator)
        angles = torch.randn(len(k_lens), head_dim, generator=generator)
        sin = torch.zeros(len(k_lens), head_dim + 16, dtype=kind, device=device)[:, :head_dim]
        sin.copy_(angles.sin())
        p.v = p.v.new_full((*p.v.shape[:2], head_dim + 8), torch.nan)[..., :head_dim].copy_(p.v)
        return cls(
            p,
            Fresh(
                qkv[:, num_kv_heads : 2 * num_kv_heads],
                v.to(device, kind)[..., :head_dim],
                angles.cos().to(device, kind),
                sin,
                torch.tensor(last, dtype=torch.int32, device=device),
            ),
        )

    def expected(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """The twin's (out, lse) and pools, in float64 on the CPU."""
        q, k, v, slots = self.p.doubled
        one = self.fresh
        tensors = (x.double().cpu() for x in (one.k, one.v, one.cos, one.sin))
        wide = Fresh(*tensors, one.slots.cpu())
        cu_k = self.p.cu_k.cpu()
        more = {"scale": self.p.scale, "fresh": wide}
        before = q.clone(), wide.k.clone()
        state = reference.split_kv(q, k, v, slots, None, cu_k, **more)
        assert torch.equal(q, before[0])
        assert torch.equal(wide.k, before[1])
        return state, (k, v)

    def run(self, tiling: Tiling | None) -> tuple[Tensor, Tensor]:
        p = self.p
        more = {"scale": p.scale, "tiling": tiling}
        with poisoned():
            return attend.split_kv(p.q, p.k, p.v, p.slots, None, p.cu_k, fresh=self.fresh, **more)


@pytest.mark.parametrize("k_lens", SPANS)
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)], ids=str)
def test_fresh_any_lengths(
    device: torch.device, k_lens: Sequence[int], heads: tuple[int, int]
) -> None:
    p = make_problem([1] * len(k_lens), k_lens, heads=heads, head_dim=64, dtype=FULL, device=device)
    step = Step.of(p, k_lens)
    before = p.q.clone(), step.fresh.k.clone()
    expected, pools = step.expected()
    for tiling in (SMALL, None):
        out, lse = step.run(tiling)
        assert_close(out, expected[0], FULL)
        assert_close(lse, expected[1], FULL)
        for got, pool in zip((p.k, p.v), pools, strict=True):
            # no slot but the new ones is written: what nobody owns is still NaN
            assert torch.equal(got.isnan().cpu(), pool.isnan())
            assert_close(got.nan_to_num(), pool.nan_to_num(), FULL)
        assert torch.equal(p.q, before[0])
        assert torch.equal(step.fresh.k, before[1])


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_fresh_any_head_dim(device: torch.device, head_dim: int) -> None:
    k_lens = (33, 5, 0, 130)
    p = make_problem([1] * 4, k_lens, heads=(6, 2), head_dim=head_dim, dtype=HALF, device=device)
    step = Step.of(p, k_lens)
    expected, _ = step.expected()
    out, lse = step.run(None)
    assert_close(out, expected[0], HALF)
    assert_close(lse, expected[1], HALF)


def test_a_slot_below_0_writes_over_nobody(device: torch.device) -> None:
    p = make_problem([1], [5], heads=(2, 2), head_dim=64, dtype=FULL, device=device)
    step = Step.of(p, [5])
    step.fresh.slots.fill_(-1)
    # as a layer's pool lies behind another's
    pools = [torch.full((12 + len(x), 2, 64), 7.0, device=device) for x in (p.k, p.v)]
    for pool, x in zip(pools, (p.k, p.v), strict=True):
        pool[12:] = x.nan_to_num()
    before = [pool.clone() for pool in pools]
    k, v = (pool[12:] for pool in pools)
    attend.split_kv(p.q, k, v, p.slots, None, p.cu_k, scale=p.scale, fresh=step.fresh)
    assert all(map(torch.equal, pools, before))


def test_fresh_is_one_query_a_span(device: torch.device) -> None:
    p = make_problem([1], [5], heads=(2, 2), head_dim=64, dtype=FULL, device=device)
    step = Step.of(p, [5])
    with pytest.raises(AssertionError):
        attend.split_kv(p.q, p.k, p.v, p.slots, p.cu_q, p.cu_k, scale=p.scale, fresh=step.fresh)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(32, 32), (32, 8)], ids=str)
@pytest.mark.parametrize(
    "k_lens", [(1000,), (131_072,), (1, 4000, 0, 9) * 8, (1024,) * 64, (64,) * 1024], ids=len
)
def test_fresh_at_size_in_a_graph(
    device: torch.device, k_lens: tuple[int, ...], heads: tuple[int, int]
) -> None:
    """Replays with other new tokens."""
    more = {"heads": heads, "head_dim": 128, "dtype": BRAIN, "device": device}
    p = make_problem([1] * len(k_lens), k_lens, slot_type=torch.int32, **more)
    step = Step.of(p, k_lens)
    step.run(None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend.split_kv(
            p.q,
            p.k,
            p.v,
            p.slots,
            None,
            p.cu_k,
            scale=p.scale,
            fresh=step.fresh,
        )
    for _ in range(3):
        step.fresh.k.normal_()
        step.fresh.v.normal_()
        p.q.normal_()
        out.fill_(torch.nan)
        graph.replay()
        got = out.clone(), lse.clone()
        expected, _ = step.expected()
        assert_close(got[0], expected[0], BRAIN)
        assert_close(got[1], expected[1], BRAIN)
