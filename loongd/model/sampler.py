"""Drawing tokens from logits.

Knows: the order of adjustments (bias and banned ids, penalties; then `kernels.sampling` draws)
and a random number that depends only on the request's seed and the token's position, so the same
request draws the same token alone or in a batch, on any device and any master.
Does not know: requests, stop conditions, text.

Filters are thresholds on logits and the draw runs in vocabulary order, so equal logits, common in
bf16, never depend on how a sort breaks ties: tokens equal to the last one kept are kept too.

Letters: B rows, R some of them, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongd.kernels.sampling import best_tokens, draw_tokens
from loongd.wire import Sampling

_GREEDY_TEMPERATURE = 1e-5
"""Below this, dividing by the temperature overflows and the best token has all the mass."""
_MASK = (1 << 64) - 1
_BROKEN = -1
"""Stands for a token, on the device only, where logits were not finite."""


class Drawn(msgspec.Struct, frozen=True, gc=False):
    """A drawn token; `logprob` and `top` (id, log-probability; best first) when asked for.

    `token` is None where none can be drawn: a logit is NaN or infinite, or all are banned. That
    is the row's own failure; the other rows of the batch are as good as ever.
    """

    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def is_plain(params: Sampling | None) -> bool:
    """Whether the best logit alone decides, and nothing but the token is asked for."""
    if params is None:
        return True
    adjusted = params.banned or params.bias or params.history
    greedy = params.temperature < _GREEDY_TEMPERATURE
    return greedy and not adjusted and params.num_logprobs is None


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """How the rows of a batch are drawn: worked out once, good while the batch decodes on.

    `adjusted` are rows whose logits are changed first; `numbers` (5, B) float64 are temperature,
    top-k, top-p, min-p and room for a random number, B even; `seeds` (uint64) are mixed once.
    """

    params: Sequence[Sampling]
    greedy: bool
    filtered: bool
    adjusted: list[int]
    numbers: npt.NDArray[np.float64]
    seeds: npt.NDArray[np.uint64]
    num_logprobs: dict[int, int]
    """By row, of those that want any."""

    @classmethod
    def of(cls, params: Sequence[Sampling]) -> Recipe:
        """Of rows that are drawn like this."""
        # an even number of columns, so that each row begins at a multiple of 16 bytes, as Triton
        # takes for granted in what it has compiled
        rows = [(p.temperature, p.top_k, p.top_p, p.min_p, 0.0) for p in params]
        numbers = np.array(rows + rows[: len(rows) % 2], np.float64).T
        return cls(
            params,
            greedy=all(p.temperature < _GREEDY_TEMPERATURE for p in params),
            filtered=any(p.top_k > 0 or p.top_p < 1.0 for p in params),
            adjusted=[row for row, p in enumerate(params) if p.banned or p.bias or p.history],
            numbers=np.ascontiguousarray(numbers),
            seeds=_mix(np.array([p.seed & _MASK for p in params], np.uint64)),
            num_logprobs={
                row: p.num_logprobs for row, p in enumerate(params) if p.num_logprobs is not None
            },
        )

    def table(self, positions: Sequence[int]) -> npt.NDArray[np.float64]:
        """`numbers` with the random numbers of these positions."""
        table = self.numbers.copy()
        table[4, : len(positions)] = _uniform(self.seeds, np.array(positions, np.uint64))
        return table


class Mark:
    """A place in the device's work: behind all that it has been given so far."""

    def __init__(self, *, on_gpu: bool) -> None:
        """Where there is no GPU, it is reached at once."""
        self._event: Any = None
        if on_gpu:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_reached(self) -> bool:
        """Whether `wait` returns at once."""
        reached: bool = self._event is None or self._event.query()
        return reached

    def wait(self) -> None:
        """Return when the device is there. Raises RuntimeError for what failed on the way."""
        if self._event is not None:
            self._event.synchronize()


class Drawing:
    """Tokens that are being drawn. `tokens_B` (int64, on the logits' device): -1 for none."""

    def __init__(self, tokens_B: Tensor, logprobs: _Logprobs | None) -> None:
        self.tokens_B = tokens_B
        self._tokens_B = _fetch(tokens_B)
        self._logprobs = logprobs
        self._done = Mark(on_gpu=tokens_B.is_cuda)

    def ready(self) -> bool:
        """Whether `finish` returns at once."""
        return self._done.is_reached()

    def finish(self) -> list[Drawn]:
        """Wait for the device. Raises RuntimeError for what failed there."""
        self._done.wait()
        drawn = [Drawn(None if token == _BROKEN else token) for token in self._tokens_B.tolist()]
        if self._logprobs is not None:
            self._logprobs.add_to(drawn)
        return drawn


