"""Drawing tokens from logits.

Knows: the order of adjustments (bias and banned ids, penalties, temperature, top-k, top-p, min-p)
and a random number that depends only on the request's seed and the token's position, so the same
request draws the same token alone or in a batch, on any device and any master.
Does not know: requests, stop conditions, text.

Filters are thresholds on logits and the draw runs in vocabulary order, so equal logits, common in
bf16, never depend on how a sort breaks ties: tokens equal to the last one kept are kept too.

Letters: B rows, R rows of one block, V vocabulary, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loongd.wire import Sampling

_GREEDY_TEMPERATURE = 1e-5
"""Below this, dividing by the temperature overflows and the best token has all the mass."""
_BLOCK_ROWS = 32
"""Rows drawn at once; bounds the memory of float64 probabilities."""
_CANDIDATES = 1024
"""Best logits looked at before falling back to the whole vocabulary."""
_BROKEN = -1
"""Stands for a token, on the device only, where logits were not finite."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token; `logprob` and `top` (id, log-probability; best first) when asked for.

    `token` is None where none can be drawn: a logit is NaN or infinite, or all are banned. That
    is the row's own failure; the other rows of the batch are as good as ever.
    """

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@torch.inference_mode()
def sample(logits_BV: Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[Drawn]:
    """One token for each row. `logits_BV` (fp32) is left unchanged.

    Log-probabilities are log_softmax of the raw logits, before any adjustment.

    Args:
        logits_BV: fp32 logits.
        params: how each row is drawn.
        positions: position that each drawn token will have in its request.
    """
    if not params:
        return []
    adjusted_BV = _adjust(logits_BV, params)
    tokens_B = _argmax(adjusted_BV)
    random_rows = [row for row, p in enumerate(params) if p.temperature >= _GREEDY_TEMPERATURE]
    for first in range(0, len(random_rows), _BLOCK_ROWS):
        rows = random_rows[first : first + _BLOCK_ROWS]
        block = [params[row] for row in rows]
        uniforms = [_uniform(params[row].seed, positions[row]) for row in rows]
        index = torch.tensor(rows, device=logits_BV.device)
        # where rather than plain assignment: a broken row stays broken
        drawn_R = _draw(adjusted_BV[index], block, uniforms)
        tokens_B[index] = torch.where(tokens_B[index] == _BROKEN, _BROKEN, drawn_R)
    tokens: list[int] = tokens_B.tolist()
    logprobs = _logprobs(logits_BV, params, tokens)
    return [
        Drawn(None) if token == _BROKEN else logprobs.get(row, Drawn(token))
        for row, token in enumerate(tokens)
    ]


def _argmax(logits_BV: Tensor) -> Tensor:
    """Best token of each row, `_BROKEN` where a NaN or infinity makes it meaningless."""
    best_B, tokens_B = logits_BV.max(dim=-1)  # max propagates NaN
    return torch.where(best_B.isfinite(), tokens_B, _BROKEN)


def _adjust(logits_BV: Tensor, params: Sequence[Sampling]) -> Tensor:
    """Logits with bias, banned ids and penalties applied; the same tensor when none is on."""
    rows = [row for row, p in enumerate(params) if p.banned or p.bias or p.history]
    if not rows:
        return logits_BV
    adjusted_BV = logits_BV.clone()
    for row in rows:
        logits_V, p = adjusted_BV[row], params[row]
        # ids beyond the vocabulary can never be drawn: nothing to adjust
        bias = [(token, value) for token, value in p.bias if 0 <= token < len(logits_V)]
        if bias:
            ids, values = (torch.tensor(x, device=logits_V.device) for x in zip(*bias, strict=True))
            logits_V.index_add_(0, ids, values.to(logits_V.dtype))
        banned = [token for token in p.banned if 0 <= token < len(logits_V)]
        if banned:
            logits_V[torch.tensor(banned, device=logits_V.device)] = -torch.inf
        if p.history:
            _penalize(logits_V, p)
    return adjusted_BV


def _penalize(logits_V: Tensor, params: Sampling) -> None:
    """Penalties in place, as vLLM and transformers define them.

    repetition r, over prompt and output: x / r for x > 0, else x * r. Then, over output alone,
    x - frequency * count - presence * (count > 0).
    """
    history = torch.frombuffer(bytearray(params.history), dtype=torch.int32)
    history = history.to(logits_V.device, torch.int64)
    vocab, r = len(logits_V), params.repetition_penalty
    if r != 1.0:
        seen_V = torch.bincount(history, minlength=vocab) > 0
        repelled_V = torch.where(logits_V > 0, logits_V / r, logits_V * r)
        logits_V.copy_(torch.where(seen_V, repelled_V, logits_V))
    if params.frequency_penalty or params.presence_penalty:
        counts_V = torch.bincount(history[params.num_prompt_tokens :], minlength=vocab)
        logits_V -= params.frequency_penalty * counts_V
        logits_V -= params.presence_penalty * (counts_V > 0)


def _draw(logits_RV: Tensor, params: Sequence[Sampling], uniforms: list[float]) -> Tensor:
    """Tokens (R,) by inverse transform: the first whose cumulative mass exceeds u * total."""
    device = logits_RV.device
    table = [
        [max(p.temperature, _GREEDY_TEMPERATURE) for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        uniforms,
    ]
    temperature_R1, top_p_R1, min_p_R1, uniform_R1 = torch.tensor(
        table, dtype=torch.float64, device=device
    )[:, :, None]
    scaled_RV = logits_RV / temperature_R1.to(logits_RV.dtype)
    filtered = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1.0]
    if filtered:
        index = torch.tensor(filtered, device=device)
        top_k = [params[row].top_k or logits_RV.shape[1] for row in filtered]
        part_RV = scaled_RV[index]
        cutoff_R1 = _cutoff(part_RV, top_k, top_p_R1[index])
        scaled_RV[index] = part_RV.masked_fill(part_RV < cutoff_R1, -torch.inf)
    if any(p.min_p > 0 for p in params):
        # p < min_p * p_max, in logits; the best token survives every filter above
        cutoff_R1 = scaled_RV.amax(-1, keepdim=True) + min_p_R1.log()
        scaled_RV = scaled_RV.masked_fill(scaled_RV < cutoff_R1, -torch.inf)
    mass_RV = scaled_RV.softmax(-1, dtype=torch.float64).cumsum(-1)
    target_R1 = uniform_R1 * mass_RV[:, -1:]
    # right=True steps over tokens of no mass, whose cumulative mass equals their neighbour's
    return torch.searchsorted(mass_RV, target_R1, right=True)[:, 0]


def _cutoff(scaled_RV: Tensor, top_k: list[int], top_p_R1: Tensor) -> Tensor:
    """The smallest logit (R, 1) that top-k, then top-p over what top-k left, keep.

    Looks at the best `_CANDIDATES` logits first; only when some row needs more, at all of them.
    """
    vocab = scaled_RV.shape[1]
    top_k_R1 = torch.tensor(top_k, device=scaled_RV.device).clamp(max=vocab)[:, None]
    log_total_R1 = scaled_RV.double().logsumexp(-1, keepdim=True)
    for num in (min(_CANDIDATES, vocab), vocab):
        values_RC = scaled_RV.topk(num, dim=-1).values
        kth_R1 = values_RC.gather(1, top_k_R1.clamp(max=num) - 1)
        kept_RC = values_RC >= torch.where(top_k_R1 < vocab, kth_R1, -torch.inf)
        mass_RC = (values_RC.double() - log_total_R1).exp() * kept_RC
        cumulative_RC = mass_RC.cumsum(-1)
        # with top-k on, what top-p shares out is the mass that top-k left
        total_R1 = torch.where(top_k_R1 < vocab, cumulative_RC[:, -1:], 1.0)
        wanted_R1 = torch.where(top_p_R1 < 1.0, top_p_R1 * total_R1, torch.inf)
        kept_RC &= cumulative_RC - mass_RC < wanted_R1
        kept_RC[:, 0] = True
        # the last candidate dropped means that the candidates hold everything wanted
        if num == vocab or not bool(kept_RC[:, -1].any()):
            break
    return values_RC.masked_fill(~kept_RC, torch.inf).amin(-1, keepdim=True)


def _logprobs(logits_BV: Tensor, params: Sequence[Sampling], tokens: list[int]) -> dict[int, Drawn]:
    """Tokens with log-probabilities for the rows that want them."""
    wanted = enumerate(zip(params, tokens, strict=True))
    rows = [row for row, (p, t) in wanted if p.num_logprobs is not None and t != _BROKEN]
    if not rows:
        return {}
    index = torch.tensor(rows, device=logits_BV.device)
    logprobs_RV = logits_BV[index].log_softmax(-1)
    chosen_R1 = torch.tensor([[tokens[row]] for row in rows], device=logits_BV.device)
    chosen: list[float] = logprobs_RV.gather(1, chosen_R1)[:, 0].tolist()
    most = min(max(params[row].num_logprobs or 0 for row in rows), logits_BV.shape[1])
    top = logprobs_RV.topk(most, dim=-1)
    ids, values = top.indices.tolist(), top.values.tolist()
    return {
        row: Drawn(
            tokens[row],
            chosen[i],
            tuple(zip(ids[i], values[i], strict=True))[: params[row].num_logprobs],
        )
        for i, row in enumerate(rows)
    }


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from seed and position alone: two rounds of SplitMix64.

    52 bits, so that the number times any total stays below the total in float64.
    """
    return (_mix(_mix(seed) ^ position) >> 12) * 2.0**-52


def _mix(x: int) -> int:
    """One SplitMix64 step (Steele, Lea and Flood, OOPSLA 2014) on the low 64 bits of `x`."""
    mask = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)
