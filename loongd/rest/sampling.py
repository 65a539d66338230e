"""From the sampling fields of a request to `wire.Sampling`.

Knows: the bounds of each field, and the order request, generation_config, OpenAI's default.
Does not know: prompts, text, HTTP.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping

import msgspec

from loongd.errors import RequestError
from loongd.rest.protocol import GenerationBody
from loongd.wire import Sampling

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_IDS = 1024

# Below this a temperature is greedy (vLLM's bound): dividing logits by it would overflow.
_GREEDY_TEMPERATURE = 1e-5
_SEED_MASK = (1 << 63) - 1

_NEUTRAL: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def bad(param: str, message: str) -> RequestError:
    """A 400 for one field; the message starts with the field's name."""
    return RequestError(f"{param} {message}", param=param)


def check_range(param: str, value: float, low: float, high: float) -> None:
    """Raises RequestError unless `value` is finite and within `low` and `high`, both included."""
    if not math.isfinite(value):
        raise bad(param, f"must be a finite number, but is {value}.")
    if low <= value <= high:
        return
    if math.isinf(high):
        raise bad(param, f"must be at least {low}, but is {value}.")
    raise bad(param, f"must be between {low} and {high}, but is {value}.")


def build_sampling(
    body: GenerationBody,
    *,
    defaults: Mapping[str, float],
    vocab_size: int,
    num_logprobs: int | None,
) -> Sampling:
    """The sampling of choice 0. Raises RequestError naming the field that is out of bounds."""
    value: dict[str, float] = {}
    for name, neutral in _NEUTRAL.items():
        given = getattr(body, name)
        value[name] = defaults.get(name, neutral) if given is None else given
    check_range("temperature", value["temperature"], 0, math.inf)
    check_range("top_p", value["top_p"], 0, 1)
    if value["top_p"] == 0:
        raise bad("top_p", "must be above 0, but is 0.")
    check_range("top_k", value["top_k"], -1, 2**31 - 1)
    check_range("min_p", value["min_p"], 0, 1)
    check_range("presence_penalty", value["presence_penalty"], -2, 2)
    check_range("frequency_penalty", value["frequency_penalty"], -2, 2)
    check_range("repetition_penalty", value["repetition_penalty"], 0.01, 100)
    temperature = float(value["temperature"])
    return Sampling(
        temperature=0.0 if temperature < _GREEDY_TEMPERATURE else temperature,
        top_p=float(value["top_p"]),
        top_k=max(int(value["top_k"]), 0),
        min_p=float(value["min_p"]),
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        presence_penalty=float(value["presence_penalty"]),
        frequency_penalty=float(value["frequency_penalty"]),
        repetition_penalty=float(value["repetition_penalty"]),
        bias=_bias(body.logit_bias, vocab_size),
        num_logprobs=num_logprobs,
    )


def with_choice(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of another choice of the same request: the next seed."""
    return msgspec.structs.replace(sampling, seed=(sampling.seed + choice) & _SEED_MASK)


def count_choices(body: GenerationBody) -> int:
    """`n`, checked."""
    n = 1 if body.n is None else body.n
    check_range("n", n, 1, MAX_CHOICES)
    return n


def collect_stops(body: GenerationBody) -> tuple[str, ...]:
    """The stop strings, checked."""
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > MAX_STOPS:
        raise bad("stop", f"may hold at most {MAX_STOPS} strings, but holds {len(stops)}.")
    if "" in stops:
        raise bad("stop", "must not hold an empty string.")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARS:
        raise bad("stop", f"may be {MAX_STOP_CHARS} characters long, but has {longest}.")
    return stops


def collect_stop_ids(
    body: GenerationBody, eos_token_ids: frozenset[int], vocab_size: int
) -> frozenset[int]:
    """The tokens that end an answer: end-of-sequence unless ignored, and the client's own."""
    own = body.stop_token_ids or []
    if len(own) > MAX_IDS:
        raise bad("stop_token_ids", f"may hold at most {MAX_IDS} ids, but holds {len(own)}.")
    check_token_ids("stop_token_ids", own, vocab_size)
    return frozenset(own) | (frozenset() if body.ignore_eos else eos_token_ids)


def check_token_ids(param: str, ids: list[int], vocab_size: int) -> None:
    """Raises RequestError when an id is not one of the model's tokens."""
    if not ids:
        return
    for worst in (min(ids), max(ids)):
        if not 0 <= worst < vocab_size:
            raise bad(
                param, f"holds token id {worst}, but this model's ids are 0 to {vocab_size - 1}."
            )


def _bias(logit_bias: dict[str, float] | None, vocab_size: int) -> list[tuple[int, float]]:
    num_ids = len(logit_bias or {})
    if num_ids > MAX_IDS:
        raise bad("logit_bias", f"may hold at most {MAX_IDS} ids, but holds {num_ids}.")
    bias: list[tuple[int, float]] = []
    for key, weight in (logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad("logit_bias", f"must have token ids as keys, but has {key[:32]!r}.")
        check_token_ids("logit_bias", [int(key)], vocab_size)
        check_range(f"logit_bias[{key}]", weight, -100, 100)
        bias.append((int(key), float(weight)))
    return bias
