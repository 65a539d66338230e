from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_samples import byte_level_fields, sentencepiece_fields
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from loongd.errors import ModelError
from loongd.text.gguf_tokenizer import build_tokenizer, build_tokenizer_config, eos_ids

SAMPLES = [
    "",
    "Hello \t world\n\n  12345 1 22 333 4444",
    "don't I'LL we'Ve \u00bd \u00b2 x\u00a0y",
    "🌶 é 漢字 привет \r\n\r\n x",
    "<|im_start|>user\nthe<|im_end|> <\uff5ctool\uff5c>the",
    "e\u0301 composed?!...   \n  end  ",
]
SENTENCEPIECE = build_tokenizer(sentencepiece_fields())
BYTE_LEVEL = build_tokenizer(byte_level_fields())


def published_pre_tokenizer(pre: str) -> Any:
    """The pre_tokenizer of the tokenizer.json that the models of this name were published with."""
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    match pre:
        case "gpt-2":
            return gpt2
        case "smollm":
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
        case _:
            pattern = (
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits[pre] + "| ?"
                r"[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )
            split = pre_tokenizers.Split(Regex(pattern), "isolated")
            return pre_tokenizers.Sequence([split, bytes_only])


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@given(text=st.one_of(st.sampled_from(SAMPLES), st.text(max_size=40)))
def test_ids_equal_those_of_the_published_pre_tokenizer(pre: str, text: str) -> None:
    built = TOKENIZERS[pre]
    published = Tokenizer.from_str(built.to_str())
    published.pre_tokenizer = published_pre_tokenizer(pre)
    published.normalizer = normalizers.NFC() if pre == "qwen2" else None
    ids = built.encode(text, add_special_tokens=False).ids
    assert ids == published.encode(text, add_special_tokens=False).ids


TOKENIZERS = {
    pre: build_tokenizer(byte_level_fields(pre))
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "default")
}


@pytest.mark.parametrize("pre", [*TOKENIZERS])
@given(text=st.one_of(st.sampled_from(SAMPLES[:-1]), st.text(alphabet="ab 1\n.é🌶", max_size=40)))
def test_byte_level_text_survives(pre: str, text: str) -> None:
    ids = TOKENIZERS[pre].encode(text, add_special_tokens=False).ids
    assert TOKENIZERS[pre].decode(ids, skip_special_tokens=False) == text


def test_default_pre_tokenizer_keeps_three_digits_together() -> None:
    pieces = TOKENIZERS["default"].pre_tokenizer.pre_tokenize_str("ab 12345!x")
    assert [piece for piece, _ in pieces] == ["ab", "Ġ", "123", "45", "!", "x"]


def test_specials_are_one_token_and_hidden_user_words_are_shown() -> None:
    fields = byte_level_fields()
    tool = len(fields["tokenizer.ggml.tokens"]) - 1
    assert BYTE_LEVEL.encode("<|im_start|><\uff5ctool\uff5c>").ids == [1, tool]
    assert BYTE_LEVEL.decode([1, tool]) == "<\uff5ctool\uff5c>"


def test_llama_bpe_adds_bos_unless_told_otherwise() -> None:
    assert TOKENIZERS["llama-bpe"].encode("the").ids[0] == 1
    off = byte_level_fields("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}
    assert 1 not in build_tokenizer(off).encode("the").ids
    both = byte_level_fields() | {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
    }
    ids = build_tokenizer(both).encode("the").ids
    assert (ids[0], ids[-1]) == (1, 2)


def sentencepiece_ids(text: str) -> list[int]:
    """SentencePiece's BPE as its paper has it: merge the best-scored neighbours, leftmost first."""
    fields = sentencepiece_fields()
    tokens = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    scores = fields["tokenizer.ggml.scores"]
    symbols = list("\u2581" + text.replace(" ", "\u2581")) if text else []
    while True:
        pairs = [
            (-scores[tokens[a + b]], i)
            for i, (a, b) in enumerate(pairwise(symbols))
            if a + b in tokens
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        ids += [tokens[symbol]] if symbol in tokens else [3 + byte for byte in symbol.encode()]
    return ids


@given(
    text=st.one_of(
        st.text(alphabet="the quickbrownfxjmpsvlazydg .!漢🌶\n", max_size=30),
        st.text(max_size=15).filter(lambda text: "<" not in text),
    )
)
def test_sentencepiece_ids_equal_the_algorithm(text: str) -> None:
    assert SENTENCEPIECE.encode(text, add_special_tokens=False).ids == sentencepiece_ids(text)


def test_sentencepiece_adds_bos_and_space() -> None:
    ids = SENTENCEPIECE.encode("the").ids
    assert ids[0] == 1
    assert SENTENCEPIECE.decode(ids) == "the"
    bare = build_tokenizer(sentencepiece_fields() | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.decode(bare.encode(" the").ids) == " the"


def test_config_names_the_special_tokens() -> None:
    config = build_tokenizer_config(byte_level_fields() | {"tokenizer.chat_template": "{{ 1 }}"})
    assert config["bos_token"] == "<|im_start|>"
    assert config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == "{{ 1 }}"
    assert "pad_token" not in config


def test_eos_ids_are_the_ends_of_sequence_turn_and_message() -> None:
    fields = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eos_token_id": 2}
    assert eos_ids(fields | {"tokenizer.ggml.eom_token_id": 2}) == [2, 7]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'"),
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "holds 'a' twice"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]}, "1 values for"),
    ],
)
def test_refusals_name_the_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        build_tokenizer(byte_level_fields() | changes)


def test_decoder_of_a_byte_level_tokenizer_is_plain() -> None:
    assert isinstance(BYTE_LEVEL.decoder, decoders.ByteLevel)
    assert isinstance(BYTE_LEVEL.model, BPE)
