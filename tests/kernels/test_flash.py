"""flash-attn: what is asked of it, which build is taken, and that results are right."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_kit import Problem, assert_close, make_problem, poisoned
from torch import Tensor

from loongd.kernels import cudnn, flash, reference, triton_backend
from loongd.kernels.attention import CudaFlashBackend, PoolSlots, Spans
from loongd.kernels.flash import FlashAttn2, FlashAttn3, find_flash_2, find_flash_3
from loongd.kernels.libraries import Cudnn
from loongd.kernels.triton_backend import TritonBackend, select_cuda_backend

FULL = torch.float32
CPU = torch.device("cpu")
Call = tuple[str, int, int, bool]
"""Of which function, queries, keys, causal."""


class Package:
    """Stands in for the package; its calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.splits: list[int] = []
        self.read: list[int] = []
        """Where keys lay."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        return_attn_probs: bool,
    ) -> tuple[Tensor, Tensor]:
        assert return_attn_probs
        self.calls.append(("packed", len(q), len(k), causal))
        assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        pairs = (x.tolist() for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:]))
        ranges = tuple(zip(*pairs, strict=True))
        out, lse = reference.extend(q, k, v, None, ranges, scale=softmax_scale, causal=causal)
        return out.to(q.dtype), lse.masked_fill(lse == -torch.inf, torch.inf).T.contiguous()

    def fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        softmax_scale: float,
        is_causal: bool,
        num_splits: int,
    ) -> tuple[Tensor, ...]:
        """The operator of version 3, of a batch or of packed spans."""
        self.splits.append(num_splits)
        self.read.append(k.untyped_storage().data_ptr())
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            lens = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
            options = {"softmax_scale": softmax_scale, "causal": is_causal}
            found = self.flash_attn_varlen_func(q, k, v, *lens, **options, return_attn_probs=True)
            return (*found, q[:0], q[:0])
        assert len(q) == len(k) == len(v) == 1
        self.calls.append(("one", q.shape[1], k.shape[1], is_causal))
        one = ((0, q.shape[1], 0, k.shape[1]),)
        out, lse = reference.extend(
            q[0], k[0], v[0], None, one, scale=softmax_scale, causal=is_causal
        )
        return (out.to(q.dtype)[None], lse.T.contiguous()[None], q[:0], q[:0])


def third(scale: float) -> tuple[FlashAttn3, Package]:
    package = Package()
    return FlashAttn3(scale, package.fwd, FULL, CPU), package


def second(scale: float) -> tuple[FlashAttn2, Package]:
    package = Package()
    return FlashAttn2(scale, package.flash_attn_varlen_func), package


def check_squares(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    *,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    p = make_problem(q_lens, k_lens, heads=heads, head_dim=head_dim, dtype=dtype, device=device)
    k, v = p.k[p.slots], p.v[p.slots]
    with poisoned():
        out, lse = attend(p.q, k, v, Spans(tuple(q_lens), tuple(k_lens), device))
    doubled = (x.double() for x in (p.q, k, v))
    expected = reference.extend(*doubled, None, p.ranges, scale=p.scale, causal=True)
    assert_close(out, expected[0], dtype)
    assert_close(lse, expected[1], dtype)


def check_over_pool(
    backend: TritonBackend, p: Problem, gap_at: int | None, dtype: torch.dtype
) -> None:
    """With `gap_at` the slots are a run but for a gap at that key; None leaves them as they are."""
    device = p.q.device
    if gap_at is not None:
        at = torch.arange(len(p.slots), device=device)
        at[gap_at:] += 1
        k, v = p.k[p.slots], p.v[p.slots]
        for pool, rows in ((p.k, k), (p.v, v)):
            pool.fill_(torch.nan)
            pool[at] = rows
        p.slots = at
    host = p.slots.cpu().numpy().astype(np.int64)
    slots = PoolSlots(tuple(host[k0:k1] for _, _, k0, k1 in p.ranges), device)
    lens = ((q1 - q0, k1 - k0) for q0, q1, k0, k1 in p.ranges)
    q_lens, k_lens = zip(*lens, strict=True)
    with poisoned():
        out, lse = backend.over_pool(p.q, p.k, p.v, slots, Spans(q_lens, k_lens, device))
    doubled = (x.double() for x in (p.q, p.k, p.v))
    expected = reference.extend(*doubled, p.slots, p.ranges, scale=p.scale)
    assert_close(out, expected[0], dtype)
    assert_close(lse, expected[1], dtype)


SQUARES: list[tuple[tuple[int, ...], tuple[int, ...], str | None]] = [
    ((70,), (70,), "one"),
    ((5, 1, 64), (5, 1, 64), "packed"),
    ((1, 70, 0, 1, 1, 5, 0), (0, 70, 1, 0, 0, 5, 2), "packed"),
    ((1, 0, 3), (0, 9, 3), "packed"),
    ((0, 0), (3, 2), None),
    ((1,), (0,), None),
    ((1, 1), (0, 0), None),
]


@pytest.mark.parametrize("version", [second, third])
@pytest.mark.parametrize(("q_lens", "k_lens", "function"), SQUARES, ids=str)
def test_squares(
    version: Callable[[float], tuple[FlashAttn2 | FlashAttn3, Package]],
    q_lens: tuple[int, ...],
    k_lens: tuple[int, ...],
    function: str | None,
) -> None:
    """One launch; where a query has no key the output is 0 and its log-sum-exp -inf."""
    library, package = version(64**-0.5)
    backend = TritonBackend(library.scale, library)
    check_squares(
        backend.square_causal, q_lens, k_lens, heads=(6, 2), head_dim=64, dtype=FULL, device=CPU
    )
    if version is second and function == "one":
        function = "packed"
    assert set(package.splits) <= {1}
    expected = [(function, sum(q_lens), sum(k_lens), True)] if function else []
    assert package.calls == expected


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is worth a call is small, and so is what is copied at a time."""
    monkeypatch.setattr(flash, "LEAST_SCORES", 20 * 60 * 6)
    monkeypatch.setattr(flash, "LEAST_COPIED_ROWS", 90)
    monkeypatch.setattr(flash, "MOST_KEYS", 128)
    monkeypatch.setattr(triton_backend, "MAX_DECODE_ROWS", 16)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("gap_at", [None, 0, 300])
