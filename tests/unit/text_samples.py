"""Tokenizer fields as GGUF files have them, small enough to build in each test."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Don't panic: it's only a test!",
    "the then there these those  \n\n  indented\tcode = [1, 22, 333]; 漢字漢字 ééé 🌶🌶 привет",
] * 3
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_level_fields(pre: str = "smollm") -> dict[str, Any]:
    """A byte-level BPE of about 350 tokens: 3 specials, all bytes, merges, one added word."""
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [*tokens, "<\uff5ctool\uff5c>"],
        "tokenizer.ggml.token_type": [3] * len(SPECIALS) + [1] * (len(tokens) - 3) + [4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def sentencepiece_fields() -> dict[str, Any]:
    """A SentencePiece BPE with byte fallback, in the layout of Llama 2."""
    trained = Tokenizer(BPE())
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    words = " ".join(CORPUS[:1]).replace(" ", " \u2581").split(" ")
    trained.train_from_iterator(words, trainer)
    model = json.loads(trained.to_str())["model"]
    merged = ["".join(pair) for pair in model["merges"]]
    pieces = list(dict.fromkeys(merged))
    singles = [token for token in model["vocab"] if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    scores = [0.0] * len(tokens) + [-float(rank) for rank in range(len(pieces) + len(singles))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *pieces, *singles],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(singles)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
