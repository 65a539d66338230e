"""cuDNN's attention through torch: one span, any numbers of queries and keys, with log-sum-exp.

Knows: what it costs. The fastest there is on Hopper (600 to 690 TFLOP/s), but every new pair of
lengths takes 45 to 80 ms to plan (the first of a kind 1 s), once a thread; so lengths are rounded
down to at most 32 sizes an octave, and the caller does the rest another way. Above `_EXACT` the
plan is small beside the work. torch's variable-length form replans at every call (58 ms): unusable.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_SQUARE = 1024
LEAST_SQUARE_OF_MANY = 2048
"""Tokens from which a causal square is faster here than in Triton: alone (1K: 35 us against 58),
and beside others, which Triton does in one launch (8 x 1K: 361 us here against 310)."""
LEAST_QUERIES = 512
LEAST_KEYS = 2048
"""Queries and keys from which attention over the pool is faster here, gathering included."""
_EXACT = 32768
_STEP = 128


def is_available(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether this GPU, torch and cuDNN really do it: tries it once, small."""
    if dtype not in (torch.float16, torch.bfloat16) or head_dim > 128 or head_dim % 8:
        return False
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    x = torch.zeros(64, 1, head_dim, dtype=dtype, device=device)
    try:
        attention(x, x, x, scale=1.0, causal=True)
    except RuntimeError:
        return False
    return True


def aligned(length: int, least: int) -> int:
    """The longest planned length that is not above `length`; 0 below `least`."""
    if length < least:
        return 0
    if length >= _EXACT:
        return length
    step = max(_STEP, (1 << (length.bit_length() - 1)) // 32)
    return length - length % step


def attention(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, *, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of one span: out_TNH in the type of q and lse_TN float32, both views.

    Causal needs as many keys as queries.
    """
    out_1NTH, lse_1NT1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_TNH.transpose(0, 1)[None],
        k_TKH.transpose(0, 1)[None],
        v_TKH.transpose(0, 1)[None],
        None,
        True,
        0.0,
        causal,
        False,
        scale=scale,
    )
    return out_1NTH[0].transpose(0, 1), lse_1NT1[0, :, :, 0].transpose(0, 1)
