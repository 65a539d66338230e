import asyncio

import pytest
from rest_kit import FakeEngine, error_of, events_of, ids, say, serve

from loongd.errors import RequestError
from loongd.submission import Token

URL = "/v1/completions"
BODY = {"prompt": "x", "stream": True}
LOST = RequestError("Instance 1 was lost.", status=500, code="engine_error")


async def test_silence_is_filled_with_comments():
    engine = FakeEngine(say("", None))
    async with (
        serve(engine, config={"sse_keep_alive_interval": 0.01}) as client,
        client.post(URL, json=BODY) as response,
    ):
        for _ in range(2):
            assert await response.content.readuntil(b"\n\n") == b": keep-alive\n\n"
        stream = engine.streams[engine.submissions[0].request_id]
        stream.put_token(Token(ids("a")[0]))
        engine.end(stream, "length")
        events = [e for e in await events_of(response) if e != ": keep-alive"]
    assert [e["choices"][0]["text"] for e in events[:-1]] == ["a", ""]
    assert events[-1] == "[DONE]"


async def test_no_comments_when_they_are_off():
    engine = FakeEngine(say("", None))
    async with serve(engine, config={"sse_keep_alive_interval": 0}) as client:
        request = asyncio.create_task(client.post(URL, json=BODY))
        await engine.wait_for(lambda: bool(engine.submissions))
        done, _ = await asyncio.wait([request], timeout=0.05)
        assert not done
        engine.end(engine.streams[engine.submissions[0].request_id], "length")
        events = await events_of(await request)
    assert len(events) == 2


async def test_a_failure_before_the_first_token_keeps_its_status():
    async with serve(FakeEngine(say("", LOST))) as client:
        error = await error_of(await client.post(URL, json=BODY), 500)
    assert error["message"] == "Instance 1 was lost."
    assert (error["type"], error["code"]) == ("server_error", "engine_error")


async def test_a_failure_after_a_comment_is_an_event():
    engine = FakeEngine(say("", None))
    async with (
        serve(engine, config={"sse_keep_alive_interval": 0.01}) as client,
        client.post(URL, json=BODY) as response,
    ):
        await response.content.readuntil(b"\n\n")
        engine.end(engine.streams[engine.submissions[0].request_id], LOST)
        events = [e for e in await events_of(response) if e != ": keep-alive"]
    assert events[0]["error"]["message"] == "Instance 1 was lost."
    assert events[1:] == ["[DONE]"]


async def test_a_failure_in_mid_stream_is_an_event_and_ends_the_other_choices():
    engine = FakeEngine(lambda s: (ids("ab"), LOST if s.request_id.endswith("-0") else None))
    async with serve(engine) as client:
        events = await events_of(await client.post(URL, json={**BODY, "n": 2}))
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["code"] == "engine_error"
    assert [request_id[-2:] for request_id, _ in engine.cancelled] == ["-1"]


async def test_a_failure_without_stream_has_its_status_and_frees_the_rest():
    engine = FakeEngine(lambda s: (ids("ab"), LOST if s.request_id.endswith("-0") else None))
    async with serve(engine) as client:
        await error_of(await client.post(URL, json={"prompt": "x", "n": 2}), 500)
    assert engine.cancelled == [(engine.submissions[1].request_id, "error")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_waiting_frees_its_requests(stream):
    engine = FakeEngine(say("", None))
    async with serve(engine) as client:
        body = {"prompt": "x", "n": 2, "stream": stream}
        request = asyncio.create_task(client.post(URL, json=body))
        await engine.wait_for(lambda: len(engine.submissions) == 2)
        request.cancel()
        await asyncio.wait([request])
        await engine.wait_for(lambda: len(engine.cancelled) == 2)
    assert sorted(engine.cancelled) == [(s.request_id, "client") for s in engine.submissions]


async def test_a_client_that_leaves_in_mid_stream_frees_its_request():
    engine = FakeEngine(say("abc", None))
    async with serve(engine) as client:
        async with client.post(URL, json=BODY) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await engine.wait_for(lambda: bool(engine.cancelled))
    assert engine.cancelled == [(engine.submissions[0].request_id, "client")]


async def test_an_answer_that_ended_is_not_cancelled():
    engine = FakeEngine()
    async with serve(engine) as client:
        await events_of(await client.post(URL, json=BODY))
        await client.post(URL, json={"prompt": "x"})
    assert engine.cancelled == []


async def test_an_engine_that_gives_another_reason_makes_an_error():
    async with serve(FakeEngine(say("ab", "cancelled"))) as client:
        answer = await (await client.post(URL, json={"prompt": "x"})).json()
    assert answer["choices"][0]["finish_reason"] == "error"


async def test_text_that_comes_later_is_a_later_chunk():
    engine = FakeEngine(say("ab", None))
    async with (
        serve(engine) as client,
        client.post(URL, json=BODY) as response,
    ):
        assert b'"text":"ab"' in await response.content.readuntil(b"\n\n")
        stream = engine.streams[engine.submissions[0].request_id]
        for token in ids("cd"):
            stream.put_token(Token(token))
        assert b'"text":"cd"' in await response.content.readuntil(b"\n\n")
        engine.end(stream, "eos")
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
