from unittest.mock import ANY

import pytest
from rest_kit import (
    EOS,
    MODEL,
    FakeEngine,
    error_of,
    events_of,
    ids,
    prompt_of,
    say,
    serve,
)

from loongd import __version__
from loongd.submission import Token

URL = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def text_of(events, index=0):
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        if isinstance(event, dict)
        for choice in event.get("choices", [])
        if choice["index"] == index
    )


async def test_a_whole_answer():
    engine = FakeEngine()
    async with serve(engine) as client:
        response = await client.post(URL, json={"model": MODEL, "messages": HI})
        body = await response.json()
    assert response.status == 200
    assert int(response.headers["openai-processing-ms"]) >= 0
    assert body == {
        "id": engine.submissions[0].request_id,
        "object": "chat.completion",
        "created": ANY,
        "model": MODEL,
        "system_fingerprint": f"loongd-{__version__}",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len("<[user]hi[assistant]"),
            "completion_tokens": 6,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }
    assert body["id"].startswith("chatcmpl-")
    assert prompt_of(engine.submissions[0]) == "<s>[user]hi[assistant]"


async def test_a_stream_has_role_text_end_and_done():
    engine = FakeEngine()
    async with serve(engine) as client:
        response = await client.post(URL, json={"messages": HI, "stream": True})
        events = await events_of(response)
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    assert events.pop() == "[DONE]"
    deltas = [(e["choices"][0]["delta"], e["choices"][0]["finish_reason"]) for e in events]
    # The five tokens were there already, so they are one chunk.
    assert deltas == [
        ({"role": "assistant", "content": ""}, None),
        ({"content": "hello"}, None),
        ({}, "stop"),
    ]
    assert {e["id"] for e in events} == {engine.submissions[0].request_id}
    assert all("usage" not in e for e in events)


async def test_stream_usage_of_two_choices_is_one_last_chunk():
    script = lambda s: (ids("one" if s.sampling.seed == 5 else "three"), "eos")  # noqa: E731
    engine = FakeEngine(script)
    body = {
        "messages": HI,
        "stream": True,
        "n": 2,
        "seed": 5,
        "stream_options": {"include_usage": True},
    }
    async with serve(engine) as client:
        events = await events_of(await client.post(URL, json=body))
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 20
    assert last["usage"]["completion_tokens"] == 4 + 6
    assert all(e["usage"] is None for e in events)
    assert [text_of(events, i) for i in (0, 1)] == ["one", "three"]
    assert [s.sampling.seed for s in engine.submissions] == [5, 6]
    first, second = (s.request_id for s in engine.submissions)
    assert (first, second) == (f"{last['id']}-0", f"{last['id']}-1")


async def test_continuous_usage_counts_up():
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with serve(FakeEngine()) as client:
        body = {"messages": HI, "stream": True, "stream_options": options}
        events = await events_of(await client.post(URL, json=body))
    counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
    assert counts == [5, 5, 6, 6]


async def test_max_tokens_end_with_length_and_reserve_only_the_default():
    engine = FakeEngine(say("abc", "length"))
    async with serve(engine, config={"default_reserve_tokens": 30}) as client:
        body = await (await client.post(URL, json={"messages": HI, "max_tokens": 3})).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 3
        await client.post(URL, json={"messages": HI, "max_completion_tokens": 60})
        await client.post(URL, json={"messages": HI})
    limits = [(s.max_tokens, s.reserve_tokens) for s in engine.submissions]
    assert limits == [(3, 3), (60, 60), (80, 30)]


async def test_a_stop_string_is_held_back_and_never_leaks():
    engine = FakeEngine(say("ABCDEFGHIJKL", None))
    async with serve(engine) as client:
        body = {"messages": HI, "stream": True, "stop": "DEFGHIJ"}
        events = await events_of(await client.post(URL, json=body))
        whole = await (await client.post(URL, json={"messages": HI, "stop": ["x", "DE"]})).json()
    assert text_of(events) == "ABC"
    end = events[-2]["choices"][0]
    assert (end["finish_reason"], end["stop_reason"]) == ("stop", "DEFGHIJ")
    assert whole["choices"][0]["message"]["content"] == "ABC"
    # ABCDE: what was drawn until the stop string was complete.
    assert whole["usage"]["completion_tokens"] == 5
    assert engine.cancelled == [(s.request_id, "stop") for s in engine.submissions]


