"""The same daemon on GPUs: tokens are those of transformers' logits, same weights, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from daemon_kit import serving
from transformers import LlamaConfig, LlamaForCausalLM

from loongd.model.sampler import sample
from loongd.wire import Sampling

pytestmark = pytest.mark.gpu
NUM_GPUS = torch.cuda.device_count()
NUM_NEW = 16
LENGTHS = (1, 2, 7, 100, 1001)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with grouped heads, saved in float32."""
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=1000,
        max_position_embeddings=4096,
        initializer_range=0.1,
        eos_token_id=None,
    )
    path = tmp_path_factory.mktemp("small-llama")
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text(
        '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,'
        '"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,'
        '"use_regex":true},"post_processor":null,"decoder":{"type":"ByteLevel",'
        '"add_prefix_space":true,"trim_offsets":true,"use_regex":true},"model":{"type":"BPE",'
        '"dropout":null,"unk_token":null,"continuing_subword_prefix":null,'
        '"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,'
        '"vocab":{"a":0,"b":1},"merges":[]}}'
    )
    return path


@pytest.mark.timeout(300)
@pytest.mark.parametrize("instances", range(1, NUM_GPUS + 1))
def test_greedy_tokens_equal_transformers(instances: int, model_dir: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    with serving(
        *("--model", str(model_dir), "--device", "cuda", "--dtype", "float32"),
        *("--kv-pool-tokens", "3000", "--prefill-tokens-per-instance", "4"),
        instances=instances,
    ) as server:
        for length in LENGTHS:
            prompt = [(37 * i + length) % 1000 for i in range(length)]
            ids = torch.tensor([prompt], device="cuda")
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                pad_token_id=0,
            )
            body = {"prompt": prompt, "max_tokens": NUM_NEW, "temperature": 0}
            status, answer = server.post("/v1/completions", {**body, "return_token_ids": True})
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == expected[0, length:].tolist(), length
        server.wait_empty()


@pytest.mark.timeout(300)
def test_seeded_tokens_equal_draws_from_transformers_logits(model_dir: Path) -> None:
    """Steps are queued behind one another, and each token is drawn where the next step reads it."""
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    ways = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.01},
    )
    with serving(
        *("--model", str(model_dir), "--device", "cuda", "--dtype", "float32"),
        *("--kv-pool-tokens", "3000"),
    ) as server:
        for seed, way in enumerate(ways):
            tokens = [(37 * i + seed) % 1000 for i in range(50)]
            body = {"prompt": list(tokens), "max_tokens": 40, "seed": seed, **way}
            status, answer = server.post("/v1/completions", {**body, "return_token_ids": True})
            assert status == 200, answer
            for _ in range(40):
                ids = torch.tensor([tokens], device="cuda")
                with torch.inference_mode():
                    logits_1V = model(ids).logits[:, -1].float().cpu()
                [drawn] = sample(logits_1V, [Sampling(seed=seed, **way)], [len(tokens)])
                assert drawn.token is not None
                tokens.append(drawn.token)
            assert answer["choices"][0]["token_ids"] == tokens[50:], way
        server.wait_empty()
