"""What the interpreter cannot show: bf16, sizes past 32 bits, graphs, long contexts. On a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_kit import Problem, assert_close, make_problem, poisoned
from torch import Tensor

from loongd.kernels import reference
from loongd.kernels.attention import PoolSlots, Spans, select_backend
from loongd.kernels.gpu import attend, elementwise, merge, pool, sampling
from loongd.kernels.gpu.plan import extend_tiling, tile_table
from loongd.kernels.spare import new_rows, with_spare

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
MODELS = [
    (torch.bfloat16, (8, 8), 128),
    (torch.bfloat16, (32, 8), 128),
    (torch.bfloat16, (9, 3), 64),
    (torch.bfloat16, (28, 4), 80),
    (torch.float16, (8, 1), 96),
    (torch.bfloat16, (8, 4), 256),
    (torch.float32, (8, 2), 128),
    (torch.float32, (4, 4), 256),
]
"""Type, (query heads, kv heads), head dim; one of each kind, because each is compiled anew."""


def expected_split(p: Problem) -> tuple[Tensor, Tensor]:
    """float64 on the GPU."""
    q, k, v = p.q.double(), p.k.double(), p.v.double()
    return reference.split_kv(q, k, v, p.slots, p.cu_q, p.cu_k, scale=p.scale)


@pytest.mark.parametrize(("dtype", "heads", "head_dim"), MODELS, ids=str)
def test_split_kv(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    p = make_problem(
        [1, 2, 1, 0, 1, 4],
        [5000, 33, 0, 10, 1, 777],
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    with poisoned():
        out, lse = attend.split_kv(p.q, p.k, p.v, p.slots, p.cu_q, p.cu_k, scale=p.scale, max_q=4)
    expected = expected_split(p)
    assert_close(out, expected[0], dtype)
    assert_close(lse, expected[1], dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "heads", "head_dim"), MODELS, ids=str)
def test_extend(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int, causal: bool
) -> None:
    p = make_problem(
        [300, 0, 1, 65],
        [2000, 5, 33, 65],
        heads=heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
    )
    q, k, v = p.q.double(), p.k.double(), p.v.double()
    expected = reference.extend(q, k, v, p.slots, p.ranges, scale=p.scale, causal=causal)
    packed = p.k[p.slots], p.v[p.slots]
    for keys, slots in (((p.k, p.v), p.slots), (packed, None)):
        with poisoned():
            out, lse = attend.extend(p.q, *keys, slots, p.ranges, scale=p.scale, causal=causal)
        assert_close(out, expected[0], dtype)
        assert_close(lse, expected[1], dtype)


def test_many_requests(device: torch.device) -> None:
    """More tiles than shares, and lengths from 0 to 1,000."""
    k_lens = [(i * 7919) % 1000 for i in range(1500)]
    p = make_problem(
        [1] * 1500, k_lens, heads=(8, 2), head_dim=128, dtype=torch.bfloat16, device=device
    )
    with poisoned():
        out, lse = attend.split_kv(p.q, p.k, p.v, p.slots, None, p.cu_k, scale=p.scale)
    expected = expected_split(p)
    assert_close(out, expected[0], torch.bfloat16)
    assert_close(lse, expected[1], torch.bfloat16)


def test_slots_past_32_bits(device: torch.device) -> None:
    """The pool's last slots begin past element 2**31: stored, rotated and attended right."""
    num_slots, num_kv_heads, head_dim, tokens = (1 << 21) + 4096, 8, 128, 2000
    pools = [
        torch.zeros(num_slots, num_kv_heads, head_dim, dtype=torch.bfloat16, device=device)
        for _ in "kv"
    ]
    assert pools[0].numel() > 1 << 31
    torch.manual_seed(3)
    q, k, v = (torch.randn(tokens, 8, head_dim, device=device).bfloat16() for _ in "qkv")
    slots = torch.randperm(4096, device=device)[:tokens] + (1 << 21)
    pool.store_kv(k, v, slots, *pools)
    assert torch.equal(pools[0][slots], k)
    assert torch.equal(pools[1][slots], v)
    cu_k = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    out, lse = attend.split_kv(q[:1], *pools, slots, None, cu_k, scale=0.1)
    expected = reference.extend(
        q[:1].double(), k.double(), v.double(), None, ((0, 1, 0, tokens),), scale=0.1
    )
    assert_close(out, expected[0], torch.bfloat16)
    assert_close(lse, expected[1], torch.bfloat16)
    angles = torch.rand(tokens, head_dim, device=device)
    turned = pool.apply_rotary(q, k, angles.cos(), angles.sin())
    pool.rope_store_kv(q, k, v, angles.cos(), angles.sin(), slots, *pools)
    assert torch.equal(pools[0][slots], turned[1])