def test_over_pool(device: torch.device, gap_at: int | None) -> None:
    """Keys in one run are read where they lie, others copied if there are queries enough; what is
    not worth a call is left to own kernels."""
    q_lens, k_lens = (29, 30, 2, 20, 19, 4), (60, 330, 500, 60, 60, 0)
    p = make_problem(q_lens, k_lens, heads=(6, 2), head_dim=64, dtype=FULL, device=device)
    library, package = third(p.scale)
    check_over_pool(TritonBackend(p.scale, library, library), p, gap_at, FULL)
    short, long = [("one", 29, 60, False)], [("one", 30, 330, False)]
    in_parts = [("one", 30, keys, False) for keys in (128, 128, 74)]
    last = [("one", 20, 60, False)]
    expected = {None: in_parts, 0: [*short, *long, *last], 300: [*short, *in_parts, *last]}
    assert package.calls == expected[gap_at]
    assert set(package.splits) == {0}
    pool = p.k.untyped_storage().data_ptr()
    in_place = {None: [False] * 3, 0: [True] * 3, 300: [True, True, False, True, True]}
    # the piece that has the gap is copied, those beside it are not
    assert [at == pool for at in package.read] == in_place[gap_at]


@pytest.mark.usefixtures("small")
def test_few_rows_are_for_own_kernels(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many keys they see; each size of rows in a launch of its own."""
    launched: list[tuple[triton_backend.Range, ...]] = []
    extend = triton_backend.extend

    def counting(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        launched.append(args[4])
        return extend(*args, **options)

    monkeypatch.setattr(triton_backend, "extend", counting)
    monkeypatch.setattr(flash, "LEAST_SCORES", 4000)
    p = make_problem(
        (40, 5, 16, 17), (60, 400, 400, 3), heads=(3, 3), head_dim=64, dtype=FULL, device=device
    )
    library, package = third(p.scale)
    check_over_pool(TritonBackend(p.scale, library, library), p, 0, FULL)
    assert package.calls == [("one", 40, 60, False)]
    few, many = ((40, 45, 60, 460), (45, 61, 460, 860)), ((61, 78, 860, 863),)
    assert launched == [few, many]


def test_few_queries_are_cut_along_the_keys() -> None:
    """More have no float32 outputs for each split."""
    library, package = third(1.0)
    k = torch.zeros(3, 2, 4)
    for num_q in (1, 2047, 2048, 5000):
        library.attention(torch.zeros(num_q, 8, 4), k, k, causal=False)
    assert package.splits == [0, 0, 1, 1]


def _yes() -> bool:
    return True


def _no() -> bool:
    return False


def _unasked() -> bool:
    raise AssertionError("asked")


def test_what_is_worth_a_call() -> None:
    library, _ = third(1.0)
    grouped, plain = (32, 8), (32, 32)
    for heads, least in ((grouped, 192), (plain, 768)):
        for num_q in (1, least - 1, least, 5000):
            assert (library.cut(num_q, 100_000, heads, _no) is None) == (num_q < least)
        assert library.cut(64, 8192, heads, _yes) is not None
        # whether they are a run is not asked of what is not worth it
        assert library.cut(64, 8191, heads, _unasked) is None
        assert library.cut(5000, 0, heads, _unasked) is None
    whole = library.cut(500, 200_000, grouped, _yes)
    parts = library.cut(500, 200_000, grouped, _no)
    assert library.cut(512, 200_000, grouped, _yes) == library.cut(512, 200_000, grouped, _no)
    even = library.cut(1000, 131_072, grouped, _no)
    assert even is not None
    assert even.keys == (65536, 65536)
    assert whole is not None
    assert parts is not None
    assert whole.queries == parts.queries == (500,)
    assert whole.keys == (200_000,)
    assert parts.keys == (65536, 65536, 65536, 3392)


@pytest.mark.usefixtures("small")
def test_a_rehearsal_calls_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """... but has results of the same sizes and strides."""
    merged: list[tuple[Any, ...]] = []

    def noting(*states: Tensor) -> None:
        merged.append(tuple((x.shape, x.stride(), x.dtype) for x in states))

    monkeypatch.setattr(triton_backend, "merge_state_", noting)
    half = torch.float16
    p = make_problem((40,), (300,), heads=(6, 2), head_dim=64, dtype=half, device=CPU)
    slots = PoolSlots((p.slots.numpy().astype(np.int64),), CPU)
    library, package = third(p.scale)
    backend = TritonBackend(p.scale, library, library)
    squares = []
    for one in (backend, backend.rehearsing()):
        one.over_pool(p.q, p.k, p.v, slots, Spans((40,), (300,), CPU))
        out, lse = one.square_causal(p.q, p.k[:40], p.v[:40], Spans((40,), (40,), CPU))
        squares.append((out.shape, out.stride(), out.dtype, lse.shape, lse.stride(), lse.dtype))
    assert len(package.calls) == 4
    assert len(merged) == 4
    assert merged[:2] == merged[2:]
    assert squares[0] == squares[1]
    old, _ = second(p.scale)
    for lens in ((40,), (31, 9), (40, 0)):
        for one in (old, old.rehearsing(), library, library.rehearsing()):
            out, lse = one.square_causal(p.q, p.k[:40], p.v[:40], Spans(lens, lens, CPU))
            assert (out.stride(), lse.stride()) == (squares[0][1], squares[0][4])
            assert (out.dtype, lse.dtype) == (half, FULL)
    num_calls = len(package.calls)
    library.rehearsing().square_causal(p.q, p.k[:40], p.v[:40], Spans((31, 9), (31, 9), CPU))
    library.rehearsing().attention(p.q, p.k, p.v, causal=False)
    assert len(package.calls) == num_calls


def test_any_length_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is planned; parts are merged once, as those of copied keys will be."""
    merged: list[tuple[torch.dtype, ...]] = []

    def noting(*states: Tensor) -> None:
        merged.append(tuple(x.dtype for x in states))
        assert states[0].shape == states[2].shape == (1, 8, 64)
        assert states[1].shape == states[3].shape == (1, 8)

    monkeypatch.setattr(flash, "merge_state_", noting)
    library, package = third(1.0)
    planned = TritonBackend(1.0, replace(library, dtype=torch.bfloat16)).planned
    assert planned is not None
    assert list(planned.ahead(8, 2, 64)) == []
    assert merged == [(FULL, FULL, torch.bfloat16, FULL)]
    assert package.calls == []
    assert planned.spare(1100) == planned.spare(64) == 0
    assert [planned.is_one_call(n) for n in (16, 128, 255, 256, 1000, 1100)] == [
        *(False, False, False, True, True, True)
    ]
    assert TritonBackend(1.0, second(1.0)[0]).planned is None


# ---- which one is taken -----------------------------------------------------------------------


@dataclass(frozen=True)
class Installed:
    """A package in site-packages: what its operator or its function does."""

    name: str
    fwd: Callable[..., Any] | None = None
    varlen: Callable[..., Any] | None = None
    has_no_operator: bool = False


def _install(monkeypatch: pytest.MonkeyPatch, *packages: Installed, capability: int = 9) -> None:
    """These, and no other."""
    for name in ("flash_attn_3", "fa3_fwd", "flash_attn"):
        for module in (name, f"{name}._C"):
            monkeypatch.setitem(sys.modules, module, None)
        monkeypatch.delattr(torch.ops, name, raising=False)
    monkeypatch.setattr(flash, "find_spec", sys.modules.get)
    for package in packages:
        module = ModuleType(package.name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, package.name, module)
        if package.varlen is not None:
            monkeypatch.setattr(module, "flash_attn_varlen_func", package.varlen, raising=False)
        if package.fwd is not None or package.has_no_operator:
            monkeypatch.setitem(sys.modules, f"{package.name}._C", ModuleType("_C"))
            has = {} if package.has_no_operator else {"fwd": package.fwd}
            operators = SimpleNamespace(**has)
            monkeypatch.setattr(torch.ops, package.name, operators, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (capability, 0))


ARGS = (CPU, torch.bfloat16, 64, 0.125)


def _raises(error: Exception) -> Callable[..., Any]:
    def fwd(*_: Any, **__: Any) -> None:
        raise error

    return fwd


def _fails(*_: Any, **__: Any) -> None:
    raise RuntimeError("This flash attention build does not support it.")


def _fails_if(option: str, value: object = None) -> Callable[..., Any]:
    """An operator that does all but this."""
    package = Package()

    def fwd(*args: Any, **options: Any) -> tuple[Tensor, ...]:
        if option in options and value in (None, options[option]):
            _fails()
        return package.fwd(*args, **options)

    return fwd


@pytest.mark.parametrize("name", ["flash_attn_3", "fa3_fwd"])
def test_version_3_is_tried_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    package = Package()
    _install(monkeypatch, Installed(name, fwd=package.fwd))
    found = find_flash_3(*ARGS)
    assert found is not None
    assert found.name == "flash-attn-3"
    assert (found.scale, found.dtype, found.device) == (0.125, torch.bfloat16, CPU)
    assert package.calls == [
        *(("one", 64, 64, True), ("packed", 64, 64, True), ("one", 9, 64, False))
    ]
    for capability in (8, 10, 12):
        _install(monkeypatch, Installed(name, fwd=package.fwd), capability=capability)
        assert find_flash_3(*ARGS) is None
    assert find_flash_2(*ARGS) is None


@pytest.mark.parametrize(
    "broken",
    [
        Installed("flash_attn_3"),
        Installed("flash_attn_3", fwd=_fails),
        Installed("flash_attn_3", fwd=lambda q, k, v: (q, k, v)),
        Installed("flash_attn_3", fwd=_fails_if("cu_seqlens_q")),
        Installed("flash_attn_3", fwd=_fails_if("is_causal", False)),
        Installed("flash_attn_3", fwd=_raises(OSError("libcudart.so.12: cannot open"))),
        Installed("flash_attn_3", has_no_operator=True),
    ],
    ids=[
        "empty",
        "without this type",
        "another interface",
        "squares of one span alone",
        "squares alone",
        "another CUDA",
        "no operator",
    ],
)
def test_a_build_that_does_not_work_is_told_and_passed_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: Installed
) -> None:
    package = Package()
    _install(monkeypatch, broken, Installed("fa3_fwd", fwd=package.fwd))
    with caplog.at_level(logging.WARNING):
        found = find_flash_3(*ARGS)
    assert found is not None
    assert found.fwd == package.fwd
    assert "flash_attn_3 is installed, but does not work here" in caplog.text
    _install(monkeypatch, broken)
    assert find_flash_3(*ARGS) is None