def sample(logits_BV: Tensor, params: Sequence[Sampling], positions: Sequence[int]) -> list[Drawn]:
    """One token for each row, at once; see `begin_sample`."""
    return begin_sample(logits_BV, params, positions).finish()


def sample_once(logits_1V: Tensor) -> None:
    """Draw in each way that has kernels of its own, so that none is compiled while serving."""
    for top_p in (1.0, 0.5):
        sample(logits_1V, [Sampling(temperature=1.0, top_p=top_p)], [0])


@torch.inference_mode()
def begin_sample(
    logits_BV: Tensor, params: Sequence[Sampling] | Recipe, positions: Sequence[int]
) -> Drawing:
    """Launch the drawing of one token for each row, without waiting for the device.

    With penalties the host may wait. `logits_BV` is left unchanged, and may change once what is in
    the stream so far is done. Log-probabilities are log_softmax of the raw logits, before any
    adjustment.

    Args:
        logits_BV: logits, fp32 or half precision.
        params: how each row is drawn.
        positions: position that each drawn token will have in its request.
    """
    recipe = params if isinstance(params, Recipe) else Recipe.of(params)
    adjusted_BV = _adjust(logits_BV, recipe)
    if recipe.greedy:
        tokens_B = best_tokens(adjusted_BV)
    else:
        table = _send(recipe.table(positions), torch.float64, logits_BV.device)
        temperature_B, top_k_B, top_p_B, min_p_B, uniform_B = table[:, : len(positions)]
        filtered = recipe.filtered
        tokens_B = draw_tokens(
            adjusted_BV, temperature_B, top_k_B, top_p_B, min_p_B, uniform_B, filtered=filtered
        )
    return Drawing(tokens_B, _logprobs(logits_BV, recipe.num_logprobs, tokens_B))


def _send(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on their way to the device; nothing waits for them but what uses them."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


def _fetch(x: Tensor) -> Tensor:
    """Numbers on their way to the host; pinned, or the copy would wait for the device."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _adjust(logits_BV: Tensor, recipe: Recipe) -> Tensor:
    """Logits with bias, banned ids and penalties applied; the same tensor when none is on."""
    if not recipe.adjusted:
        return logits_BV
    adjusted_BV = logits_BV.to(torch.float32, copy=True)
    for row in recipe.adjusted:
        logits_V, p = adjusted_BV[row], recipe.params[row]
        # ids beyond the vocabulary can never be drawn: nothing to adjust
        bias = [(token, value) for token, value in p.bias if 0 <= token < len(logits_V)]
        if bias:
            tokens, values = zip(*bias, strict=True)
            ids = _send(tokens, torch.int64, logits_V.device)
            logits_V.index_add_(0, ids, _send(values, torch.float32, logits_V.device))
        banned = [token for token in p.banned if 0 <= token < len(logits_V)]
        if banned:
            logits_V.index_fill_(0, _send(banned, torch.int64, logits_V.device), -torch.inf)
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


class _Logprobs:
    """Log-probabilities of some rows, on their way to the host."""

    def __init__(self, rows: list[int], nums: list[int], tensors: Iterable[Tensor]) -> None:
        """`tensors`: the chosen tokens' (R,); the best ids and their values (R, most)."""
        self._rows = rows
        self._nums = nums
        self._tensors = [_fetch(x) for x in tensors]

    def add_to(self, drawn: list[Drawn]) -> None:
        """To the rows that have a token; what is on its way has arrived."""
        chosen, ids, values = (x.tolist() for x in self._tensors)
        for i, (row, num) in enumerate(zip(self._rows, self._nums, strict=True)):
            if drawn[row].token is not None:
                top = tuple(zip(ids[i][:num], values[i][:num], strict=True))
                drawn[row] = Drawn(drawn[row].token, chosen[i], top)


def _logprobs(logits_BV: Tensor, wanted: dict[int, int], tokens_B: Tensor) -> _Logprobs | None:
    """Log-probabilities for the rows that want them."""
    if not wanted:
        return None
    rows, nums = list(wanted), list(wanted.values())
    index_R = _send(rows, torch.int64, logits_BV.device)
    logprobs_RV = logits_BV[index_R].float().log_softmax(-1)
    tokens_R = tokens_B[index_R].clamp(min=0)
    chosen_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    top = logprobs_RV.topk(min(max(nums), logits_BV.shape[1]), dim=-1)
    return _Logprobs(rows, nums, (chosen_R, top.indices, top.values))


def _uniform(
    mixed_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) from seeds and positions alone: two rounds of SplitMix64.

    52 bits, so that the number times any total stays below the total in float64.
    """
    return (_mix(mixed_seeds ^ positions) >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """One SplitMix64 step (Steele, Lea and Flood, OOPSLA 2014) of each number."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
