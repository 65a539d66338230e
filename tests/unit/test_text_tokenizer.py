from __future__ import annotations

import asyncio
import json
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text_samples import byte_level_fields, sentencepiece_fields
from tokenizers import pre_tokenizers

from loongd.errors import ModelError, RequestError
from loongd.text.chunks import CUT, can_cut, chunks_of
from loongd.text.gguf_tokenizer import build_tokenizer
from loongd.text.tokenizer import Tokenizer

BACKENDS = {
    pre: build_tokenizer(byte_level_fields(pre))
    for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "default")
}
PIECES = ["the", " fox", "don't", "'s", "'ll", "1", "12", " ", "  ", "\n", "\r\n", "\t", "!", "."]
PIECES += [
    "\n\nthe",
    "!\nthe",
    " \nfox",
    "the fox",
    "é",
    "e\u0301",
    "漢",
    "привет",
    "한",
    "🌶",
    "<|im_start|>",
    "\u00a0",
    "x",
    "\u00bd",
]


def split_by(pattern: str) -> tokenizers.Tokenizer:
    backend = build_tokenizer(byte_level_fields())
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return backend


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    BACKENDS["smollm"].save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(directory: Path, name: str, value: Any) -> None:
    (directory / name).write_text(json.dumps(value))


# ---- encoding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", [*BACKENDS])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40))
def test_chunks_give_the_same_ids(pre: str, pieces: list[str]) -> None:
    backend, text = BACKENDS[pre], "".join(pieces)
    chunks = chunks_of(text, 1)
    assert "".join(chunks) == text
    ids = [id for chunk in chunks for id in backend.encode(chunk, add_special_tokens=False).ids]
    assert ids == backend.encode(text, add_special_tokens=False).ids


def test_cutting_is_only_for_tokenizers_that_allow_it() -> None:
    assert all(can_cut(b, json.loads(b.to_str())) for b in BACKENDS.values())
    sentencepiece = build_tokenizer(sentencepiece_fields())
    assert not can_cut(sentencepiece, json.loads(sentencepiece.to_str()))
    lines = split_by(r"[^!]+|!")
    assert not can_cut(lines, json.loads(lines.to_str()))


def test_chunks_are_cut_often_enough() -> None:
    assert len(chunks_of("the fox. " * 100, 30)) > 20
    assert len(chunks_of("漢字。\n" * 100, 30)) > 10
    assert CUT.search("aaaa. 1 2 \n\n 3") is None


async def test_long_text_encodes_as_in_one_piece() -> None:
    text = "The quick fox\njumps 12 times over 漢字. Don't!\n\n" * 10_000
    want = BACKENDS["smollm"].encode(text).ids
    ids = await Tokenizer(build_tokenizer(byte_level_fields())).encode(text)
    assert isinstance(ids, array)
    assert ids.typecode == "i"
    assert ids.tolist() == want


async def test_long_text_of_a_tokenizer_that_cannot_be_cut() -> None:
    backend = build_tokenizer(sentencepiece_fields())
    text = "the quick fox\njumps " * 10_000
    ids = await Tokenizer(build_tokenizer(sentencepiece_fields()), bos_token_id=1).encode(text)
    assert ids.tolist() == backend.encode(text).ids


async def test_event_loop_runs_while_a_long_text_is_encoded() -> None:
    tokenizer = Tokenizer(build_tokenizer(byte_level_fields()))
    task = asyncio.create_task(tokenizer.encode("the quick brown fox jumps\n" * 80_000))
    longest_s, last = 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest_s, last = max(longest_s, now - last), now
    assert len(await task) > 500_000
    # Typically 10 ms; with the interpreter lock held throughout it is about a second.
    assert longest_s < 0.2