def test_an_operator_is_there_once_its_extension_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _install(monkeypatch, Installed("fa3_fwd", fwd=Package().fwd))
    monkeypatch.setitem(sys.modules, "fa3_fwd._C", None)
    assert find_flash_3(*ARGS) is None


def test_what_is_not_installed_is_not_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _install(monkeypatch)
    with caplog.at_level(logging.DEBUG):
        assert find_flash_3(*ARGS) is None
        assert find_flash_2(*ARGS) is None
    assert not caplog.records


@pytest.mark.parametrize("find", [find_flash_2, find_flash_3])
def test_it_is_tried_with_what_is_served(
    monkeypatch: pytest.MonkeyPatch, find: Callable[..., object]
) -> None:
    """Grouped heads too."""
    seen: list[tuple[object, ...]] = []

    def tried(q: Tensor, k: Tensor, v: Tensor, *_: object, **__: object) -> None:
        assert q.shape[-2] == 2 * k.shape[-2] == 2 * v.shape[-2]
        seen.extend((x.shape[-1], x.dtype, x.device) for x in (q, k, v))
        _fails()

    packages = Installed("fa3_fwd", fwd=tried), Installed("flash_attn", varlen=tried)
    _install(monkeypatch, *packages)
    meta = torch.device("meta")
    assert find(meta, torch.float16, 96, 1.0) is None
    assert seen == [(96, torch.float16, meta)] * 3


