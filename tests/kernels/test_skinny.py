"""Products of few rows equal float64's, in every tile, and rows do not see each other; so do those
with a norm between them.

The rules that choose are checked against the measurements that they come from.
"""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from kernel_kit import assert_close, poisoned
from torch import Tensor

from loongd.kernels import reference, reference_skinny
from loongd.kernels.gpu import elementwise, skinny
from loongd.kernels.gpu.skinny import Tile

DTYPES = [torch.float32, torch.float16]
SHAPES = [(70, 96), (16, 40), (33, 129)]
"""(outputs, inputs): neither divided by the blocks, or both."""
TILES = [Tile(16, 16, 32, 4, 2), Tile(16, 32, 32, 4, 3, splits=2), Tile(16, 16, 64, 4, 2, splits=4)]


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def check(
    rows: int, shape: tuple[int, int], tile: Tile | None, dtype: torch.dtype, device: torch.device
) -> None:
    """Both products, with and without biases, of rows with gaps between them."""
    num_outs, dim = shape
    x = random(rows, dim + 8, dtype=dtype, device=device)[:, :dim]
    w = random(2 * num_outs, dim, dtype=dtype, device=device, seed=2).mul_(dim**-0.5)
    bias = random(2 * num_outs, dtype=dtype, device=device, seed=3)
    tickets = skinny.new_tickets(device)
    for b in (None, bias):
        half = None if b is None else b[:num_outs]
        b64, half64 = (None if y is None else y.double() for y in (b, half))
        with poisoned():
            got = skinny.linear_of_few(x, w[:num_outs], half, tickets, tile=tile)
        expected = reference_skinny.linear_of_few(
            x.double(), w[:num_outs].double(), half64, tickets
        )
        assert got.dtype == dtype
        assert_close(got, expected, dtype)
        assert not tickets.any()
        if tile is not None and tile.splits > 1:
            continue
        with poisoned():
            got = skinny.gated_linear_of_few(x, w, b, tile=tile)
        assert_close(got, reference_skinny.gated_linear_of_few(x.double(), w.double(), b64), dtype)


def check_norm_between(
    rows: int, shape: tuple[int, int], tile: Tile | None, dtype: torch.dtype, device: torch.device
) -> None:
    """A product that is added to rows with gaps between them, and two that read the norm of that;
    with and without biases."""
    dim, num_ins = shape
    eps = 0.1  # large enough to be missed
    x = random(rows, num_ins, dtype=dtype, device=device)
    w = random(dim, num_ins, dtype=dtype, device=device, seed=2).mul_(num_ins**-0.5)
    following = random(140, dim, dtype=dtype, device=device, seed=3).mul_(dim**-0.5)
    norm = random(dim, dtype=dtype, device=device, seed=4)
    before = random(rows, dim + 8, dtype=dtype, device=device, seed=5)
    biases = random(max(dim, 140), dtype=dtype, device=device, seed=6)
    tickets = skinny.new_tickets(device)
    for bias, next_bias in ((None, None), (biases[:dim], biases[:140])):
        stream = before.clone()
        with poisoned():
            scaled, division = skinny.add_linear_of_few(
                x, w, bias, stream[:, :dim], norm, eps, tickets, tile=tile
            )
        # the stream has the bits that a kernel of its own would give it
        product, alone = skinny.linear_of_few(x, w, bias, tickets, tile=tile), before.clone()
        elementwise.add_rms_norm(product, alone[:, :dim], norm, eps)
        assert torch.equal(stream, alone)
        normed = reference.rms_norm(stream[:, :dim].double(), norm.double(), eps)
        wide = (following.double(), None if next_bias is None else next_bias.double())
        with poisoned():
            got = skinny.linear_of_few(
                scaled, following, next_bias, tickets, division=division, tile=tile
            )
        assert got.dtype == dtype
        assert_close(got, reference_skinny.linear_of_few(normed, *wide, tickets), dtype)
        assert not tickets.any()
        if tile is not None and tile.splits > 1:
            continue
        with poisoned():
            got = skinny.gated_linear_of_few(
                scaled, following, next_bias, division=division, tile=tile
            )
        assert_close(got, reference_skinny.gated_linear_of_few(normed, *wide), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 17])
