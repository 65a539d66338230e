"""POST /tokenize and /detokenize, in vLLM's shapes.

Knows: that a count here equals `usage.prompt_tokens` of the same prompt or messages.
Does not know: any tokenizer.
"""

from __future__ import annotations

from array import array

from aiohttp import web

from loongd.rest.context import CONTEXT
from loongd.rest.encode import (
    check_model,
    check_room,
    encode_chat,
    encode_text,
    need_tokenizer,
)
from loongd.rest.errors import json_response
from loongd.rest.protocol import DetokenizeBody, TokenizeBody, decode
from loongd.rest.sampling import bad, check_token_ids

_MIN_LIMIT = 131_072
"""Ids that /detokenize takes even where the model's context is shorter."""


async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a prompt or of messages. Raises RequestError."""
    context = request.app[CONTEXT]
    body = decode(await request.read(), TokenizeBody)
    check_model(context, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad("prompt", "or messages must be given, and not both.")
    if body.prompt is not None:
        tokens = await encode_text(
            context,
            body.prompt,
            param="prompt",
            add_special_tokens=body.add_special_tokens is not False,
        )
    else:
        tokens = await encode_chat(
            context,
            body.messages or [],
            tools=body.tools,
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=body.add_special_tokens,
        )
    tokenizer = need_tokenizer(context, "prompt")
    return json_response(
        {
            "count": len(tokens),
            "max_model_len": context.engine.max_model_len,
            "tokens": tokens.tolist(),
            "token_strs": [tokenizer.token_text(token) for token in tokens]
            if body.return_token_strs
            else None,
        }
    )


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included. Raises RequestError."""
    context = request.app[CONTEXT]
    body = decode(await request.read(), DetokenizeBody)
    check_model(context, body.model)
    check_room("tokens", len(body.tokens), max(context.engine.max_model_len, _MIN_LIMIT))
    check_token_ids("tokens", body.tokens, context.vocab_size)
    tokenizer = need_tokenizer(context, "tokens")
    text = tokenizer.decode(array("i", body.tokens), skip_special_tokens=False)
    return json_response({"prompt": text})
