"""The model as the daemon sees it: a checkpoint directory, what it says, and its text tools.

Knows: a GGUF file is converted once, by a process of its own, into a directory in the cache;
everything else of loongd sees only such directories. Does not know: weights, workers, HTTP.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loongd import node
from loongd.config import Config
from loongd.errors import ConfigError, LoongError, ModelError
from loongd.model.cache import converted_dir, is_converted
from loongd.model.shard import Shard
from loongd.model.spec import ModelSpec
from loongd.text.template import ChatTemplate
from loongd.text.tokenizer import Tokenizer, template_text

_log = logging.getLogger(__name__)

OnStage = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint directory; `tokenizer` is None where dummy weights come without one."""

    name: str
    directory: Path
    spec: ModelSpec
    dtype: str
    tokenizer: Tokenizer | None
    default_sampling: dict[str, float]


async def open_checkpoint(config: Config, on_stage: OnStage) -> Checkpoint:
    """Find, if need be convert, and read the configured model. Raises ModelError, ConfigError."""
    path = Path(config.model).expanduser()  # noqa: ASYNC240 - once, before anything is served
    directory, dtype = path, str(config.dtype)
    _check_template(config)
    if path.suffix == ".gguf" and config.load_format == "safetensors":
        raise ConfigError(f"load_format is safetensors, but --model {config.model} is a .gguf file")
    if path.suffix == ".gguf" or config.load_format == "gguf":
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        directory = await _converted(path, dtype, config, on_stage)
    if directory.is_file():
        what = "it is a file, but no .gguf file; a model is a directory or a .gguf file"
        raise ModelError(f"--model {config.model}: {what}")
    if not directory.is_dir():
        what = "no such directory, and not a .gguf file; loongd does not download models"
        raise ModelError(f"--model {config.model}: {what}")
    spec = ModelSpec.from_dir(directory)
    _check_model(config, spec)
    tokenizer = None
    if config.load_format != "dummy" or (directory / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_dir(directory, config.chat_template)
    return Checkpoint(
        name=config.served_model_name or path.name.removesuffix(".gguf"),
        directory=directory,
        spec=spec,
        dtype=spec.torch_dtype if dtype == "auto" else dtype,
        tokenizer=tokenizer,
        default_sampling=_default_sampling(directory),
    )


async def _converted(gguf: Path, dtype: str, config: Config, on_stage: OnStage) -> Path:
    """The converted directory of a GGUF file; a second start finds it in the cache.

    What the configuration contradicts is said when the file's header has been read.
    """
    if not gguf.is_file():  # noqa: ASYNC240 - once, before anything is served
        raise ModelError(f"--model {gguf}: no such file")
    cache = node.cache_dir(config)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cache_dir {cache} cannot be made: {error.strerror}") from None
    directory = converted_dir(gguf, dtype, cache)
    if is_converted(directory):
        return directory
    _log.info("converting %s to %s (once, into %s)", gguf.name, dtype, directory)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "loongd.model.convert", str(gguf), str(directory)),
        *("--dtype", dtype, "--ask"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        async for line in process.stdout:
            said = json.loads(line)
            if "config" in said:
                _check_model(config, ModelSpec.from_config(said["config"], origin=gguf.name))
                process.stdin.write(b"go on\n")
            else:
                on_stage(said["stage"], said["fraction"])
    except LoongError:
        process.stdin.close()  # it gives up
        await process.communicate()
        raise
    _, complaint = await process.communicate()
    if process.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines()
        raise ModelError(lines[-1] if lines else f"{gguf}: conversion failed")
    return directory


def _check_model(config: Config, spec: ModelSpec) -> None:
    """Raise ConfigError when an option asks for what this model cannot do."""
    limit = spec.max_context_tokens
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model allows {limit}")
    try:
        Shard(size=config.tensor_parallel_size).spec(spec)
    except ModelError as error:
        raise ConfigError(str(error)) from None


def _check_template(config: Config) -> None:
    """Raise ConfigError when the chat template of the options is none."""
    if config.chat_template is not None:
        try:
            ChatTemplate(template_text(config.chat_template), {})
        except ModelError as error:
            raise ConfigError(f"chat_template: {error}") from None


def _default_sampling(directory: Path) -> dict[str, float]:
    """Sampling defaults of generation_config.json, if the checkpoint has them."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = json.loads(path.read_text(encoding="utf-8"))
    found = {name: values[name] for name in names if isinstance(values.get(name), int | float)}
    if found:
        _log.info("sampling defaults of generation_config.json: %s", found)
    return found
