"""The tokenizer of a model directory: text to ids, ids to text, messages to text.

Knows: the files of a Hugging Face checkpoint that describe its tokenizer, and how to encode a
long text without stopping the event loop. Does not know: requests, weights, torch.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from loongd.errors import ModelError, RequestError
from loongd.text.chunks import can_cut, chunks_of
from loongd.text.template import ChatTemplate
from loongd.text.token_bytes import TokenBytes, strip_start

# Below this a thread costs more than the encoding.
INLINE_CHARS = 2048
CHUNK_CHARS = 1 << 16
# Chunks given to the library at once; handing over and freeing a batch holds the lock.
BATCH_CHUNKS = 16


class Tokenizer:
    """One model's tokenizer; make it with `from_dir`.

    Attributes:
        vocab_size: largest token id plus one.
        bos_token_id: the id that begins a text, if the model has one.
        eos_token_ids: every id that ends a generation.
        token_bytes_table: the bytes of each token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """`templates` are Jinja texts by name: `default`, and `tool_use` for requests with tools.

        Raises ModelError when a decoder or template cannot be used.
        """
        backend.no_truncation()
        backend.no_padding()
        description = json.loads(backend.to_str())
        specials = special_tokens or {}
        self._backend = backend
        self._can_cut = can_cut(backend, description)
        self._before, self._after = _added_around(backend)
        self._templates = {
            name: ChatTemplate(text, specials) for name, text in (templates or {}).items()
        }
        self.token_bytes_table = TokenBytes(backend, description.get("decoder"))
        self.vocab_size = self.token_bytes_table.num_tokens
        self.bos_token_id = bos_token_id
        self.eos_token_ids = frozenset(eos_token_ids)

    @classmethod
    def from_dir(cls, model_dir: Path, chat_template: str | None = None) -> Tokenizer:
        """Read the tokenizer of a checkpoint directory.

        Args:
            model_dir: holds tokenizer.json; the other files are optional.
            chat_template: replaces the model's own: Jinja text, or the path of a file with it.

        Raises:
            ModelError: a file is missing, broken or not supported; the message names it.
        """
        backend = _load_backend(model_dir)
        config = _read_json(model_dir / "tokenizer_config.json")
        specials = _special_tokens(_read_json(model_dir / "special_tokens_map.json"))
        specials |= _special_tokens(config)
        model = _read_json(model_dir / "config.json")
        generation = _read_json(model_dir / "generation_config.json")
        bos = _ids(backend.token_to_id(specials["bos_token"]) if "bos_token" in specials else None)
        eos = _ids(backend.token_to_id(specials["eos_token"]) if "eos_token" in specials else None)
        if chat_template is None:
            templates = _templates(model_dir, config)
        else:
            templates = {"default": template_text(chat_template)}
        return cls(
            backend,
            special_tokens=specials,
            bos_token_id=next(iter([*bos, *_ids(model.get("bos_token_id"))]), None),
            eos_token_ids=[
                *eos,
                *_ids(model.get("eos_token_id")),
                *_ids(generation.get("eos_token_id")),
            ],
            templates=templates,
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return "default" in self._templates

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> array[int]:
        """Token ids of `text`, without holding up the event loop.

        Args:
            text: any text; special tokens written out in it become their ids.
            add_special_tokens: put BOS (or what the tokenizer adds) around it. A BOS that the
                text already begins with is not doubled. Rendered chats need False.

        Raises:
            RequestError: the text has an unpaired surrogate.
        """
        if len(text) <= INLINE_CHARS:
            ids = self._encode(text)
        else:
            ids = await asyncio.to_thread(self._encode, text)
        if not add_special_tokens:
            return ids
        before = self._before
        if before and ids[:1] == before[:1] == array("i", [self.bos_token_id or 0]):
            before = before[1:]
        return before + ids + self._after if before or self._after else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        data = self.token_bytes_table.join(ids, skip_special_tokens=skip_special_tokens)
        text, _ = strip_start(data.decode("utf-8", "replace"), self.token_bytes_table.strip_left)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for, also for special tokens."""
        return self.token_bytes_table.of(token)

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; U+FFFD for parts of characters."""
        return self.token_bytes_table.of(token).decode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text for `messages`; encode it with `add_special_tokens=False`.

        Raises RequestError when the model has no template or the template refuses the messages.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise RequestError(
                "the model has no chat template; use /v1/completions or start with --chat-template",
                param="messages",
            )
        return template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **kwargs
        )

    def _encode(self, text: str) -> array[int]:
        chunks = chunks_of(text, CHUNK_CHARS) if self._can_cut else [text]
        ids = array("i")
        for start in range(0, len(chunks), BATCH_CHUNKS):
            for encoding in self._encode_batch(chunks[start : start + BATCH_CHUNKS]):
                ids.extend(encoding.ids)
        return ids

    def _encode_batch(self, chunks: list[str]) -> list[tokenizers.Encoding]:
        try:
            # Unlike encode(), this releases the interpreter lock and tracks no offsets.
            return self._backend.encode_batch_fast(chunks, add_special_tokens=False)
        except TypeError as error:
            text = "".join(chunks)
            bad = next((char for char in text if "\ud800" <= char <= "\udfff"), None)
            if bad is None:
                raise
            raise RequestError(
                f"the text has an unpaired surrogate, U+{ord(bad):X}, which is no character"
            ) from error


def _added_around(backend: tokenizers.Tokenizer) -> tuple[array[int], array[int]]:
    """The ids that encoding with special tokens puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return array("i", full[:start]), array("i", full[start + len(plain) :])
    raise ModelError("the post-processor in tokenizer.json changes the text's own tokens")


def _load_backend(model_dir: Path) -> tokenizers.Tokenizer:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        hint = ""
        if (model_dir / "tokenizer.model").is_file():
            hint = "; tokenizer.model alone is not enough, save the fast tokenizer next to it"
        raise ModelError(f"{path} is missing{hint}")
    try:
        # from_buffer raises ValueError where from_file and from_str raise a bare Exception.
        return tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path} is not a tokenizer: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    specials = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            specials[key] = text
    return specials


def _ids(value: Any) -> list[int]:
    match value:
        case int():
            return [value]
        case list():
            return [item for item in value if isinstance(item, int)]
    return []


def _templates(model_dir: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a file of its own wins over tokenizer_config.json, as in transformers."""
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    value = _read_json(model_dir / "chat_template.json").get("chat_template")
    match value or config.get("chat_template"):
        case None:
            return {}
        case str(text):
            return {"default": text}
        case [*entries] if all(
            isinstance(e, dict) and {"name", "template"} <= set(e) for e in entries
        ):
            return {str(entry["name"]): str(entry["template"]) for entry in entries}
    raise ModelError(f"chat_template in {model_dir} is neither a text nor a list of templates")


def template_text(value: str) -> str:
    """The template that an option means: Jinja text, or a file with it. Raises ModelError."""
    if "{" in value:
        return value
    path = Path(value)
    if not path.is_file():
        raise ModelError(f"the chat template {value} is not a file")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the chat template {value} cannot be read: {error}") from None
