import json

import pytest
from aiohttp.test_utils import TestClient, TestServer
from rest_kit import MODEL, FakeEngine, error_of, ids, make_context, make_tokenizer, say, serve

from loongd import __version__
from loongd.config import Config
from loongd.errors import ConfigError, RequestError
from loongd.rest.app import make_admin_app, make_app

HI = [{"role": "user", "content": "hi"}]
COMPLETIONS = "/v1/completions"


async def test_request_ids_are_echoed_and_made_unique(caplog):
    caplog.set_level("DEBUG", "loongd.rest")
    engine = FakeEngine()
    async with serve(engine) as client:
        headers = {"x-request-id": "my-id.1"}
        answers = []
        for _ in range(2):
            response = await client.post(COMPLETIONS, json={"prompt": "x"}, headers=headers)
            assert response.headers["x-request-id"] == "my-id.1"
            answers.append((await response.json())["id"])
        assert all(a.startswith("cmpl-my-id.1-") for a in answers)
        assert answers[0] != answers[1]
        assert answers == [s.request_id for s in engine.submissions]

        response = await client.post(COMPLETIONS, json={"prompt": "x", "stream": True})
        own = response.headers["x-request-id"]
        assert engine.submissions[-1].request_id == f"cmpl-{own}"
        for path in ("/nowhere", "/health"):
            assert (await client.get(path)).headers["x-request-id"]
        bad = await client.get("/health", headers={"x-request-id": "a b" + "c" * 200})
        assert len(bad.headers["x-request-id"]) == 32
        assert f"is replaced by {bad.headers['x-request-id']}" in caplog.text
        assert caplog.text.count("is replaced by") == 1


async def test_unknown_paths_and_methods():
    async with serve(FakeEngine()) as client:
        error = await error_of(await client.get("/nowhere"), 404)
        assert error["type"] == "not_found_error"
        assert "/nowhere" in error["message"]
        response = await client.get(COMPLETIONS)
        error = await error_of(response, 405)
        assert response.headers["Allow"] == "POST"
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b'{"prompt": "\xff"}', "JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "JSON"),
        (b"[1]", "got `array`"),
        (b'{"prompt": "x", "max_tokens": "5"}', "max_tokens: expected `int"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature: number out of range"),
        (b'{"max_tokens": 5}', "prompt is missing"),
        (b'{"prompt": "x", "response_format": {"a": ' + b"[" * 100_000, "nested too deeply"),
    ],
)
async def test_a_body_that_cannot_be_read(data, part):
    async with serve(FakeEngine()) as client:
        error = await error_of(await client.post(COMPLETIONS, data=data), 400)
    assert part in error["message"]


async def test_a_body_that_is_too_large():
    async with serve(FakeEngine(), config={"max_body_bytes": 1000}) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x" * 1000})
        error = await error_of(response, 413)
    assert "1000" in error["message"]
    assert error["message"].endswith("exceeded.")
    assert ".." not in error["message"]


async def test_another_model_is_not_found():
    async with serve(FakeEngine()) as client:
        for path, body in (
            (COMPLETIONS, {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": HI}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [5]}),
        ):
            error = await error_of(await client.post(path, json={**body, "model": "gpt-4"}), 404)
            assert error["code"] == "model_not_found"
            assert "gpt-4" in error["message"]
        await error_of(await client.get("/v1/models/gpt-4"), 404)


async def test_models():
    async with serve(FakeEngine(max_model_len=77), model_name="org/tiny") as client:
        body = await (await client.get("/v1/models")).json()
        card = await (await client.get("/v1/models/org/tiny")).json()
    assert body == {"object": "list", "data": [card]}
    assert (card["id"], card["max_model_len"]) == ("org/tiny", 77)
    assert (card["object"], card["created"]) == ("model", 1_700_000_000)


async def test_tokenize_counts_what_usage_counts():
    engine = FakeEngine()
    async with serve(engine) as client:
        for path, body in (
            (COMPLETIONS, {"prompt": "h\N{HOT PEPPER}"}),
            ("/v1/chat/completions", {"messages": HI}),
        ):
            counted = await (await client.post("/tokenize", json=body)).json()
            answer = await (await client.post(path, json=body)).json()
            assert counted["count"] == answer["usage"]["prompt_tokens"]
            assert counted["tokens"] == engine.submissions[-1].prompt.tolist()
            assert counted["max_model_len"] == 100
            assert counted["token_strs"] is None
        body = {"prompt": "hi", "return_token_strs": True, "add_special_tokens": False}
        counted = await (await client.post("/tokenize", json=body)).json()
        assert counted["token_strs"] == ["h", "i"]
        text = await (await client.post("/detokenize", json={"tokens": [0, *ids("hi")]})).json()
        assert text == {"prompt": "<s>hi"}
        for path, body in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "x", "messages": HI}),
            ("/tokenize", {"messages": HI, "chat_template": "{{ bos_token }}"}),
            ("/detokenize", {"tokens": [300]}),
            ("/detokenize", {"tokens": "x"}),
        ):
            await error_of(await client.post(path, json=body), 400)


