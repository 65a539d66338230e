"""Chat messages as templates expect them.

Knows: OpenAI's shapes of `content` and `tool_calls`, and which parts a text model cannot read.
Does not know: any template.
"""

from __future__ import annotations

from typing import Any

import msgspec

from loongd.errors import RequestError


def normalise(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with string content and, in tool calls, arguments as objects.

    Raises RequestError naming the message that cannot be read.
    """
    if not messages:
        raise RequestError("messages must hold at least one message.", param="messages")
    return [_message(index, message) for index, message in enumerate(messages)]


def _message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role must be a string.", param=f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _content(f"{where}.content", message.get("content"))
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(f"{where}.tool_calls", calls)
    return plain


def _content(where: str, content: object) -> str:
    match content:
        case None:
            return ""
        case str():
            return content
        case list():
            return "\n".join(_part(f"{where}[{i}]", part) for i, part in enumerate(content))
    raise RequestError(f"{where} must be a string or a list of parts.", param=where)


def _part(where: str, part: object) -> str:
    match part:
        case str():
            return part
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case {"type": str(kind)}:
            raise RequestError(
                f"{where} is of type {kind[:64]!r}, but this model reads text only.", param=where
            )
    raise RequestError(f'{where} must look like {{"type": "text", "text": ...}}.', param=where)


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        match call:
            case {"function": {"name": str(), "arguments": str(text)} as function}:
                arguments = _arguments(f"{where}[{index}].function.arguments", text)
                plain.append({**call, "function": {**function, "arguments": arguments}})
            case {"function": {"name": str()}}:
                plain.append(call)
            case _:
                raise RequestError(
                    f"{where}[{index}] must have a function with a name.", param=where
                )
    return plain


def _arguments(where: str, text: str) -> object:
    try:
        return msgspec.json.decode(text or "{}")
    except msgspec.DecodeError as error:
        raise RequestError(f"{where} is not valid JSON: {error}.", param=where) from error
