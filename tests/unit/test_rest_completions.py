import pytest
from rest_kit import EOS, FakeEngine, error_of, events_of, ids, packed, prompt_of, say, serve

from loongd.errors import RequestError
from loongd.submission import Token

URL = "/v1/completions"


async def choices_of(client, **body):
    response = await client.post(URL, json=body)
    assert response.status == 200, await response.text()
    return (await response.json())["choices"]


async def test_a_whole_answer_to_a_string():
    engine = FakeEngine()
    async with serve(engine) as client:
        body = await (await client.post(URL, json={"prompt": "hi"})).json()
    assert body["id"] == engine.submissions[0].request_id
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    choice = {
        "index": 0,
        "text": "hello",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["choices"] == [choice]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 6
    assert prompt_of(engine.submissions[0]) == "<s>hi"
    assert engine.submissions[0].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        (["a", "bc"], [[0, *ids("a")], [0, *ids("bc")]]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_the_four_kinds_of_prompt(prompt, prompts):
    engine = FakeEngine()
    async with serve(engine) as client:
        response = await client.post(URL, json={"prompt": prompt, "n": 2})
        body = await response.json()
    assert [s.prompt for s in engine.submissions] == [packed(*p) for p in prompts for _ in "12"]
    assert [c["index"] for c in body["choices"]] == list(range(2 * len(prompts)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize(
    ("prompt", "part"),
    [
        ([], "empty"),
        ("", "empty"),
        ([[]], "empty"),
        ([[1], []], "empty"),
        ([1, "a"], "only strings"),
        (["a", 1], "only strings"),
        ([[1], 2], "only strings"),
        ([300], "token id 300"),
        ([-1], "token id -1"),
        ([2**40], f"token id {2**40}"),
        ({"a": 1}, "got `object`"),
        (None, "got `null`"),
        ([True], "got `bool`"),
    ],
)
async def test_a_wrong_prompt(prompt, part):
    engine = FakeEngine()
    async with serve(engine) as client:
        body = {"prompt": prompt, "add_special_tokens": False}
        error = await error_of(await client.post(URL, json=body), 400)
    assert part in error["message"]
    assert error["param"].startswith("prompt")
    assert engine.submissions == []


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("suffix", {"suffix": "x"}),
        ("best_of", {"best_of": 2}),
        ("logprobs", {"logprobs": 21}),
        ("logprobs", {"logprobs": -1}),
        ("echo", {"echo": True, "logprobs": 1}),
        ("use_beam_search", {"use_beam_search": True}),
    ],
)
async def test_a_wrong_field(field, body):
    async with serve(FakeEngine()) as client:
        error = await error_of(await client.post(URL, json={"prompt": "a", **body}), 400)
    assert error["param"] == field


async def test_neutral_values_of_refused_fields_are_fine():
    async with serve(FakeEngine()) as client:
        body = {"prompt": "a", "suffix": None, "best_of": 1, "use_beam_search": False, "n": 1}
        assert (await client.post(URL, json=body)).status == 200


async def test_exact_boundaries_of_the_context():
    engine = FakeEngine(max_model_len=100)
    async with serve(engine) as client:

        async def send(num_prompt, max_tokens=None):
            body = {"prompt": [5] * num_prompt, "max_tokens": max_tokens}
            return await client.post(URL, json=body)

        assert (await send(90, 10)).status == 200
        response = await send(90, 11)
        error = await error_of(response, 400)
        assert error["code"] == "context_length_exceeded"
        assert response.headers["x-should-retry"] == "false"
        assert error["message"].startswith(
            "This model's maximum context length is 100 tokens. However, you requested 101 tokens "
            "(90 in the prompt, 11 in the completion)."
        )
        assert (await send(99)).status == 200
        assert engine.submissions[-1].max_tokens == 1
        for num_prompt in (100, 101):
            error = await error_of(await send(num_prompt), 400)
            assert f"({num_prompt} in the prompt, 1 in the completion)" in error["message"]
        assert (await send(5)).status == 200
    assert [len(s.prompt) for s in engine.submissions] == [90, 99, 5]


async def test_a_hopelessly_long_text_is_refused_without_tokenising():
    async with serve(FakeEngine(max_model_len=10)) as client:
        response = await client.post(URL, json={"prompt": "x" * 2561, "stream": True})
        error = await error_of(response, 400)
    assert error["code"] == "context_length_exceeded"
    assert "2561 characters" in error["message"]
    assert "maximum context length is 10 tokens" in error["message"]


async def test_echo_whole_and_in_a_stream():
    async with serve(FakeEngine()) as client:
        assert (await choices_of(client, prompt="hi ", echo=True))[0]["text"] == "hi hello"
        assert (await choices_of(client, prompt=ids("ab"), echo=True))[0]["text"] == "abhello"
        response = await client.post(URL, json={"prompt": "hi ", "echo": True, "stream": True})
        events = await events_of(response)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "hi hello"


async def test_a_stream_of_two_prompts_with_usage():
    engine = FakeEngine(lambda s: (ids("x" * len(s.prompt)), "length"))
    body = {
        "prompt": [[5, 6], [7]],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    async with serve(engine) as client:
        events = await events_of(await client.post(URL, json=body))
    assert events.pop() == "[DONE]"
    last = events.pop()
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["completion_tokens"] == 3
    choices = [e["choices"][0] for e in events]
    for index, prompt in enumerate(body["prompt"]):
        own = [c for c in choices if c["index"] == index]
        assert own[0]["prompt_token_ids"] == prompt
        assert "".join(c["text"] for c in own) == "x" * len(prompt)
        assert [c["finish_reason"] for c in own][-1] == "length"
        assert [i for c in own for i in c["token_ids"]] == ids("x" * len(prompt))


async def test_logprobs():
    a, b = ids("AB")
    tokens = [Token(a, -0.5, ((b, -0.4), (a, -0.5))), Token(b, -1.5, ((a, -0.1), (b, -1.5)))]
    async with serve(FakeEngine(lambda s: (tokens, "length"))) as client:
        [choice] = await choices_of(client, prompt="x", logprobs=1)
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -1.5],
        "tokens": ["A", "B"],
        "top_logprobs": [{"B": -0.4, "A": -0.5}, {"A": -0.1, "B": -1.5}],
    }


async def test_half_a_character_at_the_end_of_the_prompt_adds_only_new_text():
    pepper = ids("\N{HOT PEPPER}")
    async with serve(FakeEngine(lambda s: ([*pepper[2:], *ids("!")], "length"))) as client:
        body = {"prompt": [*ids("Hello world "), *pepper[:2]], "stream": True}
        events = await events_of(await client.post(URL, json=body))
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "\N{HOT PEPPER}!"


async def test_special_tokens_are_shown_on_request():
    async with serve(FakeEngine(lambda s: ([EOS, *ids("a")], "length"))) as client:
        assert (await choices_of(client, prompt="x"))[0]["text"] == "a"
        [choice] = await choices_of(client, prompt="x", skip_special_tokens=False)
    assert choice["text"] == "</s>a"


async def test_without_a_tokenizer_token_ids_go_in_and_out():
    engine = FakeEngine(lambda s: ([7, Token(8, -1.0, ((9, -0.5),))], "length"))
    async with serve(engine, tokenizer=None) as client:
        [choice] = await choices_of(client, prompt=[5], return_token_ids=True, logprobs=1)
        assert (choice["text"], choice["token_ids"]) == ("", [7, 8])
        assert choice["prompt_token_ids"] == [5]
        assert choice["logprobs"]["tokens"] == ["token_id:7", "token_id:8"]
        body = {"prompt": [5], "stream": True}
        events = await events_of(await client.post(URL, json=body))
        assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None, "length"]
        for wrong in ({"prompt": "x"}, {"prompt": [5], "echo": True}, {"prompt": [5], "stop": "x"}):
            error = await error_of(await client.post(URL, json=wrong), 400)
            assert "token ids" in error["message"]
        chat = {"messages": [{"role": "user", "content": "x"}]}
        error = await error_of(await client.post("/v1/chat/completions", json=chat), 400)
        assert error["param"] == "messages"


async def test_a_refused_submission_takes_the_others_back():
    engine = FakeEngine(say("x", None))
    async with serve(engine) as client:
        from_engine = {"status": 503, "retry_after_s": 7, "code": "queue_full"}
        engine.refuse = RequestError("The queue is full.", **from_engine)
        engine.refuse_after = 2
        response = await client.post(URL, json={"prompt": "x", "n": 3, "stream": True})
        error = await error_of(response, 503)
    assert response.headers["Retry-After"] == "7"
    assert response.headers["Connection"] == "close"
    assert (error["type"], error["code"]) == ("service_unavailable", "queue_full")
    assert engine.cancelled == [(s.request_id, "error") for s in engine.submissions]
    assert len(engine.submissions) == 2
