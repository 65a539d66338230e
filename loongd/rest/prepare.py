"""From a request's body to submissions, before the first byte of an answer.

Knows: the order of checks (model, fields, tokens, context length) and what a missing max_tokens
means. Does not know: how text becomes tokens, how answers look.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from dataclasses import dataclass

from loongd.errors import RequestError
from loongd.rest import sampling as fields
from loongd.rest.context import RestContext
from loongd.rest.encode import (
    check_model,
    check_room,
    encode_chat,
    encode_text,
    need_tokenizer,
    too_long,
)
from loongd.rest.protocol import ChatBody, CompletionBody, GenerationBody
from loongd.rest.stream.answer import Answer, TextOptions
from loongd.submission import Submission, TokenStream
from loongd.wire import Sampling

COMPLETION_MAX_TOKENS = 16
MAX_CHOICES = 1024
"""Most answers of one call: prompts times n."""
_SUBMIT_BURST = 16


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request: its submissions (prompt by prompt, `n` each) and how to answer it."""

    response_id: str
    created: int
    model: str
    prompts: list[array[int]]
    submissions: list[Submission]
    n: int
    text: TextOptions
    num_logprobs: int | None
    return_token_ids: bool
    include_usage: bool
    continuous_usage: bool
    echo: list[str] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once whatever `n` is."""
        return sum(map(len, self.prompts))


@dataclass(frozen=True, slots=True)
class _Fields:
    """What can be checked before the prompt is read."""

    sampling: Sampling
    n: int
    stop_token_ids: frozenset[int]
    text: TextOptions
    max_tokens: int | None
    min_tokens: int


async def prepare_completion(context: RestContext, body: CompletionBody, response_id: str) -> Call:
    """Check a completion and tokenise its prompts. Raises RequestError."""
    if body.logprobs is not None:
        fields.check_range("logprobs", body.logprobs, 0, fields.MAX_LOGPROBS)
        if body.echo:
            raise fields.bad("echo", "cannot be combined with logprobs.")
    checked = _check_fields(context, body, body.max_tokens, body.logprobs)
    if body.best_of is not None and body.best_of != checked.n:
        raise fields.bad("best_of", f"must equal n ({checked.n}), but is {body.best_of}.")
    prompts: list[array[int]] = []
    echo: list[str] = []
    given = _split_prompt(body.prompt)
    if len(given) * checked.n > MAX_CHOICES:
        raise fields.bad(
            "prompt",
            f"and n make {len(given)} x {checked.n} answers; a call may have {MAX_CHOICES}.",
        )
    for prompt in given:
        if isinstance(prompt, str):
            ids = await encode_text(
                context,
                prompt,
                param="prompt",
                add_special_tokens=body.add_special_tokens is not False,
            )
        else:
            check_room("prompt", len(prompt), context.engine.max_model_len)
            fields.check_token_ids("prompt", prompt, context.vocab_size)
            ids = array("i", prompt)
        prompts.append(ids)
        if body.echo:
            tokenizer = need_tokenizer(context, "echo")
            echo.append(
                prompt
                if isinstance(prompt, str)
                else tokenizer.decode(ids, skip_special_tokens=checked.text.skip_special_tokens)
            )
    return _build_call(
        context,
        body,
        checked,
        response_id,
        prompts=prompts,
        param="prompt",
        default_max_tokens=COMPLETION_MAX_TOKENS,
        echo=echo or None,
    )


async def prepare_chat(context: RestContext, body: ChatBody, response_id: str) -> Call:
    """Check a chat completion and tokenise its messages. Raises RequestError."""
    if body.echo:
        raise fields.bad("echo", "is not supported in chat completions.")
    if body.tool_choice not in (None, "none", "auto"):
        raise fields.bad("tool_choice", "must be none or auto; loongd cannot force a tool.")
    checked = _check_fields(context, body, _chat_max_tokens(body), _chat_logprobs(body))
    prompt = await encode_chat(
        context,
        body.messages,
        tools=None if body.tool_choice == "none" else body.tools,
        template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        add_special_tokens=body.add_special_tokens,
    )
    return _build_call(
        context,
        body,
        checked,
        response_id,
        prompts=[prompt],
        param="messages",
        default_max_tokens=None,
    )


async def submit(context: RestContext, call: Call) -> list[Answer]:
    """Hand all submissions to the engine, or none. Raises RequestError when it refuses one."""
    answers: list[Answer] = []
    try:
        for number, submission in enumerate(call.submissions):
            if number % _SUBMIT_BURST == _SUBMIT_BURST - 1:
                await asyncio.sleep(0)  # a call of many choices must not stop everybody else
            stream: TokenStream = context.engine.submit(submission)
            answers.append(
                Answer(
                    stream,
                    prompt=submission.prompt,
                    tokenizer=context.tokenizer,
                    options=call.text,
                )
            )
    except (RequestError, asyncio.CancelledError):
        for answer in answers:
            answer.stream.cancel("error")
        raise
    return answers


def _check_fields(
    context: RestContext,
    body: GenerationBody,
    max_tokens: int | None,
    num_logprobs: int | None,
) -> _Fields:
    check_model(context, body.model)
    if body.stream_options is not None and not body.stream:
        raise fields.bad("stream_options", "may only be given together with stream: true.")
    kind = (body.response_format or {"type": "text"}).get("type")
    if kind != "text":
        raise fields.bad(
            "response_format", f"of type {str(kind)[:64]!r} is not supported, only 'text'."
        )
    if max_tokens is not None and max_tokens < 1:
        raise fields.bad("max_tokens", f"must be at least 1, but is {max_tokens}.")
    min_tokens = body.min_tokens or 0
    if min_tokens < 0:
        raise fields.bad("min_tokens", f"must be at least 0, but is {min_tokens}.")
    tokenizer = context.tokenizer
    eos = frozenset() if tokenizer is None else frozenset(tokenizer.eos_token_ids)
    return _Fields(
        sampling=fields.build_sampling(
            body,
            defaults=context.default_sampling,
            vocab_size=context.vocab_size,
            num_logprobs=num_logprobs,
        ),
        n=fields.count_choices(body),
        stop_token_ids=fields.collect_stop_ids(body, eos, context.vocab_size),
        text=TextOptions(
            stops=_stops(context, body),
            client_stop_ids=frozenset(body.stop_token_ids or ()),
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
        ),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
    )


def _stops(context: RestContext, body: GenerationBody) -> tuple[str, ...]:
    stops = fields.collect_stops(body)
    if stops:
        need_tokenizer(context, "stop")
    return stops


def _chat_max_tokens(body: ChatBody) -> int | None:
    if body.max_completion_tokens is None:
        return body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise fields.bad(
            "max_tokens",
            f"is {body.max_tokens}, but max_completion_tokens is {body.max_completion_tokens}; "
            "send one of them.",
        )
    return body.max_completion_tokens


def _chat_logprobs(body: ChatBody) -> int | None:
    top = body.top_logprobs
    if top is not None:
        fields.check_range("top_logprobs", top, 0, fields.MAX_LOGPROBS)
        if top > 0 and not body.logprobs:
            raise fields.bad("top_logprobs", "needs logprobs: true.")
    return (top or 0) if body.logprobs else None


def _split_prompt(
    prompt: str | list[str | int | list[int]],
) -> list[str] | list[list[int]]:
    match prompt:
        case str():
            return [prompt]
        case []:
            raise fields.bad("prompt", "must not be empty.")
        case [str(), *_]:
            texts = [item for item in prompt if isinstance(item, str)]
            if len(texts) == len(prompt):
                return texts
        case [int(), *_]:
            ids = [item for item in prompt if isinstance(item, int)]
            if len(ids) == len(prompt):
                return [ids]
        case _:
            lists = [item for item in prompt if isinstance(item, list)]
            if len(lists) == len(prompt):
                return lists
    raise fields.bad("prompt", "must hold only strings, only token ids, or only lists of them.")


def _build_call(
    context: RestContext,
    body: GenerationBody,
    checked: _Fields,
    response_id: str,
    *,
    prompts: list[array[int]],
    param: str,
    default_max_tokens: int | None,
    echo: list[str] | None = None,
) -> Call:
    single = len(prompts) * checked.n == 1
    submissions: list[Submission] = []
    for prompt in prompts:
        limit, reserve = _limits(context, len(prompt), checked, default_max_tokens, param)
        for choice in range(checked.n):
            submissions.append(
                Submission(
                    request_id=response_id if single else f"{response_id}-{len(submissions)}",
                    prompt=prompt,
                    sampling=fields.with_choice(checked.sampling, choice),
                    max_tokens=limit,
                    reserve_tokens=reserve,
                    stop_token_ids=checked.stop_token_ids,
                    min_tokens=checked.min_tokens,
                )
            )
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    return Call(
        response_id=response_id,
        created=int(time.time()),
        model=context.model_name,
        prompts=prompts,
        submissions=submissions,
        n=checked.n,
        text=checked.text,
        num_logprobs=checked.sampling.num_logprobs,
        return_token_ids=bool(body.return_token_ids),
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        echo=echo,
    )


def _limits(
    context: RestContext,
    num_prompt: int,
    checked: _Fields,
    default_max_tokens: int | None,
    param: str,
) -> tuple[int, int]:
    """(max_tokens, reserve_tokens) of a prompt; raises RequestError when they cannot fit."""
    limit = context.engine.max_model_len
    if num_prompt == 0:
        raise fields.bad(param, "must not be empty.")
    room = limit - num_prompt
    wanted = checked.max_tokens or max(checked.min_tokens, 1)
    if wanted > room:
        raise too_long(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt + wanted} tokens ({num_prompt} in the prompt, {wanted} in the "
            "completion). Please reduce the length of the prompt or the completion.",
            "max_tokens" if checked.max_tokens and room > 0 else param,
        )
    if checked.max_tokens is not None:
        max_tokens = reserve = checked.max_tokens
    elif default_max_tokens is not None:
        max_tokens = reserve = min(default_max_tokens, room)
    else:
        max_tokens, reserve = room, min(room, context.config.default_reserve_tokens)
    if checked.min_tokens > max_tokens:
        raise fields.bad("min_tokens", f"is {checked.min_tokens}, but max_tokens is {max_tokens}.")
    return max_tokens, reserve