async def test_a_stop_string_may_end_within_a_token_and_be_included():
    b_comma = 258
    engine = FakeEngine(lambda s: ([*ids("a"), b_comma, *ids("cd")], None))
    async with serve(engine) as client:
        for include, text in ((False, "a"), (True, "ab,c")):
            body = {"messages": HI, "stop": ["b,c"], "include_stop_str_in_output": include}
            answer = await (await client.post(URL, json=body)).json()
            assert answer["choices"][0]["message"]["content"] == text


async def test_text_that_looked_like_a_stop_string_comes_out_at_the_end():
    async with serve(FakeEngine(say("xDEF"))) as client:
        body = {"messages": HI, "stream": True, "stop": "DEFG"}
        events = await events_of(await client.post(URL, json=body))
    assert text_of(events) == "xDEF"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_character_split_over_tokens_is_one_piece():
    pepper = ids("a\N{HOT PEPPER}b")
    engine = FakeEngine(lambda s: (pepper[:3], None))
    async with serve(engine) as client:
        request = client.post(URL, json={"messages": HI, "stream": True})
        async with request as response:
            stream = engine.streams[engine.submissions[-1].request_id]
            frames = [await response.content.readuntil(b"\n\n") for _ in range(2)]
            assert b'"content":"a"' in frames[1]
            for token in pepper[3:]:
                stream.put_token(Token(token))
            engine.end(stream, "length")
            rest = (await response.content.read()).decode()
    assert '"content":"\N{HOT PEPPER}b"' in rest
    assert "\ufffd" not in rest


async def test_logprobs_of_tokens_and_alternatives():
    tokens = [Token(ids("A")[0], -0.5, ((ids("A")[0], -0.5), (ids("B")[0], float("-inf"))))]
    engine = FakeEngine(lambda s: (tokens, "length"))
    async with serve(engine) as client:
        body = {"messages": HI, "logprobs": True, "top_logprobs": 2}
        answer = await (await client.post(URL, json=body)).json()
    assert engine.submissions[0].sampling.num_logprobs == 2
    entry_a = {"token": "A", "logprob": -0.5, "bytes": [65]}
    entry_b = {"token": "B", "logprob": -9999.0, "bytes": [66]}
    assert answer["choices"][0]["logprobs"] == {
        "content": [{**entry_a, "top_logprobs": [entry_a, entry_b]}]
    }


async def test_token_ids_on_request_include_the_stop_token():
    engine = FakeEngine(say("ab"))
    async with serve(engine) as client:
        body = {"messages": HI, "return_token_ids": True}
        answer = await (await client.post(URL, json=body)).json()
        events = await events_of(await client.post(URL, json={**body, "stream": True}))
    assert answer["prompt_token_ids"] == engine.submissions[0].prompt.tolist()
    assert answer["choices"][0]["token_ids"] == [*ids("ab"), EOS]
    assert answer["usage"]["completion_tokens"] == 3
    streamed = [i for e in events[:-1] for i in e["choices"][0].get("token_ids", [])]
    assert streamed == [*ids("ab"), EOS]


async def test_a_clients_stop_token_is_the_stop_reason():
    engine = FakeEngine(say("ab", None))
    stop = ids("z")[0]

    async with serve(engine) as client:
        request = client.post(URL, json={"messages": HI, "stop_token_ids": [stop], "stream": True})
        async with request as response:
            stream = engine.streams[engine.submissions[0].request_id]
            assert engine.submissions[0].stop_token_ids == {EOS, stop}
            stream.stop_token = stop
            stream.put_end("stop")
            events = await events_of(response)
    assert events[-2]["choices"][0]["stop_reason"] == stop


async def test_ignore_eos_min_tokens_and_sampling_reach_the_engine():
    engine = FakeEngine()
    body = {
        "messages": HI,
        "ignore_eos": True,
        "min_tokens": 2,
        "temperature": 0,
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -100, "8": 5.5},
        "seed": -1,
        "user": None,
        "stop": None,
        "an_unknown_field": {"x": 1},
    }
    async with serve(engine, default_sampling={"top_p": 0.9, "min_p": 0.3}) as client:
        assert (await client.post(URL, json=body)).status == 200
        assert (await client.post(URL, json={"messages": HI})).status == 200
    first, second = engine.submissions
    assert first.stop_token_ids == frozenset()
    assert first.min_tokens == 2
    assert first.sampling.temperature == 0
    assert (first.sampling.top_k, first.sampling.top_p, first.sampling.min_p) == (0, 0.5, 0.1)
    assert first.sampling.bias == [(7, -100.0), (8, 5.5)]
    assert first.sampling.seed == 2**63 - 1
    assert first.sampling.repetition_penalty == 1.5
    assert (second.sampling.temperature, second.sampling.top_p) == (1.0, 0.9)
    assert second.sampling.min_p == 0.3
    assert 0 <= second.sampling.seed < 2**63
    assert second.sampling.num_logprobs is None


