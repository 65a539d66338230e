"""The dynamic programme of `sched.batching` as loops, compiled when numba is there.

The same sums in the same order as the numpy form. Plain Python runs it too, slowly: tests do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def fill_plain(
    tokens: Ints,
    squares: Ints,
    inverse: Floats,
    needs: Ints,
    slots: Ints,
    costs: Floats,
    share_tokens: int,
    max_batched_tokens: int,
) -> tuple[Floats, Ints, Ints]:
    """f, and for each cell the (j, l) it comes from; arguments as `batching.sums` makes them."""
    n, m = len(tokens) - 1, len(slots) - 1
    best = np.full((n + 1, m + 1), np.inf)
    best[0, 0] = 0.0
    from_request = np.zeros((n + 1, m + 1), dtype=np.int64)
    from_instance = np.zeros((n + 1, m + 1), dtype=np.int64)
    for i in range(1, n + 1):
        for j in range(i):
            count, new = i - j, tokens[i] - tokens[j]
            if count > 1 and new > max_batched_tokens:
                continue
            square, per_token = squares[i] - squares[j], inverse[i] - inverse[j]
            for w in range(1, m + 1):
                if (w - 1) * share_tokens >= new:
                    break
                time = costs[w - 1, 0] + costs[w - 1, 1] * count
                time = time + costs[w - 1, 2] * new + costs[w - 1, 3] * square
                latency = max(costs[w - 1, 4], time) * per_token
                for k in range(w, m + 1):
                    if needs[i] - needs[j] > slots[k] - slots[k - w]:
                        continue
                    total = best[j, k - w] + latency
                    kept = best[i, k]
                    first = from_request[i, k] == j and k - w < from_instance[i, k]
                    if total < kept or (total == kept and first and total < np.inf):
                        best[i, k] = total
                        from_request[i, k], from_instance[i, k] = j, k - w
    return best, from_request, from_instance


def _compile() -> tuple[bool, Callable[..., Any]]:
    try:
        from numba import njit  # noqa: PLC0415 - an extra
    except ImportError:
        return False, fill_plain
    try:
        return True, njit(cache=True)(fill_plain)
    except RuntimeError:  # no folder to keep the result in: a read-only package and home
        return True, njit(fill_plain)


COMPILED, fill_loops = _compile()
