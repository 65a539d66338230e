"""Greedy answers of the real model equal transformers' token for token, on any group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from daemon_kit import Server, serving
from transformers import AutoTokenizer, LlamaForCausalLM

NUM_NEW = 8
LENGTHS = (10, 17, 33, 64, 101, 150, 301, 520, 900, 6000)


@pytest.fixture(scope="module")
def expected(smollm2_dir: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, greedy continuation) of ten prompts of 10 to 6,000 tokens, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    story = "\n".join(
        f"Day {day}: the ship made {day * 37 % 91} miles, and the cook served {dish}."
        for day, dish in enumerate(["soup", "fish", "rice and beans", "bread"] * 120)
    )
    ids = tokenizer(story)["input_ids"]
    return [(ids[:length], _continued(model, ids[:length])) for length in LENGTHS]


def _continued(model: LlamaForCausalLM, prompt: list[int]) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
    )
    continuation: list[int] = output[0, len(prompt) :].tolist()
    return continuation


def _check_all(server: Server, expected: list[tuple[list[int], list[int]]]) -> str:
    """Ask everything; the id of the last and longest answer."""
    for prompt, continuation in expected:
        status, answer = server.post(
            "/v1/completions",
            {
                "prompt": prompt,
                "max_tokens": NUM_NEW,
                "temperature": 0,
                "return_token_ids": True,
            },
        )
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == continuation, len(prompt)
        assert answer["usage"]["prompt_tokens"] == len(prompt)
    server.wait_empty()
    return str(answer["id"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("instances", [1, 2, 3, 4])
def test_greedy_tokens_on_all_instances_equal_transformers(
    instances: int, smollm2_dir: Path, expected: list[tuple[list[int], list[int]]]
) -> None:
    """Policy fcfs gives a long prompt every idle instance, whatever this machine's speed.

    The longest prompt, half a minute's work, is asked of four instances alone.
    """
    asked = expected if instances == 4 else expected[:-1]
    with serving(
        *("--model", str(smollm2_dir), "--dtype", "float32", "--kv-pool-tokens", "7000"),
        *("--policy", "fcfs", "--prefill-tokens-per-instance", "100"),
        instances=instances,
    ) as server:
        last = _check_all(server, asked)
        story = json.loads(server.ctl("story", last, "--json").stdout)
        prefill = next(entry for entry in story["entries"] if entry["event"] == "prefill")
        assert prefill["dop"] == instances


@pytest.mark.timeout(600)
def test_greedy_tokens_in_elastic_chunks_equal_transformers(
    smollm2_dir: Path, expected: list[tuple[list[int], list[int]]]
) -> None:
    """Policy loongserve with a bound so small that long prompts run in several chunks."""
    model = LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    long = expected[-1][0][:2000]
    asked = [*expected[3:6], (long, _continued(model, long))]
    with serving(
        *("--model", str(smollm2_dir), "--dtype", "float32", "--kv-pool-tokens", "1000"),
        *("--policy", "loongserve", "--max-prefill-wait", "1"),
        instances=3,
    ) as server:
        last = _check_all(server, asked)
        story = json.loads(server.ctl("story", last, "--json").stdout)
        chunks = sum(e["num_steps"] for e in story["entries"] if e["event"] == "prefill")
        assert chunks > 1
