from __future__ import annotations

import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from text_samples import byte_level_fields, sentencepiece_fields

from loongd.text.detokenizer import IncrementalDetokenizer
from loongd.text.gguf_tokenizer import build_tokenizer
from loongd.text.tokenizer import Tokenizer

BYTE_LEVEL_BACKEND = build_tokenizer(byte_level_fields())
BYTE_LEVEL = Tokenizer(build_tokenizer(byte_level_fields()))
SENTENCEPIECE_BACKEND = build_tokenizer(sentencepiece_fields())
SENTENCEPIECE = Tokenizer(build_tokenizer(sentencepiece_fields()))
REPLACEMENT = "\ufffd"

byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=20)
sentencepiece_ids = st.lists(
    st.one_of(st.integers(0, SENTENCEPIECE.vocab_size - 1), st.integers(3, 258)), max_size=20
)
texts = st.text(max_size=20)


def ids_of(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.finish()]


def adds_only(text: str, full: str, prompt_text: str) -> bool:
    """Whether `text` ends `full`, and what is ahead of it is the prompt's, but for a character that
    the prompt only began: it belongs to the new text. It is shown as U+FFFD, or as two of them
    where the bytes are the first two of a surrogate."""
    ahead = full.removesuffix(text)
    shown = [ahead + begun for begun in ("", REPLACEMENT, 2 * REPLACEMENT)]
    return full == ahead + text and prompt_text in shown


@given(prompt=byte_level_ids, ids=byte_level_ids, skip=st.booleans())
def test_byte_level_stream_equals_full_decode(
    prompt: list[int], ids: list[int], skip: bool
) -> None:
    full = BYTE_LEVEL_BACKEND.decode(prompt + ids, skip_special_tokens=skip)
    prompt_text = BYTE_LEVEL_BACKEND.decode(prompt, skip_special_tokens=skip)
    text = "".join(stream(BYTE_LEVEL, prompt, ids, skip))
    assert adds_only(text, full, prompt_text)
    assert BYTE_LEVEL.decode(prompt + ids, skip_special_tokens=skip) == full


@given(text=texts, cuts=st.lists(st.integers(1, 4)))
def test_no_half_characters_and_no_delay(text: str, cuts: list[int]) -> None:
    # One token a byte, so that most pushes end inside a character.
    ids = [token for byte in text.encode() for token in ids_for_byte(byte)]
    detokenizer, sent, start = IncrementalDetokenizer(BYTE_LEVEL), "", 0
    for size in [*cuts, len(ids)]:
        sent += detokenizer.push(ids[start : start + size])
        start += size
        complete = text.encode()[:start].decode("utf-8", "ignore")
        assert sent == complete
    assert detokenizer.finish() == ""


def ids_for_byte(byte: int) -> list[int]:
    tokens = range(BYTE_LEVEL.vocab_size)
    return [next(t for t in tokens if BYTE_LEVEL.token_bytes(t) == bytes([byte]))]


@given(prompt=sentencepiece_ids, ids=sentencepiece_ids, skip=st.booleans())
@example(prompt=[240, 163], ids=[], skip=False)
def test_sentencepiece_stream_equals_full_decode(
    prompt: list[int], ids: list[int], skip: bool
) -> None:
    full = SENTENCEPIECE.decode(prompt + ids, skip_special_tokens=skip)
    prompt_text = SENTENCEPIECE.decode(prompt, skip_special_tokens=skip)
    text = "".join(stream(SENTENCEPIECE, prompt, ids, skip))
    assert adds_only(text, full, prompt_text)


@given(prompt=texts, text=texts)
def test_sentencepiece_text_comes_back_as_tokenizers_decodes_it(prompt: str, text: str) -> None:
    prompt_ids = ids_of(SENTENCEPIECE_BACKEND, prompt)
    ids = ids_of(SENTENCEPIECE_BACKEND, text)
    assert SENTENCEPIECE.decode(ids) == SENTENCEPIECE_BACKEND.decode(ids)
    streamed = "".join(stream(SENTENCEPIECE, prompt_ids, ids, True))
    assert SENTENCEPIECE_BACKEND.decode(prompt_ids + ids) == (
        SENTENCEPIECE_BACKEND.decode(prompt_ids) + streamed
    )


def test_leading_space_is_kept_after_a_prompt_and_dropped_without() -> None:
    ids = ids_of(SENTENCEPIECE_BACKEND, "the dog")
    assert "".join(stream(SENTENCEPIECE, [], ids, True)) == "the dog"
    assert "".join(stream(SENTENCEPIECE, [1], ids, True)) == "the dog"
    assert "".join(stream(SENTENCEPIECE, ids, ids, True)) == " the dog"


def test_prompt_that_ends_in_half_a_character_is_not_sent_again() -> None:
    pepper = "\N{HOT PEPPER}".encode()
    prompt = ids_of(BYTE_LEVEL_BACKEND, "Hello world ") + [
        token for byte in pepper[:2] for token in ids_for_byte(byte)
    ]
    rest = [token for byte in pepper[2:] + b"!" for token in ids_for_byte(byte)]
    assert stream(BYTE_LEVEL, prompt, rest, True) == ["", "\N{HOT PEPPER}", "!", ""]


def test_character_that_never_ends_becomes_a_replacement() -> None:
    first, second = ids_for_byte(0xF0), ids_for_byte(0x9F)
    assert stream(BYTE_LEVEL, [], first + second, True) == ["", "", REPLACEMENT]
    assert stream(BYTE_LEVEL, [], first + ids_for_byte(0x41), True) == ["", REPLACEMENT + "A", ""]


def test_special_tokens_are_hidden_or_shown() -> None:
    ids = [1, *ids_of(BYTE_LEVEL_BACKEND, "the"), 2]
    assert "".join(stream(BYTE_LEVEL, [], ids, True)) == "the"
    assert "".join(stream(BYTE_LEVEL, [], ids, False)) == "<|im_start|>the<|im_end|>"