async def test_a_model_without_template_says_so():
    async with serve(FakeEngine(), tokenizer=make_tokenizer(None)) as client:
        body = {"messages": HI}
        error = await error_of(await client.post("/v1/chat/completions", json=body), 400)
    assert "no chat template" in error["message"]


async def test_liveness_readiness_and_version():
    engine = FakeEngine()
    live = ("/health", "/healthz", "/livez", "/ping")
    ready = ("/ready", "/readyz")
    async with serve(engine) as client:

        async def statuses(paths):
            return {(await client.get(path)).status for path in paths}

        assert await statuses([*live, *ready]) == {200}
        assert await (await client.get("/version")).json() == {"version": __version__}
        engine.ready = False
        assert (await statuses(live), await statuses(ready)) == ({200}, {503})
        assert (await (await client.get("/ready")).json())["status"] == "starting"
        engine.ready, engine.draining = True, True
        assert (await statuses(live), await statuses(ready)) == ({200}, {503})
        assert (await (await client.get("/ready")).json())["status"] == "draining"
        engine.alive = False
        assert (await statuses(live), await statuses(ready)) == ({503}, {503})


async def test_keys_guard_all_but_health(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# clients\nfile-key  # of one\n\n", encoding="utf-8")
    config = {"api_key": ["k1", "k2"], "api_key_file": str(keys)}
    async with serve(FakeEngine(), config=config) as client:
        for path in ("/health", "/ready", "/ping", "/version", "/livez", "/healthz", "/readyz"):
            assert (await client.get(path)).status == 200
        for path in ("/v1/models", "/metrics", "/nowhere", "/tokenize"):
            for headers in (
                {},
                {"Authorization": "Bearer k3"},
                {"Authorization": "Bearer "},
                {"Authorization": "Basic k1"},
                {"Authorization": "k1"},
            ):
                response = await client.get(path, headers=headers)
                error = await error_of(response, 401)
                assert error["code"] == "invalid_api_key"
                assert error["type"] == "authentication_error"
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert response.headers["x-request-id"]
        for key in ("k1", "k2", "file-key"):
            headers = {"Authorization": f"Bearer {key}"}
            assert (await client.get("/v1/models", headers=headers)).status == 200


def test_a_file_of_keys_must_hold_keys(tmp_path):
    for path in (tmp_path / "none", tmp_path / "empty"):
        (tmp_path / "empty").write_text("# nothing\n", encoding="utf-8")
        context = make_context(FakeEngine(), config={"api_key_file": str(path)})
        with pytest.raises(ConfigError, match=path.name):
            make_app(context)
    assert Config().api_key == []


async def test_metrics_show_refusals():
    engine = FakeEngine()
    async with serve(engine) as client:
        await client.post(COMPLETIONS, json={"prompt": [5] * 200})
        await client.post(COMPLETIONS, json={"prompt": "x", "n": 0})
        await client.post(COMPLETIONS, data=b"{")
        engine.refuse = RequestError("Not now.", status=503, code="not_ready")
        await client.post(COMPLETIONS, json={"prompt": "x"})
        response = await client.get("/metrics")
        text = await response.text()
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    label = f'{{engine="0",model_name="{MODEL}"'
    assert f'admission_rejections_total{label},reason="context_length_exceeded"}} 1.0' in text
    assert f'admission_rejections_total{label},reason="invalid_request"}} 2.0' in text
    assert f'admission_rejections_total{label},reason="not_ready"}} 1.0' in text
    assert f"requests_started_total{label}}} 4.0" in text


async def test_what_is_refused_is_one_line_in_the_log(caplog):
    """It tells all but the client's words and keys."""
    caplog.set_level("INFO", logger="loongd.rest")
    engine, headers = FakeEngine(), {"X-Request-Id": "mine", "Authorization": "Bearer guessed"}
    config = {"api_key": ["the-key"]}
    async with serve(engine, config=config) as client:
        await client.post(COMPLETIONS, json={"prompt": "secret"}, headers=headers)
        headers["Authorization"] = "Bearer the-key"
        await client.post(COMPLETIONS, json={"prompt": "secret" * 40}, headers=headers)
        await client.post(COMPLETIONS, json={"prompt": "secret", "n": "x"}, headers=headers)
        await client.get("/nowhere?key=the-key", headers=headers)
        engine.refuse = RequestError("Too many wait.", status=503, code="queue_full")
        answer = await client.post(COMPLETIONS, json={"prompt": "secret"}, headers=headers)
        engine.draining = True
        assert (await client.get("/ready")).status == answer.status == 503
    told = [(r.getMessage(), r.code, r.param, r.request_id) for r in caplog.records]
    refused = f"POST {COMPLETIONS} refused with"
    assert told == [
        (f"{refused} 401", "invalid_api_key", None, "mine"),
        (f"{refused} 400", "context_length_exceeded", "prompt", "mine"),
        (f"{refused} 400", None, "n", "mine"),
        ("GET /nowhere refused with 404", None, None, "mine"),
        (f"{refused} 503", "queue_full", None, "mine"),
    ]
    assert {record.levelname for record in caplog.records} == {"INFO"}
    everything = "".join(str(vars(record)) for record in caplog.records)
    assert not any(word in everything for word in ("secret", "the-key", "guessed"))


async def test_who_wants_no_lines_of_requests_has_none_of_refused_ones(caplog):
    caplog.set_level("INFO", logger="loongd.rest")
    async with serve(FakeEngine(), config={"enable_log_requests": False}) as client:
        assert (await client.get("/nowhere")).status == 404
    assert caplog.records == []


async def test_unknown_fields_are_named_in_the_log(caplog):
    caplog.set_level("DEBUG", logger="loongd.rest")
    async with serve(FakeEngine()) as client:
        body = {"prompt": "x", "zeta": 1, "alpha": {"x": [1]}}
        assert (await client.post(COMPLETIONS, json=body)).status == 200
    assert "ignored unknown request fields: alpha, zeta" in caplog.messages


async def test_a_bug_is_a_plain_500(caplog):
    engine = FakeEngine(lambda s: 1 / 0)
    async with serve(engine) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
        text = await response.text()
    assert response.status == 500
    assert "ZeroDivisionError" not in text
    assert "Traceback" not in text
    assert "ZeroDivisionError" in caplog.text


async def test_a_daemon_on_its_way_out_admits_nothing_again():
    engine = FakeEngine()
    ending = make_context(engine, is_ending=lambda: True)
    async with TestClient(TestServer(make_admin_app(ending))) as admin:
        await admin.post("/admin/drain")
        error = await error_of(await admin.post("/admin/undrain"), 409)
    assert "stopping" in error["message"]
    assert engine.draining


async def test_the_admin_api():
    engine = FakeEngine(say("hi"))
    context = make_context(engine, config={"api_key": ["k1"]})
    public = TestClient(TestServer(make_app(context)))
    async with public, TestClient(TestServer(make_admin_app(context))) as admin:
        assert await (await admin.get("/admin/status")).json() == engine.status()
        load = {"draining": True, "running": 2, "waiting": 3}
        assert await (await admin.post("/admin/drain")).json() == load
        assert engine.draining
        assert (await (await admin.post("/admin/undrain")).json())["draining"] is False
        assert not engine.draining
        await error_of(await admin.get("/admin/story/cmpl-none"), 404)

        auth = {"Authorization": "Bearer k1"}
        for n, expected in ((1, None), (2, ["-0", "-1"])):
            body = {"prompt": "x", "n": n}
            answer = await public.post(COMPLETIONS, data=json.dumps(body), headers=auth)
            response_id = (await answer.json())["id"]
            story = await (await admin.get(f"/admin/story/{response_id}")).json()
            assert story["request_id"] == response_id
            if expected:
                own = [choice["request_id"] for choice in story["choices"]]
                assert own == [response_id + suffix for suffix in expected]
        await error_of(await public.get("/admin/status", headers=auth), 404)
        assert (await admin.get("/metrics")).status == 200