async def test_bos_is_added_once() -> None:
    tokenizer = Tokenizer(build_tokenizer(byte_level_fields("llama-bpe")), bos_token_id=1)
    plain = (await tokenizer.encode("the", add_special_tokens=False)).tolist()
    assert 1 not in plain
    assert (await tokenizer.encode("the")).tolist() == [1, *plain]
    assert (await tokenizer.encode("<|im_start|>the")).tolist() == [1, *plain]
    assert (await tokenizer.encode("")).tolist() == [1]


@pytest.mark.parametrize("padding", [0, 5000])
async def test_unpaired_surrogate_is_the_clients_fault(padding: int) -> None:
    tokenizer = Tokenizer(build_tokenizer(byte_level_fields()))
    with pytest.raises(RequestError, match=r"U\+D83C"):
        await tokenizer.encode("x " * padding + "a\ud83cb")


# ---- decoding ---------------------------------------------------------------------------------


def test_bytes_and_text_of_tokens() -> None:
    tokenizer = Tokenizer(build_tokenizer(sentencepiece_fields()))
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
    assert tokenizer.token_text(3 + 0xE2) == "\ufffd"
    assert tokenizer.token_text(1) == "<s>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.decode([1, -1, 10**6]) == ""
    space = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b" ")
    assert tokenizer.decode([space, space]) == " "


# ---- files ------------------------------------------------------------------------------------


def test_ends_are_collected_from_all_files(model_dir: Path) -> None:
    write(model_dir, "config.json", {"eos_token_id": 5, "bos_token_id": 9})
    write(model_dir, "generation_config.json", {"eos_token_id": [6, 5, 0]})
    write(model_dir, "special_tokens_map.json", {"eos_token": {"content": "<|im_end|>"}})
    tokenizer = Tokenizer.from_dir(model_dir)
    assert tokenizer.eos_token_ids == {0, 2, 5, 6}
    assert tokenizer.bos_token_id == 9
    write(model_dir, "tokenizer_config.json", {"bos_token": "<|im_start|>", "eos_token": None})
    assert Tokenizer.from_dir(model_dir).bos_token_id == 1
    assert 2 in Tokenizer.from_dir(model_dir).eos_token_ids


def test_no_template(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.render_chat([{"role": "user", "content": "x"}])
    assert caught.value.status == 400


def test_templates_by_precedence(model_dir: Path) -> None:
    chat = [{"role": "user", "content": "x"}]

    def rendered(tools: Any = None, template: str | None = None) -> str:
        return Tokenizer.from_dir(model_dir, template).render_chat(chat, tools=tools)

    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    write(model_dir, "tokenizer_config.json", {"chat_template": named, "bos_token": "<|im_start|>"})
    assert rendered() == "D"
    assert rendered(tools=[{"type": "function"}]) == "T"
    write(model_dir, "chat_template.json", {"chat_template": "J"})
    assert rendered() == "J"
    (model_dir / "chat_template.jinja").write_text("F")
    assert rendered() == "F"
    assert rendered(template="{{ bos_token }}") == "<|im_start|>"
    (model_dir / "mine.jinja").write_text("M")
    assert rendered(template=str(model_dir / "mine.jinja")) == "M"
    (model_dir / "chat_template.jinja").unlink()
    write(model_dir, "chat_template.json", {"chat_template": ["D"]})
    with pytest.raises(ModelError, match="neither a text nor a list of templates"):
        rendered()
    with pytest.raises(ModelError, match=r"nothing.jinja is not a file"):
        rendered(template="nothing.jinja")


def test_broken_directories_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer.json is missing$"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ModelError, match=r"tokenizer.json is missing; tokenizer.model alone"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json is not a tokenizer: .*Model missing"):
        Tokenizer.from_dir(tmp_path)
    BACKENDS["smollm"].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config.json is not JSON"):
        Tokenizer.from_dir(tmp_path)


def test_unknown_decoder_is_refused() -> None:
    description = json.loads(build_tokenizer(byte_level_fields()).to_str())
    description["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    backend = build_tokenizer(byte_level_fields()).from_str(json.dumps(description))
    with pytest.raises(ModelError, match="decoder WordPiece"):
        Tokenizer(backend)
