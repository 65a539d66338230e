"""A daemon whose instances are several workers: same tokens, one instance, lost as one."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from daemon_kit import Server, launch, serving
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB = 96


def greedy(model: PreTrainedModel, prompt: list[int], num_new: int) -> list[int]:
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        min_new_tokens=num_new,
        max_new_tokens=num_new,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def complete(server: Server, prompt: list[int], num_new: int) -> list[int]:
    status, answer = server.post(
        "/v1/completions",
        {
            "prompt": prompt,
            "max_tokens": num_new,
            "min_tokens": num_new,
            "temperature": 0,
            "return_token_ids": True,
        },
    )
    assert status == 200, answer
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    """A random model of 8 heads over 4 KV heads with a tokenizer of one word a token."""
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("tiny") / "model"
    model.save_pretrained(directory)
    tokenizer = Tokenizer(BPE({f"w{token}": token for token in range(VOCAB)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory, model


def test_two_instances_of_two_workers(tiny: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = tiny
    prompts = [[(7 * start + 5 * i) % 90 + 3 for i in range(n)] for start, n in enumerate((3, 90))]
    arguments = ("--model", str(directory), "-tp", "2", "--kv-pool-tokens", "300")
    with serving(*arguments, "--prefill-tokens-per-instance", "16", instances=2) as server:
        status = server.status()
        assert status["node"]["tensor_parallel_size"] == 2
        assert status["pool"]["total"] == 600
        instances = status["instances"]
        pids = [pid for instance in instances for pid in instance["pids"]]
        assert len(set(pids)) == 4
        assert [instance["pid"] for instance in instances] == pids[::2]
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]
        assert names == ["loongd-w0", "loongd-w0.1", "loongd-w1", "loongd-w1.1"]
        for prompt in prompts:
            assert complete(server, prompt, 16) == greedy(model, prompt, 16)
        server.wait_empty()

        expected = greedy(model, prompts[1], 200)
        answers: list[list[int]] = []
        thread = threading.Thread(target=lambda: answers.append(complete(server, prompts[1], 200)))
        before = server.status()["totals"]["generated_tokens"]
        thread.start()
        deadline = time.monotonic() + 30
        while server.status()["totals"]["generated_tokens"] < before + 5:
            assert time.monotonic() < deadline
        os.kill(pids[3], signal.SIGKILL)
        thread.join()
        assert answers == [expected]
        assert "is lost" in server.log
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
        status = server.wait_empty()
        assert status["pool"]["free"] == 600
        pids = [pid for instance in status["instances"] for pid in instance["pids"]]
        assert len(set(pids)) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.timeout(300)
def test_the_real_model_on_three_workers(smollm2_dir: Path) -> None:
    """SmolLM2 has 9 heads over 3 KV heads: three workers have one KV head each."""
    model = LlamaForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    prompts = [[(31 * i + 17 * n) % 40000 + 100 for i in range(n)] for n in (1, 17, 400)]
    with serving(
        *("--model", str(smollm2_dir), "--dtype", "float32", "--tensor-parallel-size", "3"),
        *("--kv-pool-tokens", "1000"),
    ) as server:
        for prompt in prompts:
            assert complete(server, prompt, 12) == greedy(model, prompt, 12)
        server.wait_empty()


def refusal(directory: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and last line of a daemon that does not start."""
    server = launch(directory, *arguments)
    code = server.process.wait(30)
    return code, server.log.strip().splitlines()[-1]


def test_a_size_that_does_not_divide_is_refused_before_workers_start(
    smollm2_dir: Path, tmp_path: Path
) -> None:
    code, complaint = refusal(tmp_path, "--model", str(smollm2_dir), "-tp", "2")
    assert code == 2
    assert complaint == (
        "loongd: error: tensor_parallel_size = 2 does not divide num_attention_heads = 9; "
        "sizes that work: 1, 3"
    )
