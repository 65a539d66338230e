"""A Hugging Face tokenizer from the tokenizer fields of a GGUF file.

Knows: the two tokenizers of llama-family GGUF files, `gpt2` (byte-level BPE with a named
pre-tokenizer) and `llama` (SentencePiece BPE with byte fallback), and what their fields mean.
Does not know: GGUF files; callers hand in plain values by field name.

The pre-tokenizer patterns are those of the models' own tokenizer.json files; `default` is
llama.cpp's fallback for files without a known pre-tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from loongd.errors import ModelError

SPACE = "\u2581"
TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER_DEFINED = 2, 3, 4

GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: Mapping[str, Sequence[str]] = {
    "gpt-2": (GPT2_PATTERN,),
    "smollm": (r"\p{N}", GPT2_PATTERN),
    "llama-bpe": (CL100K_PATTERN.replace("DIGITS", "{1,3}"),),
    "qwen2": (CL100K_PATTERN.replace("DIGITS", ""),),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_PATTERN, r"\p{N}+", r"[0-9][0-9][0-9]"),
}


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` fields describe; token ids are list positions.

    Raises ModelError when a field is missing, or names an unsupported model or pre-tokenizer.
    """
    match fields.get("tokenizer.ggml.model"):
        case "gpt2":
            tokenizer = _byte_level_bpe(fields)
        case "llama":
            tokenizer = _sentencepiece_bpe(fields)
        case other:
            raise ModelError(
                f"tokenizer.ggml.model is {other!r}; supported in GGUF files: 'gpt2', 'llama'"
            )
    _add_tokens(tokenizer, fields)
    _add_template(tokenizer, fields)
    return tokenizer


def build_tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json that goes with `build_tokenizer`."""
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos(fields),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, field in names.items():
        token = _token_of(fields, field)
        if token is not None:
            config[f"{name}_token"] = token
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def adds_bos(fields: Mapping[str, Any]) -> bool:
    """Whether encoding starts with BOS: the field, or llama.cpp's default for the model."""
    default = (
        fields.get("tokenizer.ggml.model") == "llama"
        or fields.get("tokenizer.ggml.pre") == "llama-bpe"
    )
    return bool(fields.get("tokenizer.ggml.add_bos_token", default))


def eos_ids(fields: Mapping[str, Any]) -> list[int]:
    """Ids that end a generation: end of sequence, of turn, of message; the first is the main."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    ids = [int(fields[key]) for key in keys if key in fields]
    return list(dict.fromkeys(ids))


def _required(fields: Mapping[str, Any], key: str) -> list[Any]:
    values = fields.get(key)
    if not values:
        raise ModelError(f"the GGUF file has no {key}, which its tokenizer needs")
    return list(values)


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, int]:
    tokens = _required(fields, "tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ModelError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    return vocabulary


def _byte_level_bpe(fields: Mapping[str, Any]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in PATTERNS:
        raise ModelError(
            f"tokenizer.ggml.pre is {pre!r}; supported in GGUF files: {', '.join(PATTERNS)}"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _required(fields, "tokenizer.ggml.merges")]
    vocabulary = _vocabulary(fields)
    tokenizer = Tokenizer(
        BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=pre == "llama-bpe")
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PATTERNS[pre]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(fields: Mapping[str, Any]) -> Tokenizer:
    scores = _required(fields, "tokenizer.ggml.scores")
    vocabulary = _vocabulary(fields)
    if len(scores) != len(vocabulary):
        raise ModelError(
            f"tokenizer.ggml.scores has {len(scores)} values for {len(vocabulary)} tokens"
        )
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=list(_merges(vocabulary, scores)),
            unk_token=_token_of(fields, "unknown") or "<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), replace] if prefix else [replace]
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> Iterable[tuple[str, str]]:
    """Merges in the order SentencePiece applies them: the best-scored result first.

    Each token gives one merge for every way to split it into two tokens, as transformers'
    SentencePiece conversion does.
    """
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                key = (-scores[index], vocabulary[left], vocabulary[right])
                ranked.append((*key, (left, right)))
    ranked.sort()
    return (pair for *_, pair in ranked)


def _add_tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    tokens = _required(fields, "tokenizer.ggml.tokens")
    types = fields.get("tokenizer.ggml.token_type") or []
    added = [
        AddedToken(token, special=kind != TYPE_USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (TYPE_UNKNOWN, TYPE_CONTROL, TYPE_USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_template(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    before = _token_of(fields, "bos") if adds_bos(fields) else None
    after = _token_of(fields, "eos") if fields.get("tokenizer.ggml.add_eos_token") else None
    specials = [token for token in (before, after) if token is not None]
    if not specials:
        return
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token for token in (before, "$A", after) if token is not None],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys(specials)],
    )


def _token_of(fields: Mapping[str, Any], name: str) -> str | None:
    index = fields.get(f"tokenizer.ggml.{name}_token_id")
    tokens = _required(fields, "tokenizer.ggml.tokens")
    if index is None or not 0 <= index < len(tokens):
        return None
    return str(tokens[index])
