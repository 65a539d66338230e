"""Small kernels equal their torch twins in float64, on views with gaps and on no rows."""

from __future__ import annotations

import pytest
import torch
from kernel_kit import TOLERANCE, assert_close, poisoned
from torch import Tensor

from loongd.kernels import reference
from loongd.kernels.gpu import draw, elementwise, merge, pool, sampling

DTYPES = [torch.float32, torch.float16]
EPS = 1e-5


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 576), (0, 64), (3, 4096), (7, 3, 80)], ids=str)
def test_rms_norm(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    wide = random(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)
    x = wide[..., : shape[-1]]
    weight = random(shape[-1], dtype=dtype, device=device, seed=2)
    with poisoned():
        y = elementwise.rms_norm(x, weight, EPS)
    assert_close(y, reference.rms_norm(x.double(), weight.double(), EPS), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(device: torch.device, dtype: torch.dtype) -> None:
    x = random(5, 1152, dtype=dtype, device=device)[:, :576]
    residual = random(5, 576, dtype=dtype, device=device, seed=3)
    weight = random(576, dtype=dtype, device=device, seed=2)
    expected_sum = (x + residual).clone()
    with poisoned():
        y = elementwise.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, expected_sum)
    assert_close(y, reference.rms_norm(expected_sum.double(), weight.double(), EPS), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 1536), (0, 64), (3, 5000)], ids=str)
def test_silu_mul(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    both = random(shape[0], 2 * shape[1], dtype=dtype, device=device)
    gate, up = both.chunk(2, dim=-1)
    with poisoned():
        y = elementwise.silu_mul(gate, up)
    assert_close(y, reference.silu_mul(gate.double(), up.double()), dtype)


@pytest.mark.parametrize("part_type", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_merge_state(device: torch.device, part_type: torch.dtype, head_dim: int) -> None:
    """Parts as they arrive: output and log-sum-exp side by side in one buffer."""
    out = random(9, 3, head_dim, dtype=torch.float32, device=device)
    lse = random(9, 3, dtype=torch.float32, device=device, seed=2) * 20
    buffer = random(9, 3, head_dim + 1, dtype=part_type, device=device, seed=3)
    part, part_lse = buffer[..., :-1], buffer[..., -1].float() * 20
    for rows, side in ((0, lse), (1, part_lse), (2, lse), (2, part_lse)):
        side[rows] = -torch.inf
        (out if side is lse else part)[rows] = 0
    expected, expected_lse = out.double(), lse.double()
    reference.merge_state_(expected, expected_lse, part, part_lse.double())
    merge.merge_state_(out, lse, part, part_lse)
    assert_close(out, expected, torch.float32)
    assert_close(lse, expected_lse, torch.float32)
    assert (out[2] == 0).all()


@pytest.mark.parametrize("rows", [None, [4, 0, 1, 4, 2]], ids=["in order", "chosen rows"])
@pytest.mark.parametrize("slot_type", [torch.int32, torch.int64], ids=str)
def test_store_kv(device: torch.device, slot_type: torch.dtype, rows: list[int] | None) -> None:
    qkv = random(5, 3 * 3 * 80, dtype=torch.float16, device=device)
    k, v = qkv[:, 240:480].view(5, 3, 80), qkv[:, 480:].view(5, 3, 80)
    slots = torch.tensor([9, 2, -1, 0, 5], dtype=slot_type, device=device)
    rows_R = torch.tensor(rows, device=device) if rows else None
    pools = [torch.full((11, 3, 80), torch.nan, device=device).half() for _ in range(4)]
    pool.store_kv(k, v, slots, pools[0], pools[1], rows_R=rows_R)
    reference.store_kv(k, v, slots, pools[2], pools[3], rows_R=rows_R)
    assert torch.equal(pools[0].nan_to_num(9e4), pools[2].nan_to_num(9e4))
    assert torch.equal(pools[1].nan_to_num(9e4), pools[3].nan_to_num(9e4))
    assert int(pools[0].isnan().all(-1).all(-1).sum()) == 7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((4, 4), 80)], ids=str)
