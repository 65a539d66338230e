"""The parts that answers of both endpoints share: usage, log-probabilities, token names.

Knows: OpenAI's and vLLM's JSON. Does not know: where the numbers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loongd.rest.stream.answer import Answer
from loongd.submission import Token
from loongd.text.tokenizer import Tokenizer

# JSON has no minus infinity; vLLM writes this.
_LOWEST_LOGPROB = -9999.0


def usage(num_prompt_tokens: int, answers: Sequence[Answer]) -> dict[str, Any]:
    """The usage object; each prompt counts once, every token drawn counts."""
    num_tokens = sum(answer.num_tokens for answer in answers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def token_name(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token's text, or its id where there is no tokenizer."""
    return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def finite(logprob: float | None) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, _LOWEST_LOGPROB) if logprob is not None else _LOWEST_LOGPROB


def chat_logprobs(tokenizer: Tokenizer | None, tokens: Sequence[Token], top: int) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry for each token, with its `top` alternatives."""
    return {
        "content": [
            {
                **_chat_entry(tokenizer, token.id, token.logprob),
                "top_logprobs": [
                    _chat_entry(tokenizer, other, logprob) for other, logprob in token.top[:top]
                ],
            }
            for token in tokens
        ]
    }


def _chat_entry(
    tokenizer: Tokenizer | None, token_id: int, logprob: float | None
) -> dict[str, Any]:
    return {
        "token": token_name(tokenizer, token_id),
        "logprob": finite(logprob),
        "bytes": None if tokenizer is None else list(tokenizer.token_bytes(token_id)),
    }


def completion_logprobs(
    tokenizer: Tokenizer | None, tokens: Sequence[Token], top: int, *, offset: int
) -> dict[str, Any]:
    """`logprobs` of a completion choice; `offset` is the length of the text before."""
    names = [token_name(tokenizer, token.id) for token in tokens]
    offsets: list[int] = []
    for name in names:
        offsets.append(offset)
        offset += len(name)
    return {
        "text_offset": offsets,
        "token_logprobs": [finite(token.logprob) for token in tokens],
        "tokens": names,
        "top_logprobs": [
            {
                **{token_name(tokenizer, i): finite(logprob) for i, logprob in token.top[:top]},
                name: finite(token.logprob),
            }
            for name, token in zip(names, tokens, strict=True)
        ],
    }
