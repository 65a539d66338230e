"""From text and messages to token ids.

Knows: the names that are served, the cheap guard before tokenising, and that nothing here may hold
up the event loop.
Does not know: sampling, submissions, answers.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

from loongd.errors import RequestError
from loongd.rest.context import RestContext
from loongd.text.tokenizer import Tokenizer

# No tokenizer makes tokens longer than this, so a longer text can be refused unread.
_MAX_CHARS_PER_TOKEN = 256
# Arguments of the renderer itself.
_OWN_TEMPLATE_NAMES = ("self", "messages", "tools", "add_generation_prompt")


def check_model(context: RestContext, model: str | None) -> None:
    """Raises RequestError (404) for a name that is not served."""
    if model is not None and model != context.model_name:
        raise RequestError(
            f"The model `{model}` does not exist; this server has `{context.model_name}`.",
            status=404,
            param="model",
            code="model_not_found",
        )


def need_tokenizer(context: RestContext, param: str) -> Tokenizer:
    """The tokenizer. Raises RequestError when the model has none."""
    if context.tokenizer is None:
        raise RequestError(
            f"{param} cannot be text: this model runs without a tokenizer; send a prompt of "
            "token ids to /v1/completions.",
            param=param,
        )
    return context.tokenizer


async def encode_text(
    context: RestContext, text: str, *, param: str, add_special_tokens: bool
) -> array[int]:
    """The ids of a text. Raises RequestError at once when it is far too long to fit."""
    tokenizer = need_tokenizer(context, param)
    limit = context.engine.max_model_len
    if len(text) > limit * _MAX_CHARS_PER_TOKEN:
        raise too_long(
            f"This model's maximum context length is {limit} tokens. However, your {param} has "
            f"{len(text)} characters, more than {limit} tokens can hold. Please shorten it.",
            param,
        )
    return await tokenizer.encode(text, add_special_tokens=add_special_tokens)


async def encode_chat(
    context: RestContext,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None,
    template_kwargs: dict[str, Any] | None,
    add_generation_prompt: bool | None,
    add_special_tokens: bool | None,
) -> array[int]:
    """The ids of a conversation, by the model's template. Raises RequestError."""
    tokenizer = need_tokenizer(context, "messages")
    if not messages:
        raise RequestError("messages must hold at least one message.", param="messages")
    if not tokenizer.has_chat_template:
        raise RequestError(
            "This model has no chat template: use /v1/completions, or start loongd with "
            "--chat-template.",
            param="messages",
        )
    for name in _OWN_TEMPLATE_NAMES:
        if template_kwargs and name in template_kwargs:
            raise RequestError(
                f"chat_template_kwargs must not hold {name}; the renderer sets it itself.",
                param="chat_template_kwargs",
            )
    # In a thread, since a template is a program of the model's, and a conversation may be long.
    text = await asyncio.to_thread(
        tokenizer.render_chat,
        messages,
        add_generation_prompt=add_generation_prompt is not False,
        tools=tools or None,
        **(template_kwargs or {}),
    )
    return await encode_text(
        context, text, param="messages", add_special_tokens=bool(add_special_tokens)
    )


def check_room(param: str, count: int, limit: int) -> None:
    """Refuse many more ids than could ever be used, before time is spent on them."""
    if count > limit:
        raise too_long(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{count + 1} tokens ({count} in the prompt, 1 in the completion). Please reduce the "
            "length of the prompt or the completion.",
            param,
        )


def too_long(message: str, param: str) -> RequestError:
    """A request that can never fit; the code is the one that client libraries look for."""
    return RequestError(message, param=param, code="context_length_exceeded")