def test_rope(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    n, kv = heads
    qkv = random(4, (n + 2 * kv) * head_dim, dtype=dtype, device=device)
    q, k, v = (x.view(4, -1, head_dim) for x in qkv.split([n * head_dim, *[kv * head_dim] * 2], 1))
    angles = random(4, head_dim, dtype=torch.float32, device=device, seed=5)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    slots = torch.tensor([3, -1, 0, 7], device=device)
    expected = reference.apply_rotary(q.double(), k.double(), cos.double(), sin.double())
    with poisoned():
        turned = pool.apply_rotary(q, k, cos, sin)
    for got, wanted in zip(turned, expected, strict=True):
        assert_close(got, wanted, dtype)
    wide = [x.new_zeros(4, x.shape[1], 2 * head_dim)[..., head_dim:] for x in (q, k)]
    pool.apply_rotary(q, k, cos, sin, out=(wide[0], wide[1]))
    assert all(map(torch.equal, wide, turned))
    pools = [torch.full((8, kv, head_dim), torch.nan, dtype=dtype, device=device) for _ in "kv"]
    pool.rope_store_kv(q, k, v, cos, sin, slots, *pools)
    assert torch.equal(q, turned[0])
    assert torch.equal(k, turned[1])
    for source, target in zip((k, v), pools, strict=True):
        assert torch.equal(target[[3, 0, 7]], source[[0, 2, 3]])
        assert target[[1, 2, 4, 5, 6]].isnan().all()


@pytest.mark.parametrize("scale", [1.0, 1.25])
@pytest.mark.parametrize("half", [32, 40, 64])
@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
def test_rotary_angles(device: torch.device, half: int, own: bool, scale: float) -> None:
    """Positions of a million too: their angles need an exact reduction."""
    positions = torch.tensor([0, 1, 77, 8191, 131_071, 1_000_003], device=device)
    inv_freq = 1.0 / 10_000 ** (torch.arange(half, device=device) / half)
    if own:
        inv_freq = inv_freq * torch.linspace(1.0, 0.5, 6, device=device)[:, None]
    angles = (positions[:, None].float() * inv_freq).double()
    expected = [torch.cat((x, x), 1) * scale for x in (angles.cos(), angles.sin())]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for kind in (torch.int32, torch.int64):
            with poisoned():
                got = elementwise.rotary_angles(positions.to(kind), inv_freq, scale, dtype)
            for ours, wanted in zip(got, expected, strict=True):
                assert ours.dtype == dtype
                assert_close(ours, wanted, dtype)
    for ours, twin in zip(
        got, reference.rotary_angles(positions, inv_freq, scale, dtype), strict=True
    ):
        assert_close(ours, twin, torch.bfloat16)
    assert elementwise.rotary_angles(positions[:0], inv_freq[:0], 1.0, dtype)[0].shape[0] == 0


def test_rows_with_gaps_are_refused(device: torch.device) -> None:
    rows = torch.arange(8, device=device)
    with pytest.raises(AssertionError):
        elementwise.rotary_angles(rows[::2], torch.rand(4, device=device), 1.0, torch.float32)
    with pytest.raises(AssertionError):
        elementwise.rotary_angles(rows, torch.rand(8, device=device)[::2], 1.0, torch.float32)
    columns = rows.int().view(4, 2).T
    with pytest.raises(AssertionError):
        pool.next_tokens(rows, *columns.expand(2, 4), columns[0], columns[1], rows.int(), rows[:4])


@pytest.mark.parametrize("rows", [1, 5, 70])
def test_next_tokens(device: torch.device, rows: int) -> None:
    """Drawn, given and failed rows; a row without a slot writes into the last entry."""
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randint(-1, 50, (rows,), generator=generator)
    sources = torch.randint(-1, rows, (rows,), generator=generator).int()
    given = torch.randint(100, 200, (rows,), generator=generator).int()
    entries = torch.randperm(2 * rows, generator=generator)[:rows].int()
    slots = torch.randint(0, 1000, (rows,), generator=generator).int()
    entries[rows // 2], slots[rows // 2] = 2 * rows, -1
    table = torch.full((2 * rows + 1,), -7, dtype=torch.int32)
    tensors = [x.to(device) for x in (drawn, sources, given, entries, slots)]
    tables = [table.to(device), table]
    got, expected = torch.full((rows,), -9, device=device), torch.full((rows,), -9)
    pool.next_tokens(*tensors, tables[0], got)
    reference.next_tokens(drawn, sources, given, entries, slots, tables[1], expected)
    assert got.tolist() == expected.tolist()
    chosen = [
        int(max(drawn[s], 0)) if s >= 0 else int(g) for s, g in zip(sources, given, strict=True)
    ]
    assert got.tolist() == chosen
    assert tables[0].tolist() == tables[1].tolist()
    assert int((tables[1] != -7).sum()) == rows


def test_best_tokens(device: torch.device) -> None:
    logits = random(6, 9000, dtype=torch.float32, device=device)
    logits[0, [17, 5000, 8999]] = 10.0
    logits[1, 8999] = 10.0
    logits[2, 4500] = torch.nan
    logits[3, 100] = torch.inf
    logits[4] = -torch.inf
    logits[5, 1] = 10.0
    got = sampling.best_tokens(logits)
    assert got.dtype == torch.int64
    assert got.tolist() == [17, 8999, -1, -1, -1, 1]
    assert torch.equal(got, reference.best_tokens(logits))
    for module in (sampling, reference):
        kept = torch.full((8,), 99, device=device)
        into = kept[1:7]
        assert module.best_tokens(logits, out=into) is into
        assert kept.tolist() == [99, *got.tolist(), 99]


@pytest.mark.parametrize(("rows", "vocab"), [(1, 32001), (700, 33), (300, 4100)], ids=str)
def test_best_tokens_of_many_shapes(device: torch.device, rows: int, vocab: int) -> None:
    """Few and many parts a row, vocabularies that no block divides, rows with gaps, and ties."""
    logits = random(rows, vocab + 7, dtype=torch.float32, device=device).mul(4).round()[:, :vocab]
    first_of_equals = torch.tensor([row.index(max(row)) for row in logits.tolist()])
    assert torch.equal(sampling.best_tokens(logits).cpu(), first_of_equals)


def test_every_kernel_has_a_twin() -> None:
    for module, names in (
        (elementwise, ("rms_norm", "add_rms_norm", "silu_mul", "rotary_angles")),
        (pool, ("next_tokens", "store_kv", "rope_store_kv", "apply_rotary")),
        (merge, ("merge_state_",)),
        (sampling, ("best_tokens",)),
        (draw, ("draw_tokens",)),
    ):
        for name in names:
            ours, twin = getattr(module, name), getattr(reference, name)
            assert ours.__annotations__ == twin.__annotations__
    assert set(TOLERANCE) == {torch.float32, torch.float16, torch.bfloat16}
