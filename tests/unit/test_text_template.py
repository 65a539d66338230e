from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from loongd.errors import ModelError, RequestError
from loongd.text.template import ChatTemplate

CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {%- set role = message['role'] %}\n"
    "{{ '<' + role + '>' + message['content'] }}\n"
    "{% endfor %}\n"
    "  {% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|{% endfor %}"
)
PARTS_ONLY = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def render(source: str, *messages: Any, **kwargs: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **kwargs)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_blocks_are_trimmed_as_hugging_face_does() -> None:
    assert render(CHATML, user("hi")) == "<s><user>hi\n<assistant>"
    assert render(CHATML, user("hi"), add_generation_prompt=False) == "<s><user>hi\n"


def test_text_parts_are_joined_unless_the_template_takes_them() -> None:
    assert render(CHATML, user(TWO_PARTS)) == "<s><user>a\nb\n<assistant>"
    assert render(PARTS, user(TWO_PARTS), user("c")) == "ab|c|"
    assert render(PARTS_ONLY, user(TWO_PARTS), user("c")) == "a;b;c;"


def test_content_with_template_syntax_is_only_text() -> None:
    assert render(CHATML, user("{{ 7 * 7 }}")) == "<s><user>{{ 7 * 7 }}\n<assistant>"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([user("x"), user([{"type": "image_url"}])], r"messages\[1\].content\[0\] has type 'image"),
        ([user([{"type": "text"}])], r"messages\[0\].content\[0\].text is not a string"),
        ([user(["x"])], r"messages\[0\].content\[0\] is not an object"),
        ([user(5)], r"messages\[0\].content is neither"),
        ([{"content": "x"}], r"messages\[0\] is not an object with a role"),
        (["x"], r"messages\[0\] is not an object with a role"),
        ([user(None)], r"messages\[0\].content is missing"),
        ([{"role": "system"}], r"messages\[0\].content is missing"),
    ],
)
def test_wrong_messages_are_the_clients_fault(messages: list[Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        render(CHATML, *messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_template_can_refuse() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", user("x"))


def test_sandbox_holds() -> None:
    with pytest.raises(RequestError, match="unsafe"):
        render("{{ messages.__class__.__mro__ }}", user("x"))
    with pytest.raises(RequestError, match="refuses"):
        render("{{ messages.append(1) }}", user("x"))


def test_tools_json_dates_and_loop_controls() -> None:
    tools = [{"name": "f", "description": "<é>"}]
    assert render("{{ tools[0] | tojson }}", user("x"), tools=tools) == (
        '{"name": "f", "description": "<é>"}'
    )
    assert render("{{ strftime_now('%Y') }}", user("x")) == str(datetime.now().astimezone().year)
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(loop, user("x")) == "01"


@pytest.mark.parametrize(
    ("source", "is_told"),
    [
        (CHATML, True),
        ("{% set tools = [] %}{{ tools }}{{ messages[0].content }}", True),
        ("{% if tools is defined and tools %}{{ tools | tojson }}{% endif %}", False),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", False),
        ("{% macro show() %}{{ tools }}{% endmacro %}{{ show() }}", False),
    ],
)
def test_tools_that_a_template_does_not_read_are_told_once(
    source: str, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    template.render([user("x")])
    template.render([user("x")], tools=[])
    assert caplog.records == []
    for _ in range(2):
        template.render([user("x")], tools=[{"name": "f"}])
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    words = "requests give tools, but the chat template does not show them to the model"
    assert told == [("WARNING", words)] * is_told


def test_tool_call_arguments_become_objects() -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.x }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}
    assert render(source, {"role": "assistant", "tool_calls": [call]}) == "3"
    call["function"] = {"name": "f", "arguments": "{x"}
    with pytest.raises(RequestError, match="not JSON"):
        render(source, {"role": "assistant", "tool_calls": [call]})


def test_client_variables_reach_the_template_but_replace_nothing() -> None:
    source = "{{ enable_thinking }}{{ messages | length }}"
    assert render(source, user("x"), enable_thinking=True) == "True1"
    template = ChatTemplate("{{ tools }}{{ bos_token }}", {"bos_token": "<s>"})
    assert template.render([user("x")]) == "None<s>"


def test_broken_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})