async def test_tools_reach_the_template_unless_refused():
    engine = FakeEngine(max_model_len=500)
    tools = [{"type": "function", "function": {"name": "look"}}]
    async with serve(engine) as client:
        await client.post(URL, json={"messages": HI, "tools": tools})
        await client.post(URL, json={"messages": HI, "tools": tools, "tool_choice": "none"})
        body = {"messages": HI, "tools": tools, "tool_choice": "required"}
        error = await error_of(await client.post(URL, json=body), 400)
    assert '"look"' in prompt_of(engine.submissions[0])
    assert '"look"' not in prompt_of(engine.submissions[1])
    assert error["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("min_tokens", 4),
        ("top_logprobs", 21),
        ("top_logprobs", 3),
        ("stop", ["x"] * 17),
        ("stop", ""),
        ("stop_token_ids", [300]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"1" * 5000: 1}),
        ("logit_bias[3]", {"3": 101}),
        ("response_format", {"type": "json_object"}),
        ("continue_final_message", True),
        ("structured_outputs", {"json": {}}),
        ("audio", {"voice": "alloy", "format": "wav"}),
        ("echo", True),
        ("function_call", {"name": "f"}),
        ("guided_regex", "a*"),
        ("length_penalty", 1.1),
        ("length_penalty", True),
        ("modalities", ["text", "audio"]),
        ("priority", 1),
        ("prompt_logprobs", 0),
        ("reasoning_effort", "high"),
        ("service_tier", "priority"),
        ("store", True),
        ("use_beam_search", 1),
        ("verbosity", "low"),
        ("web_search_options", {}),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("messages", [{"content": "x"}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url"}]}]),
        ("messages", "hi"),
        ("chat_template_kwargs", {"self": 1}),
        ("seed", 2**64),
        ("stream", "yes"),
    ],
)
async def test_a_wrong_field_is_refused_by_name(field, value):
    engine = FakeEngine()
    body = {"messages": HI, "max_tokens": 3, field.partition("[")[0]: value}
    async with serve(engine) as client:
        error = await error_of(await client.post(URL, json=body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert field.partition("[")[0] in error["message"]
    assert engine.submissions == []


async def test_fields_that_ask_for_nothing_are_fine():
    """Defaults of OpenAI and vLLM, as clients send them; hints, names and notes."""
    body = {
        "messages": HI,
        "audio": None,
        "early_stopping": 0,
        "best_of": 2,
        "cache_salt": "s",
        "echo": False,
        "function_call": "auto",
        "functions": [],
        "guided_json": None,
        "length_penalty": 1.0,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "x"},
        "priority": 0,
        "prompt_cache_key": "k",
        "prompt_logprobs": None,
        "reasoning_effort": "medium",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "truncate_prompt_tokens": None,
        "use_beam_search": False,
        "verbosity": "medium",
        "web_search_options": None,
    }
    async with serve(FakeEngine()) as client:
        assert (await client.post(URL, json=body)).status == 200


async def test_a_refusal_says_what_would_be_fine():
    async with serve(FakeEngine()) as client:
        body = {"messages": HI, "service_tier": "flex"}
        error = await error_of(await client.post(URL, json=body), 400)
        assert error["code"] == "unsupported_parameter"
        expected = 'service_tier is not supported by loongd, except "auto" or "default".'
        assert error["message"] == expected
        error = await error_of(await client.post(URL, json={"messages": HI, "store": True}), 400)
        assert error["message"] == "store is not supported by loongd."


async def test_content_parts_are_joined():
    engine = FakeEngine()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    async with serve(engine) as client:
        await client.post(URL, json={"messages": [{"role": "user", "content": parts}]})
    assert prompt_of(engine.submissions[0]) == "<s>[user]a\nb[assistant]"
