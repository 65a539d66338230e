"""Writing K and V into one layer of the pool: Triton on CUDA, plain torch elsewhere.

Knows: rows and slots; how a decode step's rows begin. Does not know: layers, requests, who chose
the slots.
"""

from __future__ import annotations

from torch import Tensor

from loongd.kernels.dispatch import pick


def next_tokens(
    drawn_B: Tensor,
    sources_B: Tensor,
    given_B: Tensor,
    entries_B: Tensor,
    slots_B: Tensor,
    slots_S: Tensor,
    tokens_B: Tensor,
) -> None:
    """A decode step's tokens into `tokens_B`: what row `sources_B` of the step before has drawn (0
    if that is below 0), or the given one where the source is below 0.

    Also writes each row's slot into its entry of `slots_S`; rows without a slot share an entry that
    nobody reads. All are contiguous; all but `drawn_B` and `tokens_B` (int64) are int32.
    """
    gpu = pick("pool", drawn_B.device)
    gpu.next_tokens(drawn_B, sources_B, given_B, entries_B, slots_B, slots_S, tokens_B)


def store_kv(
    k_TKH: Tensor,
    v_TKH: Tensor,
    slots_R: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
    *,
    rows_R: Tensor | None = None,
) -> None:
    """Write row `rows_R[i]` (row i without) of K and V to slot `slots_R[i]` of the pool.

    One launch for both. Slots below 0 are skipped, so that a padded batch stores nothing for its
    padding. No slot twice.
    """
    gpu = pick("pool", k_TKH.device)
    gpu.store_kv(k_TKH, v_TKH, slots_R, k_SKH, v_SKH, rows_R=rows_R)


def rope_store_kv(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    cos_TH: Tensor,
    sin_TH: Tensor,
    slots_T: Tensor,
    k_SKH: Tensor,
    v_SKH: Tensor,
) -> None:
    """`apply_rotary` in place on q and k, and `store_kv` of K and V, in one launch."""
    gpu = pick("pool", q_TNH.device)
    gpu.rope_store_kv(q_TNH, k_TKH, v_TKH, cos_TH, sin_TH, slots_T, k_SKH, v_SKH)
