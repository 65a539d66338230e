"""The bodies of requests, as OpenAI, vLLM and SGLang define them.

Knows: the name and type of each field, and the fields of the three that loongd refuses rather than
ignores: those that promise a different answer, or something beside it. `null` means absent
everywhere. Fields not named here are ignored, with a debug line: names and notes (`metadata`,
`safety_identifier`, `request_id`), hints that at most save time (`prediction`, `prompt_cache_key`,
`cache_salt`), and what means nothing without fields that are refused (`parallel_tool_calls`,
`guided_decoding_backend`, `mm_processor_kwargs`).
Does not know: bounds that depend on the model; `sampling` and `prepare` check those.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
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
    custom_logit_processor: Any = None
    detokenize: Any = None
    early_stopping: Any = None
    ebnf: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    json_schema: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    lora_path: Any = None
    max_new_tokens: Any = None
    min_new_tokens: Any = None
    no_repeat_ngram_size: Any = None
    no_stop_trim: Any = None
    priority: Any = None
    prompt_logprobs: Any = None
    regex: Any = None
    return_hidden_states: Any = None
    return_tokens_as_token_ids: Any = None
    service_tier: Any = None
    session_params: Any = None
    stop_regex: Any = None
    structural_tag: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: Any = None
    typical_p: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None


class CompletionBody(GenerationBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | Int | list[Int]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None


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
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: bool | None = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    reasoning_effort: Any = None
    store: Any = None
    thinking_token_budget: Any = None
    verbosity: Any = None
    web_search_options: Any = None


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
    chat_template: Any = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[Int]
    model: str | None = None


_EMPTY: tuple[Any, ...] = ("", [], {})
_OFF: tuple[Any, ...] = (*_EMPTY, 0)
_ON: tuple[Any, ...] = (True,)
_REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "allowed_token_ids": _EMPTY,
        "audio": _EMPTY,
        "bad_words": _EMPTY,
        "chat_template": _EMPTY,
        "continue_final_message": _OFF,
        "custom_logit_processor": _EMPTY,
        "detokenize": _ON,
        "documents": _EMPTY,
        "early_stopping": _OFF,
        "ebnf": _EMPTY,
        "function_call": (*_EMPTY, "none", "auto"),
        "functions": _EMPTY,
        "guided_choice": _EMPTY,
        "guided_grammar": _EMPTY,
        "guided_json": _EMPTY,
        "guided_regex": _EMPTY,
        "json_schema": _EMPTY,
        "kv_transfer_params": _EMPTY,
        "length_penalty": (*_EMPTY, 1),
        "logits_processors": _EMPTY,
        "lora_path": _EMPTY,
        "max_new_tokens": (),
        "min_new_tokens": _OFF,
        "modalities": (*_EMPTY, ["text"]),
        "no_repeat_ngram_size": _OFF,
        "no_stop_trim": _OFF,
        "priority": _OFF,
        "prompt_embeds": _EMPTY,
        "prompt_logprobs": (),
        "reasoning_effort": (*_EMPTY, "medium"),
        "regex": _EMPTY,
        "return_hidden_states": _OFF,
        "return_tokens_as_token_ids": _OFF,
        "service_tier": (*_EMPTY, "auto", "default"),
        "session_params": _EMPTY,
        "stop_regex": _EMPTY,
        "store": _OFF,
        "structural_tag": _EMPTY,
        "structured_outputs": _EMPTY,
        "suffix": _EMPTY,
        "thinking_token_budget": _EMPTY,
        "truncate_prompt_tokens": _OFF,
        "typical_p": (*_EMPTY, 1),
        "use_beam_search": _OFF,
        "verbosity": (*_EMPTY, "medium"),
        "vllm_xargs": _EMPTY,
        "web_search_options": (),
    }
)
"""Refused fields, each with the values that ask for nothing beside null and false (with
`_ON`: null and true)."""


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
    for name in fields:
        value = getattr(body, name)
        if name not in _REFUSED or value is None or value is (_REFUSED[name] == _ON):
            continue
        # Beside its default no boolean is fine; 1 is, where `True == 1` must not count.
        if isinstance(value, bool) or value not in _REFUSED[name]:
            fine = " or ".join(json.dumps(one) for one in _REFUSED[name] if one not in _OFF)
            raise RequestError(
                f"{name} is not supported by loongd{f', except {fine}' if fine else ''}.",
                param=name,
                code="unsupported_parameter",
            )
    if log.isEnabledFor(10):
        present = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if unknown := sorted(present.keys() - set(fields)):
            log.debug("ignored unknown request fields: %s", ", ".join(unknown))
    return body
