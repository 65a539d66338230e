"""The API of a real server, through the openai client and plain HTTP."""

from __future__ import annotations

import http.client
import threading
import time

import openai
import pytest
from daemon_kit import Server


@pytest.fixture
def client(smollm2: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0)


def _question(text: str = "Name the capital of France.") -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=_question(), max_tokens=16, temperature=0
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_the_whole_answer_and_reports_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model="smollm2", messages=_question("Count to five."), max_tokens=24, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model="smollm2",
            messages=_question("Count to five."),
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    finish = [c.choices[0].finish_reason for c in chunks if c.choices][-1]
    assert finish == whole.choices[0].finish_reason


def test_seeded_sampling_repeats_and_seeds_differ(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        answer = client.completions.create(
            model="smollm2", prompt="Once upon a time", max_tokens=12, temperature=1, seed=seed
        )
        return answer.choices[0].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_n_choices_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=_question(),
        max_tokens=4,
        n=3,
        seed=5,
        logprobs=True,
        top_logprobs=2,
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice in answer.choices:
        first = choice.logprobs.content[0]
        assert first.logprob <= 0
        assert len(first.top_logprobs) == 2
        assert first.top_logprobs[0].logprob >= first.top_logprobs[1].logprob


def test_stop_string_is_not_in_the_answer(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2", prompt="1 2 3 4 5", max_tokens=40, temperature=0, stop=" 9"
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == " 6 7 8"


def test_max_tokens_and_ignore_eos(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=_question(),
        max_tokens=30,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 30
    assert answer.choices[0].finish_reason == "length"


def test_errors_name_the_field_and_the_numbers(client: openai.OpenAI, smollm2: Server) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="smollm2", prompt="x", temperature=-1)
    limit = client.models.retrieve("smollm2").max_model_len
    assert limit == 3600
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {limit}") as info:
        client.completions.create(model="smollm2", prompt=[5] * 3000, max_tokens=601)
    assert info.value.code == "context_length_exceeded"
    assert "3601" in str(info.value)
    assert "3000" in str(info.value)
    # The refused request blocks nobody.
    assert smollm2.post("/v1/completions", {"prompt": [5] * 20, "max_tokens": 2})[0] == 200


def test_prompt_of_exactly_the_context_is_served(smollm2: Server) -> None:
    status, answer = smollm2.post(
        "/v1/completions", {"prompt": [5] * 3598, "max_tokens": 2, "temperature": 0}
    )
    assert status == 200, answer
    assert answer["usage"]["total_tokens"] == 3600
    smollm2.wait_empty()


def test_sixteen_streams_of_mixed_lengths(smollm2: Server, client: openai.OpenAI) -> None:
    """Each equals the same request alone; in the end the pool is empty."""
    prompts = [[(7 * i + j) % 900 + 20 for j in range(3 + 31 * i)] for i in range(16)]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        stream = client.completions.create(
            model="smollm2",
            prompt=prompts[number],
            max_tokens=6 + number,
            temperature=1,
            seed=number,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        answers[number] = "".join(chunk.choices[0].text for chunk in stream if chunk.choices)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == list(range(16))
    status = smollm2.wait_empty()
    assert status["pool"]["free"] == status["pool"]["total"] == 3600


def test_a_client_that_leaves_frees_its_slots(smollm2: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", smollm2.port)
    body = b'{"prompt": [9, 8, 7], "max_tokens": 2000, "ignore_eos": true, "stream": true}'
    connection.request("POST", "/v1/completions", body)
    answer = connection.getresponse()
    assert answer.status == 200
    answer.readline()
    assert smollm2.status()["queue"]["running"] == 1
    answer.close()
    connection.close()
    before = time.monotonic()
    smollm2.wait_empty(timeout_s=5)
    assert time.monotonic() - before < 5


def test_tokenize_and_detokenize_agree_with_usage(smollm2: Server) -> None:
    text = "Gr\u00fc\u00dfe, \U0001f336 and tabs\tfrom loongd"
    tokens = smollm2.post("/tokenize", {"prompt": text})[1]["tokens"]
    assert smollm2.post("/detokenize", {"tokens": tokens})[1]["prompt"] == text
    usage = smollm2.post("/v1/completions", {"prompt": text, "max_tokens": 1})[1]["usage"]
    assert usage["prompt_tokens"] == len(tokens)


def test_metrics_reconcile(smollm2: Server) -> None:
    smollm2.wait_empty()
    values: dict[str, float] = {}
    for line in smollm2.get("/metrics")[1].splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            name = name.split("{")[0]
            values[name] = values.get(name, 0.0) + float(value)
    ended = sum(
        values.get(f"loongd:{name}", 0.0)
        for name in (
            "request_success_total",
            "requests_aborted_total",
            "requests_failed_total",
            "admission_rejections_total",
        )
    )
    assert values["loongd:requests_started_total"] == ended > 0
    assert values["loongd:num_requests_running"] == 0


def test_status_and_drain_by_ctl(smollm2: Server) -> None:
    table = smollm2.ctl("status")
    assert table.returncode == 0, table.stderr
    assert "smollm2" in table.stdout
    assert smollm2.ctl("drain", "--wait", "10").returncode == 0
    status, refusal = smollm2.post("/v1/completions", {"prompt": "x"})
    assert status == 503
    assert refusal["error"]["code"] == "draining"
    assert smollm2.get("/ready")[0] == 503
    assert smollm2.get("/health")[0] == 200
    assert smollm2.ctl("undrain").returncode == 0
    assert smollm2.get("/ready")[0] == 200
    assert smollm2.post("/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
