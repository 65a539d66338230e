"""Compile every launch of the kernels' wrappers for sm_80 and sm_90, without a GPU.

Runs the wrappers on small CPU tensors with `JITFunction.run` replaced by one that compiles what
it would have launched, specialised as at run time. One JSON line a distinct binary on stdout.
Run in a process of its own: the interpreter must be off.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from loongd.kernels.fresh import Fresh
from loongd.kernels.gpu import (
    attend,
    draw,
    elementwise,
    merge,
    plan,
    pool,
    sampling,
    signal,
    skinny,
)

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
ARCHS = [80, 90]
_ACCESS = re.compile(r"(?:ld|st|atom|red|cp)[.](?:global|async)\S*")
"""Instructions that see or change what other kernels do."""
_seen: set[str] = set()


def _describe(name: str, value: Any, is_constexpr: bool) -> tuple[str, bool]:
    """(type, divisible by 16) of an argument, as the launcher specialises it."""
    if is_constexpr or value is None or (isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype], True
    if isinstance(value, int):
        return "i32", value % 16 == 0
    return "fp32", False


def _compile(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    del grid, warmup
    options = {
        key: kwargs.pop(key) for key in ("num_warps", "num_stages", "maxnreg") if key in kwargs
    }
    values = dict(zip(self.arg_names, args, strict=False)) | kwargs
    for arch in ARCHS:
        signature, constexprs, attrs = {}, {}, {}
        if "EARLY" in values:
            values["EARLY"] = arch >= 90
        for i, param in enumerate(self.params):
            value = values[param.name]
            kind, divisible = _describe(param.name, value, param.is_constexpr)
            if param.do_not_specialize:
                kind, divisible = "i32", False
            signature[param.name] = kind
            if kind == "constexpr":
                constexprs[(i,)] = value
            if divisible:
                attrs[(i,)] = [["tt.divisibility", 16]]
        key = f"{self.__name__} {arch} {signature} {constexprs} {attrs} {options}"
        if key in _seen:
            continue
        _seen.add(key)
        source = ASTSource(self, signature, constexprs, attrs)
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        text = built.asm["ptx"]
        result = {
            "kernel": self.__name__,
            "arch": arch,
            "shared": built.metadata.shared,
            "async_copies": text.count("cp.async.cg"),
            "wgmma": "wgmma" in text,
            "waits": "griddepcontrol.wait" in text,
            "ahead_of_wait": _ACCESS.findall(text.partition("griddepcontrol.wait")[0]),
            "types": sorted({kind for kind in signature.values() if kind.startswith("*")}),
            "constants": {str(self.arg_names[i]): v for (i,), v in constexprs.items()},
        }
        sys.stdout.write(json.dumps(result, default=str) + "\n")


def _attention(dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int) -> None:
    q = torch.zeros(600, heads, head_dim, dtype=dtype)
    k = torch.zeros(256, kv_heads, head_dim, dtype=dtype)
    slots = torch.zeros(256, dtype=torch.int64)
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    attend.split_kv(q[:2], k, k, slots, None, cu, scale=1.0)
    attend.split_kv(q[:2], k, k, slots.int(), None, cu[:2], k_ends=cu[1:], scale=1.0)
    fresh = Fresh(k[:2], k[:2], q[:2, 0], q[:2, 0], slots.int()[:2])
    attend.split_kv(q[:2], k, k, slots.int(), None, cu[:2], k_ends=cu[1:], scale=1.0, fresh=fresh)
    cu_q = torch.tensor([0, 16, 32], dtype=torch.int32)
    most = attend.MAX_DECODE_ROWS // (heads // kv_heads)
    attend.split_kv(q[:32], k, k, slots, cu_q, cu, scale=1.0, max_q=most)
    attend.extend(q, k, k, slots, ((0, 300, 0, 256),), scale=1.0)
    if dtype == torch.bfloat16:  # other types need no more shared memory than above
        tiling = plan.extend_tiling(q.device, dtype, head_dim, len(q) * heads // kv_heads)
        lists = torch.zeros(8, 5, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
        state = torch.zeros_like(q), torch.zeros(q.shape[:2])
        attend.extend_planned(q, k, k, slots.int(), *lists, scale=1.0, tiling=tiling, out=state)
        attend.extend_planned(
            q, k, k, slots.int(), *lists, scale=1.0, tiling=tiling, out=state, causal=False
        )
        tiling = plan.extend_tiling(
            q.device, dtype, head_dim, len(q) * heads // kv_heads, has_slots=False
        )
        attend.extend_planned(q, k, k, None, *lists, scale=1.0, tiling=tiling, out=state)
    for num_q in (4, most, 100, 600):
        ranges = ((0, num_q, 0, 256),)
        attend.extend(q, k, k, None, ranges, scale=1.0, causal=True, out=(q, q[..., 0].float()))


def _small(dtype: torch.dtype) -> None:
    x = torch.zeros(3, 4096, dtype=dtype)
    elementwise.rms_norm(x, x[0], 1e-5)
    elementwise.add_rms_norm(x, x.clone(), x[0], 1e-5)
    elementwise.silu_mul(x[:, :2048], x[:, 2048:])
    q, k = x.view(3, 32, 128), x[:, :1024].view(3, 8, 128)
    angles = torch.zeros(3, 128, dtype=dtype)
    slots = torch.zeros(3, dtype=torch.int64)
    for positions in (slots, slots.int()):
        elementwise.rotary_angles(positions, torch.zeros(64), 1.0, dtype)
    pool.next_tokens(slots, *[slots.int()] * 5, slots)
    pool.apply_rotary(q, k, angles, angles)
    pool.rope_store_kv(q, k, k, angles, angles, slots, k, k)
    pool.store_kv(k, k, slots, k, k)
    pool.store_kv(k, k, slots, k, k, rows_R=slots)
    state = torch.zeros(3, 32, 128), torch.zeros(3, 32)
    merge.merge_state_(*state, q, state[1])
    sampling.best_tokens(torch.zeros(3, 32000))
    if dtype != torch.float16:  # as bf16 does, and compiling takes seconds
        numbers = torch.zeros(5, 4, dtype=torch.float64)
        for filtered in (False, True):
            draw.draw_tokens(torch.zeros(4, 128256, dtype=dtype), *numbers, filtered=filtered)
    flag = torch.zeros(1, dtype=torch.int32)
    signal.push_rows(q, torch.zeros_like(q), flag)
    signal.raise_flag(flag)
    signal.await_flag(flag, signal.push_counts(q.numel()))


def _products(dtype: torch.dtype) -> None:
    x = torch.zeros(64, 4096, dtype=dtype)
    narrow = torch.zeros(4096, 4096, dtype=dtype)
    wide = torch.zeros(32000, 4096, dtype=dtype)
    tickets = skinny.new_tickets(x.device)
    for rows, weight in ((16, narrow), (32, narrow), (64, wide)):
        skinny.linear_of_few(x[:rows], weight, None, tickets)
        skinny.gated_linear_of_few(x[:rows], narrow, None)
    if dtype != torch.bfloat16:
        return
    for few in (x[:16], x[:32]):
        stream = (few.clone(), x[0], 1e-5)
        times_norm, division = skinny.add_linear_of_few(few, narrow, None, *stream, tickets)
        skinny.linear_of_few(times_norm, narrow, None, tickets, division=division)
        skinny.gated_linear_of_few(times_norm, narrow, None, division=division)


def main(cases: list[str]) -> None:
    """Each case is `dtype:head_dim:heads:kv_heads`, or `dtype` for the small kernels; with
    `@80` behind it for that architecture alone, the one with the least shared memory."""
    JITFunction.run = _compile  # type: ignore[method-assign]
    for text in cases:
        case, _, arch = text.partition("@")
        ARCHS[:] = [int(arch)] if arch else [80, 90]
        name, *sizes = case.split(":")
        dtype: torch.dtype = getattr(torch, name)
        if sizes:
            _attention(dtype, *map(int, sizes))
        else:
            _small(dtype)
            _products(dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
