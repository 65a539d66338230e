"""Which request the admin API's story is of: ids of responses, of choices, and the client's own."""

from contextlib import asynccontextmanager

import pytest
from aiohttp.test_utils import TestClient, TestServer
from rest_kit import FakeEngine, error_of, make_context

from loongd.rest.app import make_admin_app, make_app

URL = "/v1/completions"


@asynccontextmanager
async def connect(engine):
    """The public and the admin API of one daemon."""
    context = make_context(engine)
    public = TestClient(TestServer(make_app(context)))
    async with public, TestClient(TestServer(make_admin_app(context))) as admin:
        yield public, admin


async def complete(public, own=None, **body):
    """The id of a response."""
    headers = {} if own is None else {"x-request-id": own}
    response = await public.post(URL, json={"prompt": "x", **body}, headers=headers)
    assert response.status == 200
    return (await response.json())["id"]


async def story(admin, asked):
    response = await admin.get(f"/admin/story/{asked}")
    assert response.status == 200, await response.text()
    return await response.json()


@pytest.mark.parametrize("is_live", [True, False])
async def test_the_clients_own_id_leads_to_the_last_request_that_had_it(is_live):
    engine = FakeEngine()
    async with connect(engine) as (public, admin):
        first = await complete(public, "job.7")
        last = await complete(public, "job.7")
        others = [await complete(public, own) for own in ("job.77", "my-job.7", "job_7", "job.7-1")]
        engine.ended = [] if is_live else list(engine.streams)
        assert (await story(admin, "job.7"))["request_id"] == last
        assert (await story(admin, first))["request_id"] == first
        assert (await story(admin, "job.77"))["request_id"] == others[0]
        engine.ended = [last]
        assert (await story(admin, "job.7"))["request_id"] == first, "it still runs"


async def test_the_id_that_loongd_gives_leads_to_it_too():
    engine = FakeEngine()
    async with connect(engine) as (public, admin):
        response = await public.post(URL, json={"prompt": "x"})
        own = response.headers["x-request-id"]
        await complete(public, f"my-{own}")
        engine.ended = list(engine.streams)
        assert (await story(admin, own))["request_id"] == f"cmpl-{own}"


async def test_the_clients_own_id_of_several_choices():
    engine = FakeEngine()
    async with connect(engine) as (public, admin):
        one = await complete(public, "two", n=2)
        for engine.ended in ([], [f"{one}-0"], [f"{one}-0", f"{one}-1"]):
            for asked in ("two", one):
                found = await story(admin, asked)
                assert found["request_id"] == one
                assert [part["request_id"] for part in found["choices"]] == [f"{one}-0", f"{one}-1"]
        assert (await story(admin, f"{one}-1"))["request_id"] == f"{one}-1"


async def test_a_part_of_an_id_that_no_other_has():
    engine = FakeEngine()
    async with connect(engine) as (public, admin):
        a, b = await complete(public, "doc-A"), await complete(public, "doc-B", n=2)
        for ended in ([], list(engine.streams)):
            engine.ended = ended
            assert (await story(admin, "c-A"))["request_id"] == a
            assert (await story(admin, a[-8:]))["request_id"] == a
            assert (await story(admin, "c-B"))["request_id"] == b
            error = await error_of(await admin.get("/admin/story/doc"), 404)
            assert error["message"] == f"2 requests have doc in their id: {a}, {b}"
        engine.ended = [a]
        assert (await story(admin, "doc"))["request_id"] == b, "no other one runs"
        await error_of(await admin.get("/admin/story/nobody"), 404)


async def test_of_many_that_have_a_part_in_their_id_the_last_are_named():
    engine = FakeEngine()
    async with connect(engine) as (public, admin):
        found = [await complete(public, f"doc-{number}") for number in range(5)]
        error = await error_of(await admin.get("/admin/story/doc"), 404)
        assert error["message"] == f"5 requests have doc in their id: {', '.join(found[1:])}, ..."
