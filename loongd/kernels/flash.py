"""The flash-attn package, when it can be imported: attention of squares and of pieces of any size.

Knows: its modules and interfaces, and what is worth a call. Does not know: slots.

Version 3 is the fastest there is on Hopper, and plans nothing: on an H200 squares take 0.76 to 0.9
of cuDNN's time, packed short ones 0.56 to 0.71 of an own kernel's (ARCHITECTURE, decision 65). PyPI
has no wheel of its authors; `fa3-fwd` is a build of its forward half for bfloat16. It is called by
its operator: its Python functions are made for training, and their first call imports torch's
compiler (5 s).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TypeVar

import torch
from torch import Tensor

from loongd.kernels.attention import Planned, Spans
from loongd.kernels.gpu.merge import merge_state_
from loongd.kernels.libraries import Cut, state_by_head

_log = logging.getLogger(__name__)

LEAST_SCORES = 16 << 20
"""Scores of a span over the pool (queries x keys x heads) from which flash-attn 3 saves more (up to
a third of an own kernel's time) than a launch of its own costs beside other spans."""
LEAST_COPIED_ROWS = 768
"""Rows (queries x heads of a group) from which it saves more than it costs to copy keys that do not
lie in one run (H200, 4 heads of a group over 32K: 256 queries take 285 us instead of 331; without
a copy 229, and 64 queries 66 instead of 98)."""
MOST_KEYS = 65536
"""Keys of a call, if it is not for few rows: those of a head with their values, 33 MB, stay in the
L2 (4,096 queries over 128K at once: 14.3 ms; in two pieces 13.4, a copy included). So many are
copied at a time, too."""
_LEAST_CAPTURED = 256
"""Tokens of a lone prompt from which a graph of its own is worth it: 14 us a layer instead of 32
for 512, 10.5 instead of 19 for 256, but 8.4 instead of 10 for 128."""
_LEAST_FULL_ROWS = 128 * 128
"""Rows (queries x heads) that fill the device by themselves. Fewer are cut along the keys, into as
many splits as it likes, or few queries take six times as long; more are not, since each split has a
float32 output of its own in memory that nobody has reckoned with."""
_THIRD = ("flash_attn_3", "fa3_fwd")
"""Packages of version 3, and the namespaces of their operators: as its authors build it, and as the
wheel `fa3-fwd` has it."""
_SECOND = ("flash_attn",)


@dataclass(frozen=True, slots=True)
class FlashAttn2:
    """flash-attn before Hopper: squares. `varlen` is its `flash_attn_varlen_func`."""

    scale: float
    varlen: Callable[..., tuple[Tensor, ...]]
    rehearses: bool = False

    @property
    def name(self) -> str:
        return "flash-attn"

    @property
    def planned(self) -> None:
        return None

    def rehearsing(self) -> FlashAttn2:
        return replace(self, rehearses=True)

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        if self.rehearses:
            return state_by_head(q_TNH)
        return _packed_squares(self._packed, (q_TNH, k_TKH, v_TKH), spans)

    def _packed(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, ...]:
        return self.varlen(
            q_TNH,
            k_TKH,
            v_TKH,
            spans.cu_q,
            spans.cu_k,
            max(spans.q_lens),
            max(spans.k_lens),
            softmax_scale=self.scale,
            causal=True,
            return_attn_probs=True,
        )


@dataclass(frozen=True, slots=True)
class FlashAttn3:
    """flash-attn on Hopper: squares, and pieces of any size. `fwd` is its operator."""

    scale: float
    fwd: Callable[..., tuple[Tensor, ...]]
    dtype: torch.dtype
    device: torch.device
    rehearses: bool = False

    @property
    def name(self) -> str:
        return "flash-attn-3"

    @property
    def planned(self) -> Planned:
        return AnyLength(self.dtype, self.device)

    def rehearsing(self) -> FlashAttn3:
        return replace(self, rehearses=True)

    def attention(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        if self.rehearses:
            return state_by_head(q_TNH)
        few = not causal and q_TNH.shape[0] * q_TNH.shape[1] < _LEAST_FULL_ROWS
        out_1TNH, lse_1NT, *_ = self.fwd(
            q_TNH[None],
            k_TKH[None],
            v_TKH[None],
            softmax_scale=self.scale,
            is_causal=causal,
            num_splits=0 if few else 1,
        )
        return out_1TNH[0], lse_1NT[0].transpose(0, 1)

    def square_causal(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, Tensor]:
        if self.rehearses:
            return state_by_head(q_TNH)
        if len(spans.ranges) == 1 and 0 < spans.q_lens[0] == spans.k_lens[0]:
            return self.attention(q_TNH, k_TKH, v_TKH, causal=True)
        return _packed_squares(self._packed, (q_TNH, k_TKH, v_TKH), spans)

    def _packed(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, spans: Spans
    ) -> tuple[Tensor, ...]:
        return self.fwd(
            q_TNH,
            k_TKH,
            v_TKH,
            cu_seqlens_q=spans.cu_q,
            cu_seqlens_k=spans.cu_k,
            max_seqlen_q=max(spans.q_lens),
            max_seqlen_k=max(spans.k_lens),
            softmax_scale=self.scale,
            is_causal=True,
            num_splits=1,
        )

    def cut(
        self, num_q: int, num_k: int, heads: tuple[int, int], in_run: Callable[[], bool]
    ) -> Cut | None:
        num_heads, num_kv_heads = heads
        if num_q * num_k * num_heads < LEAST_SCORES:
            return None
        if in_run():
            if num_q * num_heads < _LEAST_FULL_ROWS:
                return Cut((num_q,), (num_k,))
        elif num_q * (num_heads // num_kv_heads) < LEAST_COPIED_ROWS:
            return None
        whole, rest = divmod(num_k, MOST_KEYS)
        return Cut((num_q,), (MOST_KEYS,) * whole + (rest,) * (rest > 0))


@dataclass(frozen=True, slots=True)
class AnyLength:
    """A library that plans nothing, so that any length is one call."""

    dtype: torch.dtype
    device: torch.device

    def ahead(self, num_heads: int, num_kv_heads: int, head_dim: int) -> Iterable[float]:
        """Merge a part once, as more copied keys than a start has would be."""
        del num_kv_heads
        q_1NH = torch.zeros(1, num_heads, head_dim, dtype=self.dtype, device=self.device)
        lse_1N = torch.zeros(1, num_heads, device=self.device)
        merge_state_(q_1NH.float(), lse_1N, *state_by_head(q_1NH))
        return ()

    def spare(self, num_tokens: int) -> int:
        del num_tokens
        return 0

    def is_one_call(self, num_tokens: int) -> bool:
        return num_tokens >= _LEAST_CAPTURED


def find_flash_3(
    device: torch.device, dtype: torch.dtype, head_dim: int, scale: float
) -> FlashAttn3 | None:
    """Version 3, if it is there and works for this device, type and head size: builds differ in
    what they leave out, so all that will be asked of it is tried once."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        return None

    def load(package: str) -> FlashAttn3:
        import_module(f"{package}._C")
        return FlashAttn3(scale, getattr(torch.ops, package).fwd, dtype, device)

    def attempt(found: FlashAttn3, q: Tensor, k: Tensor) -> None:
        _squares(found, q, k)
        found.attention(q[:9], k, k, causal=False)

    return _first_that_works(_THIRD, load, attempt, *_small(head_dim, dtype, device))


def find_flash_2(
    device: torch.device, dtype: torch.dtype, head_dim: int, scale: float
) -> FlashAttn2 | None:
    """The same of version 2."""

    def load(package: str) -> FlashAttn2:
        return FlashAttn2(scale, import_module(package).flash_attn_varlen_func)

    return _first_that_works(_SECOND, load, _squares, *_small(head_dim, dtype, device))


def _small(head_dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Queries, and half as many heads of keys."""
    q_TNH = torch.zeros(64, 2, head_dim, dtype=dtype, device=device)
    return q_TNH, q_TNH[:, :1].contiguous()


def _squares(found: FlashAttn2 | FlashAttn3, q: Tensor, k: Tensor) -> None:
    for lens in ((64,), (40, 24)):
        found.square_causal(q, k, k, Spans(lens, lens, q.device))


_Flash = TypeVar("_Flash", FlashAttn2, FlashAttn3)


def _first_that_works(
    packages: Sequence[str],
    load: Callable[[str], _Flash],
    attempt: Callable[[_Flash, Tensor, Tensor], None],
    q: Tensor,
    k: Tensor,
) -> _Flash | None:
    """Of the packages that are installed."""
    for package in packages:
        if find_spec(package) is None:
            continue
        try:
            found = load(package)
            attempt(found, q, k)
            if q.device.type == "cuda":
                torch.cuda.synchronize(q.device)
        except (ImportError, AttributeError, OSError, RuntimeError, TypeError) as error:
            _log.warning("%s is installed, but does not work here: %s", package, error)
            continue
        return found
    return None


def _packed_squares(
    packed: Callable[[Tensor, Tensor, Tensor, Spans], tuple[Tensor, ...]],
    qkv: tuple[Tensor, Tensor, Tensor],
    spans: Spans,
) -> tuple[Tensor, Tensor]:
    """As `Square.square_causal`, by one launch for all spans, which needs a key."""
    if not any(spans.q_lens) or not any(spans.k_lens):
        out_TNH, lse_TN = state_by_head(qkv[0])
        return out_TNH.zero_(), lse_TN.fill_(-torch.inf)
    out_TNH, lse_NT, *_ = packed(*qkv, spans)
    lse_TN = lse_NT.transpose(0, 1)
    if not all(spans.k_lens):  # some versions mark a query without keys by +inf
        lse_TN.masked_fill_(lse_TN == torch.inf, -torch.inf)
    return out_TNH, lse_TN