def test_norm_between_products_in_the_chosen_tile(
    device: torch.device, dtype: torch.dtype, rows: int
) -> None:
    check_norm_between(rows, (200, 300), None, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_norm_between_products_in_a_tile(
    device: torch.device, dtype: torch.dtype, tile: Tile, shape: tuple[int, int]
) -> None:
    check_norm_between(11, shape, tile, dtype, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_the_twins_of_products_with_a_norm_between(dtype: torch.dtype, bias: bool) -> None:
    cpu, tickets = torch.device("cpu"), torch.empty(0)
    x, stream, norm = (random(*n, dtype=dtype, device=cpu) for n in ((5, 40), (5, 24), (24,)))
    w, b, following = (random(*n, dtype=dtype, device=cpu) for n in ((24, 40), (24,), (14, 24)))
    b, next_b = (b, b[:14]) if bias else (None, None)
    alone = stream.clone()
    scaled, division = reference_skinny.add_linear_of_few(x, w, b, stream, norm, 0.1, tickets)
    product = reference_skinny.linear_of_few(x, w, b, tickets)
    normed = reference.add_rms_norm(product, alone, norm, 0.1)
    assert torch.equal(stream, alone)
    got = reference_skinny.linear_of_few(scaled, following, next_b, tickets, division=division)
    torch.testing.assert_close(
        got, reference_skinny.linear_of_few(normed, following, next_b, tickets)
    )
    got = reference_skinny.gated_linear_of_few(scaled, following, next_b, division=division)
    torch.testing.assert_close(got, reference_skinny.gated_linear_of_few(normed, following, next_b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17, 64])
def test_product_in_the_chosen_tile(device: torch.device, dtype: torch.dtype, rows: int) -> None:
    check(rows, (70, 600), None, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_product_in_a_tile(
    device: torch.device, dtype: torch.dtype, tile: Tile, shape: tuple[int, int]
) -> None:
    check(11, shape, tile, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_row_does_not_depend_on_the_others(
    device: torch.device, dtype: torch.dtype, splits: int
) -> None:
    tile = Tile(16, 16, 32, 4, 2, splits)
    x = random(16, 96, dtype=dtype, device=device)
    w = random(48, 96, dtype=dtype, device=device, seed=2)
    tickets = skinny.new_tickets(device)
    together = skinny.linear_of_few(x, w, None, tickets, tile=tile)
    for first, rows in ((5, 1), (2, 9)):
        some = x[first : first + rows]
        alone = skinny.linear_of_few(some, w, None, tickets, tile=tile)
        assert torch.equal(alone, together[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_nor_does_it_with_a_norm_between(
    device: torch.device, dtype: torch.dtype, splits: int
) -> None:
    tile = Tile(16, 16, 32, 4, 2, splits)
    x, stream = (random(16, 96, dtype=dtype, device=device, seed=n) for n in (1, 2))
    w, norm = random(96, 96, dtype=dtype, device=device, seed=3), stream[0]
    tickets = skinny.new_tickets(device)

    def both(rows: slice) -> tuple[Tensor, Tensor]:
        added = stream[rows].clone()
        scaled, division = skinny.add_linear_of_few(
            x[rows], w, None, added, norm, 1e-5, tickets, tile=tile
        )
        return added, skinny.linear_of_few(scaled, w, None, tickets, division=division, tile=tile)

    together = both(slice(16))
    for rows in (slice(5, 6), slice(2, 11)):
        for alone, whole in zip(both(rows), together, strict=True):
            assert torch.equal(alone, whole[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 32, 64])
@pytest.mark.parametrize(
    "shape", [(4096, 4096), (6144, 4096), (4096, 14336), (11008, 4096), (1000, 520)], ids=str
)
def test_product_on_a_gpu(device: torch.device, shape: tuple[int, int], rows: int) -> None:
    check(rows, shape, None, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 5, 16, 32])
@pytest.mark.parametrize("shape", [(4096, 4096), (4096, 14336), (5120, 13824)], ids=str)
def test_norm_between_products_on_a_gpu(
    device: torch.device, shape: tuple[int, int], rows: int
) -> None:
    check_norm_between(rows, shape, None, torch.bfloat16, device)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_products_in_a_graph(device: torch.device, splits: int) -> None:
    """Two that share tickets, replayed."""
    tile = Tile(16, 64, 128, 4, 4, splits)
    x = random(16, 4096, dtype=torch.bfloat16, device=device)
    w = random(4096, 4096, dtype=torch.bfloat16, device=device, seed=2).mul_(4096**-0.5)
    tickets = skinny.new_tickets(device)

    def twice() -> Tensor:
        y = skinny.linear_of_few(x, w, None, tickets, tile=tile)
        return skinny.linear_of_few(y, w, None, tickets, tile=tile)

    expected = twice()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = twice()
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, expected)
    first = skinny.linear_of_few(x, w, None, tickets, tile=tile)
    assert_close(first, x.double() @ w.double().T, torch.bfloat16)
    assert_close(got, first.double() @ w.double().T, torch.bfloat16)


def test_rules_follow_the_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles within 2.5 % of the best; chosen up to where they lose 1 % at most to the library (2 %
    of 64 rows: what follows an added product saves its norm), or else could win 3 % at most."""
    monkeypatch.setattr(skinny, "_is_measured", lambda device: True)
    results = Path(__file__).parents[2] / "tools" / "results"
    few = json.loads((results / "skinny_h200.json").read_text())["rows"]
    for row in few + json.loads((results / "few_rows_h200.json").read_text())["rows"]:
        rows, gated, (num_outs, dim) = row["rows"], row["gated"], row["weight_shape"]
        if row["name"].startswith("gate_up") or (rows == 64 and row in few):
            continue  # without its gate it is never asked for; 64 rows have later figures
        times_us = {tuple(tile): us for us, *tile in row["tiles"] if tile[0] > 1}
        weight = torch.empty(num_outs, dim, dtype=torch.bfloat16, device="meta")
        if row.get("added"):
            most = skinny.most_rows_added(weight)
        else:
            most = skinny.most_rows(weight, gated=gated)
        if rows <= most:
            tile = skinny.tile_of(rows, num_outs // (1 + gated), weight.dtype, gated=gated)
            assert times_us[astuple(tile)] <= 1.025 * min(times_us.values()), row
            assert times_us[astuple(tile)] <= (1.02 if rows == 64 else 1.01) * row["library_us"], (
                row
            )
        else:
            assert min(times_us.values()) >= 0.97 * row["library_us"], row


@pytest.mark.parametrize("shape", [(2048, 4096), (4096, 2048)], ids=str)
def test_shapes_below_the_measured_ones_are_the_librarys(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    monkeypatch.setattr(skinny, "_is_measured", lambda device: True)
    weight = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    assert skinny.most_rows(weight) == 0
    assert skinny.most_rows(weight, gated=True) == 0


def test_a_norm_that_is_not_divided_yet_may_not_fit_float16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(skinny, "_is_measured", lambda device: True)
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert skinny.most_rows_added(weight) == 64
    assert skinny.most_rows(weight) == skinny.most_rows(weight.half()) == 32
    assert skinny.most_rows_added(weight.half()) == 0


def test_every_product_has_a_twin() -> None:
    for name in ("most_rows", "most_rows_added", "new_tickets"):
        assert (
            getattr(skinny, name).__annotations__ == getattr(reference_skinny, name).__annotations__
        )
    for name in ("linear_of_few", "gated_linear_of_few", "add_linear_of_few"):
        ours, twin = (dict(getattr(x, name).__annotations__) for x in (skinny, reference_skinny))
        assert ours.pop("tile") == "Tile | None"
        assert twin.pop("tile") == "Any"
        assert ours == twin
