"""The API as OpenAI's own client sees it."""

from contextlib import asynccontextmanager

import openai
import pytest
from aiohttp.test_utils import TestServer
from rest_kit import MODEL, FakeEngine, ids, make_context, say

from loongd.errors import RequestError
from loongd.rest.app import make_app

HI = [{"role": "user", "content": "hi"}]
KEY = "sk-tiny"


@asynccontextmanager
async def connect(engine, key=KEY):
    context = make_context(engine, config={"api_key": [KEY]})
    async with TestServer(make_app(context)) as server:
        url = str(server.make_url("/v1"))
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            yield client


async def test_chat_and_models():
    async with connect(FakeEngine()) as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == [MODEL]
        assert (await client.models.retrieve(MODEL)).max_model_len == 100
        answer = await client.chat.completions.create(model=MODEL, messages=HI)
        assert answer.choices[0].message.content == "hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.total_tokens == 26
        assert answer._request_id
        text = await client.completions.create(model=MODEL, prompt="x", max_tokens=5)
        assert text.choices[0].text == "hello"


async def test_streams():
    async with connect(FakeEngine()) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, n=2, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 12
        texts = ["", ""]
        for chunk in chunks[:-1]:
            assert chunk.usage is None
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == ["hello", "hello"]
        stream = await client.completions.create(model=MODEL, prompt="x", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello"


async def test_errors_before_the_answer():
    engine = FakeEngine()
    async with connect(engine) as client:
        create = client.chat.completions.create
        with pytest.raises(openai.BadRequestError, match="maximum context length") as bad:
            await create(model=MODEL, messages=HI, max_tokens=81, stream=True)
        assert bad.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="other", messages=HI)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await create(model=MODEL, messages=HI, temperature=-1)
        assert wrong.value.param == "temperature"
        engine.refuse = RequestError("Draining.", status=503, retry_after_s=3)
        with pytest.raises(openai.InternalServerError) as busy:
            await create(model=MODEL, messages=HI)
        assert busy.value.status_code == 503
    async with connect(engine, key="wrong") as client:
        with pytest.raises(openai.AuthenticationError) as refused:
            await client.models.list()
        assert refused.value.code == "invalid_api_key"


async def test_an_error_in_mid_stream_is_raised():
    lost = RequestError("Instance 1 was lost.", status=500)
    async with connect(FakeEngine(say("ab", lost))) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        seen = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        with pytest.raises(openai.APIError, match=r"Instance 1 was lost\."):
            await anext(stream)
    assert seen == ["", "ab"]


async def test_logprobs_parse():
    async with connect(FakeEngine(lambda s: (ids("a"), "length"))) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=HI, logprobs=True, top_logprobs=1
        )
        assert answer.choices[0].logprobs.content[0].token == "a"


async def test_leaving_a_stream_frees_the_request():
    engine = FakeEngine(say("ab", None))
    async with connect(engine) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        await engine.wait_for(lambda: bool(engine.cancelled))
    assert engine.cancelled == [(engine.submissions[0].request_id, "client")]
