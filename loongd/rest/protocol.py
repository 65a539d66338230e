"""The bodies of requests, as OpenAI and vLLM define them.

Knows: the name and type of each field, and the fields that loongd refuses rather than ignores:
those that promise a different answer. `null` means absent everywhere. Fields not named here
are ignored, with a debug line.
Does not know: bounds that depend on the model; `sampling` and `prepare` check those.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from loongd.errors import RequestError
from loongd.rest.context import log

Body = TypeVar("Body", bound=msgspec.Struct)

# Bounded, so that no later arithmetic or formatting meets a number of 4,000 digits.
Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StreamOptions(msgspec.Struct):
    """`include_usage` adds a last chunk with usage; `continuous_usage_stats` puts it in all."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(msgspec.Struct, kw_only=True):
    """What completions and chat completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    # Refused when they ask for anything.
    allowed_token_ids: Any = None
    bad_words: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    prompt_logprobs: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | Int | list[Int]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None


class ChatBody(GenerationBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt or messages, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[Int]
    model: str | None = None


_REFUSED = (
    "allowed_token_ids",
    "bad_words",
    "chat_template",
    "continue_final_message",
    "documents",
    "function_call",
    "functions",
    "guided_choice",
    "guided_grammar",
    "guided_json",
    "guided_regex",
    "prompt_logprobs",
    "structured_outputs",
    "suffix",
    "truncate_prompt_tokens",
    "use_beam_search",
)


def decode(data: bytes, body_type: type[Body]) -> Body:
    """A request body.

    Raises msgspec.DecodeError when it is not JSON or a field has the wrong type, and
    RequestError when a field asks for what loongd cannot do.
    """
    try:
        body = msgspec.json.decode(data, type=body_type)
    except RecursionError as error:
        raise RequestError("The request body is nested too deeply.") from error
    fields = body.__struct_fields__
    for name in _REFUSED:
        if name in fields and getattr(body, name) not in (None, False, "", [], {}):
            raise RequestError(
                f"{name} is not supported by loongd.", param=name, code="unsupported_parameter"
            )
    if log.isEnabledFor(10):
        present = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if unknown := sorted(present.keys() - set(fields)):
            log.debug("ignored unknown request fields: %s", ", ".join(unknown))
    return body
