"""New tokens of a decode step whose keys attention itself rotates and stores.

Knows: the tensors. Does not know: layers, requests, which program does it.

Letters: T new tokens, one a span; K kv heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fresh:
    """`k`, `v` (T, K, H), `cos`, `sin` (T, H) as for `kernels.pool.rope_store_kv`. `slots` (T),
    int32, are the spans' last ones; below 0 for a span without keys, which stores nothing."""

    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    slots: Tensor
