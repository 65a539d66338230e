"""SGLang's own fields: refused where they ask for anything, fine with their defaults."""

import pytest
from rest_kit import FakeEngine, error_of, serve

BODIES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("custom_logit_processor", "x"),
        ("detokenize", False),
        ("ebnf", 'root ::= "a"'),
        ("json_schema", "{}"),
        ("lora_path", "/adapter"),
        ("max_new_tokens", 5),
        ("min_new_tokens", 1),
        ("no_repeat_ngram_size", 3),
        ("no_stop_trim", True),
        ("regex", "a*"),
        ("return_hidden_states", "last"),
        ("session_params", {"id": "s"}),
        ("stop_regex", "a+"),
        ("typical_p", 0.5),
        ("typical_p", True),
    ],
)
async def test_what_would_change_the_answer_is_refused_by_name(path, field, value):
    engine = FakeEngine()
    async with serve(engine) as client:
        error = await error_of(await client.post(path, json=BODIES[path] | {field: value}), 400)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert engine.submissions == []


@pytest.mark.parametrize("path", BODIES)
async def test_defaults_ask_for_nothing(path):
    nothing = dict.fromkeys(("custom_logit_processor", "ebnf", "json_schema", "lora_path", "regex"))
    nothing |= {"min_new_tokens": 0, "no_stop_trim": False, "return_hidden_states": False}
    nothing |= {"session_params": {}, "stop_regex": [], "max_new_tokens": None, "detokenize": True}
    nothing |= {"no_repeat_ngram_size": 0, "typical_p": 1.0}
    async with serve(FakeEngine()) as client:
        assert (await client.post(path, json=BODIES[path] | nothing)).status == 200
        absent = BODIES[path] | {"detokenize": None, "typical_p": None}
        assert (await client.post(path, json=absent)).status == 200
