"""Chat templates: from messages to the text of a prompt.

Knows: the Jinja environment that Hugging Face chat templates are written for, and OpenAI's
message shapes. Does not know: tokens, HTTP, where templates come from.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loongd.errors import ModelError, RequestError

_log = logging.getLogger(__name__)

Message = Mapping[str, Any]

# What a template may raise when messages are not what it expects.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_PROBE = "loongd-probe"


class ChatTemplate:
    """One compiled template.

    Args:
        source: the Jinja text.
        special_tokens: `bos_token`, `eos_token` and the like, as the template names them.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            names = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from error
        # Whether a request with tools is still to be told of in the log.
        self._drops_tools = "tools" not in names
        self._special_tokens = dict(special_tokens)
        self._takes_parts = self._renders_probe([{"type": "text", "text": _PROBE}])
        self._takes_strings = self._renders_probe(_PROBE) or not self._takes_parts

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text.

        Args:
            messages: OpenAI's messages; `content` is a string, a list of text parts, or None.
            add_generation_prompt: end with the start of an assistant message.
            tools: OpenAI's tools, for templates that show them.
            kwargs: further variables; they cannot replace the ones above.

        Raises:
            RequestError: a message has the wrong shape, or the template refuses it.
        """
        if tools and self._drops_tools:
            self._drops_tools = False
            _log.warning(
                "requests give tools, but the chat template does not show them to the model"
            )
        plain = [self._plain(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return self._render(plain, add_generation_prompt, tools, kwargs)
        except _RENDER_ERRORS as error:
            text = str(error) or type(error).__name__
            raise RequestError(
                f"the chat template refuses these messages: {text}", param="messages"
            ) from error

    def _render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        variables = {
            "documents": None,
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(variables)

    def _renders_probe(self, content: Any) -> bool:
        """Whether a message with this content comes out as its text, not as a list's repr."""
        try:
            text = self._render([{"role": "user", "content": content}], True, None, {})
        except _RENDER_ERRORS:
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text

    def _plain(self, message: Message, where: str) -> Message:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"{where} is not an object with a role", param="messages")
        plain = dict(message)
        content = plain.setdefault("content", None)
        match content:
            case None if plain["role"] == "assistant":
                pass  # its words may be tool calls
            case None:
                raise RequestError(f"{where}.content is missing", param="messages")
            case str():
                if not self._takes_strings:
                    plain["content"] = [{"type": "text", "text": content}]
            case list():
                texts = [_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
                if not self._takes_parts:
                    plain["content"] = "\n".join(texts)
            case _:
                raise RequestError(
                    f"{where}.content is neither a string nor a list of parts", param="messages"
                )
        if plain.get("tool_calls"):
            plain["tool_calls"] = _with_parsed_arguments(plain["tool_calls"], where)
        return plain


def _text_of(part: Any, where: str) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise RequestError(f"{where}.text is not a string", param="messages")
        case {"type": kind}:
            raise RequestError(
                f"{where} has type {kind!r}; this model takes 'text' alone", param="messages"
            )
    raise RequestError(f"{where} is not an object with a type", param="messages")


def _with_parsed_arguments(tool_calls: Any, where: str) -> list[Any]:
    """Tool calls with `arguments` as an object, which templates expect; OpenAI sends a string."""
    parsed = []
    for call in tool_calls if isinstance(tool_calls, list) else [tool_calls]:
        match call:
            case {"function": {"arguments": str(text)} as function}:
                parsed.append({**call, "function": {**function, "arguments": _parsed(text, where)}})
            case {}:
                parsed.append(call)
            case _:
                raise RequestError(f"{where}.tool_calls holds a non-object", param="messages")
    return parsed


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError as error:
        raise RequestError(
            f"{where}.tool_calls has arguments that are not JSON: {error}", param="messages"
        ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
