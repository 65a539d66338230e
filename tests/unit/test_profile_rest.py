"""`loongctl profile` and `plan` through the admin socket, and the header of predicted TTFT."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from profile_kit import SHORT, FakeWorkers, make_profiler
from rest_kit import FakeEngine, error_of, make_context, say, serve

from loongd import ctl, ctl_speed
from loongd.errors import RequestError
from loongd.profiling import grid
from loongd.rest.app import make_admin_app
from loongd.sched.sib import parse_profile
from loongd.submission import Submission, TokenStream

PLAN: dict[str, Any] = {
    "prompt_tokens": 5000,
    "max_tokens": 200,
    "dop": 2,
    "members": [0, 1],
    "queue_s": 0.5,
    "prefill_s": 1.25,
    "ttft_s": 1.75,
    "reason": "two are faster than one",
    "rough": False,
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "QUICK", SHORT)


class PlanningEngine(FakeEngine):
    """Predicts the same for everything."""

    plan_answer: dict[str, Any] | None = PLAN
    is_rough = False

    def submit(self, submission: Submission) -> TokenStream:
        stream = super().submit(submission)
        stream.timings.predicted_ttft_s = 1.7504
        stream.timings.is_rough_ttft = self.is_rough
        return stream

    def plan(self, prompt_tokens: int, max_tokens: int) -> dict[str, Any] | None:
        if self.plan_answer is None:
            return None
        return self.plan_answer | {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens}


@asynccontextmanager
async def admin_socket(directory: Path, engine: FakeEngine, **changes: Any) -> AsyncIterator[str]:
    """The admin app on a unix socket, as the daemon serves it."""
    runner = web.AppRunner(make_admin_app(make_context(engine, **changes)))
    await runner.setup()
    path = str(directory / "admin.sock")
    await web.UnixSite(runner, path).start()
    yield path
    await runner.cleanup()


async def loongctl(path: str, *arguments: str) -> int:
    return await asyncio.to_thread(ctl.main, ["--socket", path, *arguments])


async def test_profile_then_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workers = FakeWorkers(2)
    profiler, sib = make_profiler(workers)
    out = tmp_path / "profile.json"
    async with admin_socket(tmp_path, FakeEngine(), profiler=profiler) as path:
        assert await loongctl(path, "profile", "--quick", "--out", str(out)) == 0
        shown = capsys.readouterr()
        assert f"saved as {out}" in shown.out
        assert "dop 2    2 " in shown.out
        assert "all      3 ms       2 ms           0.128 GB/s" in shown.out
        assert "0% dop 1: warm-up, some 3 min left" in shown.err
        assert "100% done" in shown.err
        tenths = [line[:4] for line in shown.err.splitlines() if "dop 2: steps" in line]
        assert 4 <= len(tenths) == len(set(tenths)), "not only the beginning of a long stage"
        assert parse_profile(out.read_bytes(), where="out") == sib.profile
        assert max(map(len, shown.out.splitlines()[:-1])) <= ctl_speed.WIDTH

        assert await loongctl(path, "profile", "--quick", "--check") == 0
        shown = capsys.readouterr()
        assert "unseen batches: mean error 0." in shown.out
        assert "not checked: migration 3 ms and 2 ms per 1K tokens (0.128 GB/s)" in shown.out
        workers.slow = 1.5
        assert await loongctl(path, "profile", "--quick", "--check") == 1
        assert "not good: more than 10%" in capsys.readouterr().out
        assert await loongctl(path, "profile", "--quick", "--check", "--json") == 1
        assert json.loads(capsys.readouterr().out)["worst"] == pytest.approx(1 / 3, abs=0.05)
    assert workers.num_used == 0


async def test_what_goes_wrong_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workers = FakeWorkers(1)
    profiler, _ = make_profiler(workers)
    async with admin_socket(tmp_path, FakeEngine(), profiler=profiler) as path:
        workers.refuse = RequestError("3 requests are not done", status=409, code="busy")
        assert await loongctl(path, "profile") == 1
        assert capsys.readouterr().err == "loongctl: error: 3 requests are not done\n"
        workers.refuse = None
        workers.fail_step = 30
        assert await loongctl(path, "profile", "--quick") == 1
        assert capsys.readouterr().err.endswith("loongctl: error: instance 0: out of slots\n")
        workers.fail_step = None
        out = tmp_path / "none" / "p.json"
        assert await loongctl(path, "profile", "--quick", "--out", str(out)) == 1
        assert "cannot be written: No such file" in capsys.readouterr().err
    async with admin_socket(tmp_path, FakeEngine()) as path:
        assert await loongctl(path, "profile") == 1
        assert "no workers to profile" in capsys.readouterr().err
    assert await loongctl(path, "profile") == 3


async def test_a_wrong_request_to_profile_is_refused() -> None:
    profiler, _ = make_profiler(FakeWorkers(1))
    app = make_admin_app(make_context(FakeEngine(), profiler=profiler))
    async with TestClient(TestServer(app)) as client:
        error = await error_of(await client.post("/admin/profile", data='{"quik": true}'), 400)
        assert "quik" in error["message"]


async def test_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = PlanningEngine()
    async with admin_socket(tmp_path, engine) as path:
        assert await loongctl(path, "plan", "5000", "--max-tokens", "200") == 0
        assert capsys.readouterr().out.splitlines() == [
            "prompt    5,000 tokens, up to 200 more",
            "group     dop 2: instances 0,1",
            "wait      500 ms",
            "prefill   1.25 s",
            "ttft      1.75 s predicted",
            "why       two are faster than one",
        ]
        engine.plan_answer = PLAN | {"rough": True}
        assert await loongctl(path, "plan", "5000") == 0
        assert (
            "1.75 s roughly predicted (no full profile has measured the like: loongctl profile)"
            in capsys.readouterr().out
        )
        engine.plan_answer = PLAN | {"rough": True, "at_most": True}
        assert await loongctl(path, "plan", "5000") == 0
        assert "1.75 s at most predicted (running answers may end" in capsys.readouterr().out
        engine.plan_answer = PLAN | {"dop": 0, "reason": "the pool has only 10 slots"}
        assert await loongctl(path, "plan", "5000") == 1
        assert capsys.readouterr().out == "not served: the pool has only 10 slots\n"
        engine.plan_answer = None
        assert await loongctl(path, "plan", "5000") == 1
        assert "makes no predictions" in capsys.readouterr().err


@pytest.mark.parametrize("query", ["", "?tokens=0", "?tokens=x", "?tokens=5&max_tokens=-1"])
async def test_a_plan_of_no_tokens_is_refused(query: str) -> None:
    async with TestClient(TestServer(make_admin_app(make_context(PlanningEngine())))) as client:
        error = await error_of(await client.get("/admin/plan" + query), 400)
        assert error["param"] in ("tokens", "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_carry_the_predicted_ttft(stream: bool) -> None:
    body = {"prompt": "x", "stream": stream}
    async with serve(PlanningEngine(say("hi"))) as client:
        response = await client.post("/v1/completions", json=body)
        assert response.headers["x-loongd-predicted-ttft-ms"] == "1750"
        chat = {"messages": [{"role": "user", "content": "x"}], "stream": stream}
        response = await client.post("/v1/chat/completions", json=chat)
        assert response.headers["x-loongd-predicted-ttft-ms"] == "1750"
        assert "x-loongd-predicted-ttft-rough" not in response.headers
    async with serve(FakeEngine(say("hi"))) as client:
        response = await client.post("/v1/completions", json=body)
        assert "x-loongd-predicted-ttft-ms" not in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_say_that_the_predicted_ttft_is_rough(stream: bool) -> None:
    engine = PlanningEngine(say("hi"))
    engine.is_rough = True
    async with serve(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
        assert response.headers["x-loongd-predicted-ttft-ms"] == "1750"
        assert response.headers["x-loongd-predicted-ttft-rough"] == "1"