def test_the_fastest_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 3, cuDNN, flash-attn 2, and before Hopper torch's own; none in float32."""
    package = Package()
    packages = (
        Installed("fa3_fwd", fwd=package.fwd),
        Installed("flash_attn", varlen=package.flash_attn_varlen_func),
    )
    works = {"cudnn": True}
    monkeypatch.setattr(cudnn, "is_available", lambda *_: works["cudnn"])

    def chosen(*installed: Installed, capability: int = 9) -> str:
        _install(monkeypatch, *installed, capability=capability)
        backend = select_cuda_backend(*ARGS)
        square, pieces = backend._square, backend._pieces
        assert pieces is (square if isinstance(square, FlashAttn3 | Cudnn) else None)
        if isinstance(square, CudaFlashBackend):
            assert square._scale == 0.125
        elif square is not None:
            assert square.scale == 0.125
        if isinstance(square, Cudnn):
            assert square.dtype == torch.bfloat16
        return backend.name

    assert chosen(*packages) == "triton+flash-attn-3"
    assert chosen(packages[1]) == "triton+cudnn"
    assert select_cuda_backend(CPU, FULL, 64, 0.125).name == "triton"
    works["cudnn"] = False
    assert chosen(*packages, capability=8) == "triton+flash-attn"
    assert chosen(capability=8) == f"triton+{CudaFlashBackend.name}"
    assert chosen() == "triton"