def test_rows_past_32_bits(device: torch.device) -> None:
    """Row 2**31 / width and later of the small kernels."""
    rows, dim = (1 << 19) + 64, 4096
    x = torch.zeros(rows, dim, dtype=torch.bfloat16, device=device)
    x[-64:] = torch.randn(64, dim, device=device).bfloat16()
    weight = torch.ones(dim, dtype=torch.bfloat16, device=device)
    y = elementwise.rms_norm(x, weight, 1e-5)
    assert_close(y[-64:], reference.rms_norm(x[-64:], weight, 1e-5), torch.bfloat16)
    y = elementwise.silu_mul(x, x)
    assert_close(y[-64:], reference.silu_mul(x[-64:].float(), x[-64:].float()), torch.bfloat16)


def test_split_kv_in_a_graph(device: torch.device) -> None:
    """One captured graph serves other lengths, other slots and other queries."""
    options = {"heads": (32, 8), "head_dim": 128, "dtype": torch.bfloat16, "device": device}
    first = make_problem([1] * 5, [600, 3, 0, 41, 900], **options)  # type: ignore[arg-type]
    other = make_problem([1] * 5, [0, 700, 64, 1, 200], seed=1, **options)  # type: ignore[arg-type]
    slots = torch.zeros(4096, dtype=torch.int64, device=device)
    q, cu_k = first.q.clone(), first.cu_k.clone()
    pools = [torch.zeros(2000, 8, 128, dtype=torch.bfloat16, device=device) for _ in "kv"]

    def load(p: Problem) -> None:
        q.copy_(p.q)
        cu_k.copy_(p.cu_k)
        slots[: len(p.slots)] = p.slots
        pools[0][: len(p.k)] = p.k
        pools[1][: len(p.v)] = p.v

    load(first)
    attend.split_kv(q, *pools, slots, None, cu_k, scale=first.scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend.split_kv(q, *pools, slots, None, cu_k, scale=first.scale)
    for p in (first, other):
        load(p)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        expected = expected_split(p)
        assert_close(out, expected[0], torch.bfloat16)
        assert_close(lse, expected[1], torch.bfloat16)


@pytest.mark.parametrize(("dtype", "heads", "head_dim"), [MODELS[1], *MODELS[5:7]], ids=str)
def test_extend_planned_in_a_graph(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    """One captured graph serves other lists of tiles: many short prompts, a long prefix."""
    group, num_tiles, num_rows = heads[0] // heads[1], 160, 512
    tiling = extend_tiling(device, dtype, head_dim, num_rows * group)
    q = torch.zeros(num_rows, heads[0], head_dim, dtype=dtype, device=device)
    pools = [torch.zeros(22_000, heads[1], head_dim, dtype=dtype, device=device) for _ in "kv"]
    slots = torch.zeros(22_000, dtype=torch.int32, device=device)
    tiles = torch.zeros(num_tiles, 5, dtype=torch.int32, device=device)
    ends = torch.zeros(num_tiles + 1, dtype=torch.int32, device=device)
    out = torch.zeros_like(q), torch.zeros(q.shape[:2], device=device)

    def run() -> None:
        attend.extend_planned(q, *pools, slots, tiles, ends, scale=0.1, tiling=tiling, out=out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for q_lens, k_lens in (((100, 1, 300), (20_000, 33, 1300)), ((17,) * 30, (17,) * 30)):
        p = make_problem(q_lens, k_lens, heads=heads, head_dim=head_dim, dtype=dtype, device=device)
        q[: len(p.q)] = p.q
        slots[: len(p.slots)] = p.slots
        pools[0][: len(p.k)], pools[1][: len(p.v)] = p.k, p.v
        table = tile_table(p.ranges, group, tiling.block_m, tiling.block_k, causal=True)
        tiles.zero_()[: len(table[0])] = torch.from_numpy(table[0])
        ends.fill_(int(table[1][-1]))[: len(table[1])] = torch.from_numpy(table[1])
        for x in out:
            x.fill_(torch.nan)
        graph.replay()
        doubled = (p.q.double(), p.k.double(), p.v.double())
        expected = reference.extend(*doubled, p.slots, p.ranges, scale=0.1, causal=True)
        assert_close(out[0][: len(p.q)], expected[0], dtype)
        assert_close(out[1][: len(p.q)], expected[1], dtype)
        assert bool(out[0][len(p.q) :].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_kernels(device: torch.device, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, y = (torch.randn(1000, 11008, device=device).to(dtype) for _ in "xy")
    weight = torch.randn(4096, device=device).to(dtype)
    got = elementwise.silu_mul(x, y)
    assert_close(got, reference.silu_mul(x.double(), y.double()), dtype)
    rows = x[:, :4096]
    got = elementwise.rms_norm(rows, weight, 1e-5)
    assert_close(got, reference.rms_norm(rows.double(), weight.double(), 1e-5), dtype)
    residual = y[:, :4096].contiguous()
    summed = rows + residual
    got = elementwise.add_rms_norm(rows, residual, weight, 1e-5)
    assert torch.equal(residual, summed)
    assert_close(got, reference.rms_norm(summed.double(), weight.double(), 1e-5), dtype)
    state = torch.randn(1000, 32, 128, device=device), torch.randn(1000, 32, device=device)
    part = torch.randn(1000, 32, 128, device=device).to(dtype), torch.randn(1000, 32, device=device)
    expected = state[0].double(), state[1].double()
    reference.merge_state_(*expected, *part)
    merge.merge_state_(*state, *part)
    assert_close(state[0], expected[0], torch.float32)
    assert_close(state[1], expected[1], torch.float32)
    logits = torch.randn(257, 128256, device=device)
    assert torch.equal(sampling.best_tokens(logits), logits.argmax(-1))


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("length", [1025, 2300, 5003])
def test_lone_square(device: torch.device, length: int, heads: tuple[int, int]) -> None:
    """As prompts have it: values beside queries and keys, rows behind them, of which those of the
    queries are anything."""
    backend = select_backend(device, torch.bfloat16, 128, 128**-0.5)
    assert backend.planned is not None
    spare, (num_heads, num_kv_heads) = backend.planned.spare(length), heads
    size = torch.Size((length, num_heads + 2 * num_kv_heads, 128))
    q, k, qkv = (
        new_rows(torch.empty(0, dtype=torch.bfloat16, device=device), shape, spare).normal_()
        for shape in ((length, num_heads, 128), (length, num_kv_heads, 128), size)
    )
    with_spare(q, spare)[length:] = torch.nan
    v = qkv[:, -num_kv_heads:]
    with poisoned():
        got = backend.square_causal(q, k, v, Spans((length,), (length,), device, spare=spare))
    doubled = (x.double() for x in (q, k, v))
    one = ((0, length, 0, length),)
    expected = reference.extend(*doubled, None, one, scale=128**-0.5, causal=True)
    assert_close(got[0], expected[0], torch.bfloat16)
    assert_close(got[1], expected[1], torch.bfloat16)


@pytest.mark.parametrize("in_runs", [False, True])
def test_chosen_backend(device: torch.device, in_runs: bool) -> None:
    """What `select_backend` takes for bf16, at sizes where each of its ways is used."""
    backend = select_backend(device, torch.bfloat16, 128, 128**-0.5)
    q_lens, k_lens = (700, 1, 90, 2000, 400, 900), (5003, 40, 100, 2100, 4096, 5003)
    p = make_problem(
        q_lens, k_lens, heads=(8, 2), head_dim=128, dtype=torch.bfloat16, device=device
    )
    if in_runs:
        p.k[: len(p.slots)], p.v[: len(p.slots)] = p.k[p.slots], p.v[p.slots]
        p.slots = torch.arange(len(p.slots), device=device)
    host = p.slots.cpu().numpy()
    slots = PoolSlots(tuple(host[k0:k1] for _, _, k0, k1 in p.ranges), device)
    q, k, v = p.q.double(), p.k.double(), p.v.double()
    with poisoned():
        got = backend.over_pool(p.q, p.k, p.v, slots, Spans(q_lens, k_lens, device))
    expected = reference.extend(q, k, v, p.slots, p.ranges, scale=p.scale)
    assert_close(got[0], expected[0], torch.bfloat16)
    assert_close(got[1], expected[1], torch.bfloat16)
    packed = p.k[p.slots[: len(p.q)]], p.v[p.slots[: len(p.q)]]
    spans = Spans(q_lens, q_lens, device)
    with poisoned():
        got = backend.square_causal(p.q, *packed, spans)
    doubled = (x.double() for x in packed)
    expected = reference.extend(q, *doubled, None, spans.ranges, scale=p.scale, causal=True)
    assert_close(got[0], expected[0], torch.bfloat16)
    assert_close(got[1], expected[1], torch.bfloat16)