# ---- on a GPU ---------------------------------------------------------------------------------


def _real(dtype: torch.dtype, head_dim: int) -> FlashAttn3:
    found = find_flash_3(torch.device("cuda"), dtype, head_dim, head_dim**-0.5)
    if found is None:
        pytest.skip("no flash-attn 3 for this here")
    return found


MODELS = [((32, 8), 128), ((8, 8), 128), ((9, 3), 64), ((28, 4), 96), ((8, 4), 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), MODELS, ids=str)
def test_real_squares(
    device: torch.device, heads: tuple[int, int], head_dim: int, dtype: torch.dtype
) -> None:
    backend = TritonBackend(head_dim**-0.5, _real(dtype, head_dim))
    ring = ((1, 700, 0, 1, 5, 0), (0, 700, 1, 0, 5, 2))
    for q_lens, k_lens in (((5003,),) * 2, ((64, 1, 0, 1300),) * 2, ring, ((1, 1), (0, 0))):
        check_squares(
            backend.square_causal,
            q_lens,
            k_lens,
            heads=heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("gap_at", [None, 0, 5010])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), MODELS, ids=str)
def test_real_pieces(
    device: torch.device,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    gap_at: int | None,
) -> None:
    library = _real(dtype, head_dim)
    q_lens, k_lens = (700, 1, 90, 2000, 65, 900), (5003, 40, 7000, 2100, 70_001, 100)
    p = make_problem(q_lens, k_lens, heads=heads, head_dim=head_dim, dtype=dtype, device=device)
    check_over_pool(TritonBackend(p.scale, library, library), p, gap_at, dtype)


@pytest.mark.gpu
def test_a_real_square_in_a_graph(device: torch.device) -> None:
    """Captured once, right for other inputs, and the same as by launches."""
    library = _real(torch.bfloat16, 128)
    q, k, v = (torch.zeros(512, n, 128, dtype=torch.bfloat16, device=device) for n in (32, 8, 8))
    spans = Spans((512,), (512,), device)
    library.square_causal(q, k, v, spans)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = library.square_causal(q, k, v, spans)
    for _ in range(2):
        for x in (q, k, v):
            x.normal_()
        for x in (out, lse):
            x.fill_(torch.nan)
        graph.replay()
        launched = library.square_causal(q, k, v, spans)
        assert torch.equal(out, launched[0])
        assert torch.equal(lse, launched[1])


@pytest.mark.gpu
def test_cudnn_beside_it(device: torch.device) -> None:
    """The other library, where this one is chosen."""
    if not cudnn.is_available(device, torch.bfloat16, 128):
        pytest.skip("no cuDNN")
    library = Cudnn(128**-0.5)
    backend = TritonBackend(library.scale, library, library)
    for gap_at in (None, 0):
        p = make_problem(
            (700, 1, 2000, 400),
            (5003, 40, 2100, 4096),
            heads=(8, 2),
            head_dim=128,
            dtype=torch.bfloat16,
            device=device,
        )
        check_over_pool(backend, p, gap_at, torch.bfloat16)
    for lens in ((5003,), (1024, 2300, 5)):
        check_squares(
            backend.square_causal,
            lens,
            lens,
            heads=(8, 2),
            head_dim=128,
            dtype=torch.bfloat16,
            device=device,
        )
