"""Configuration: one frozen value, checked at the door.

Knows: every option, its default, its bounds and its help (the `Meta` beside it), and how layers
are merged: command line over environment (`LOONGD_*`) over file over defaults.
Does not know: argparse, files, the environment itself; callers hand in plain values.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from math import isfinite
from types import MappingProxyType
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from loongd.errors import ConfigError
from loongd.options import ENV_PREFIX, Option, options_of
from loongd.sizes import parse_size

ENV_CONFIG = "LOONGD_CONFIG"
ENV_ADMIN_SOCKET = "LOONGD_ADMIN_SOCKET"
DEFAULT_FILE = "/etc/loongd/loongd.toml"
_NO_OPTIONS = (ENV_CONFIG, ENV_ADMIN_SOCKET, f"{ENV_PREFIX}TEST_")

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every option of the daemon; keys of the file and long flags are the same words."""

    # -- model
    model: Annotated[
        str, Meta(description="Directory of a Hugging Face checkpoint, or a .gguf file.")
    ] = ""
    served_model_name: Annotated[
        str | None, Meta(description="Name clients use; default: the last part of --model.")
    ] = None
    load_format: Annotated[
        Literal["auto", "safetensors", "gguf", "dummy"],
        Meta(description="Where weights come from; dummy: seeded random weights from config.json."),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="Type of weights and KV; auto: the checkpoint's own."),
    ] = "auto"
    max_model_len: Annotated[
        Count | None,
        Meta(description="Most tokens per request (128k and 1M work); default: model and pool."),
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="Jinja file that replaces the model's chat template.")
    ] = None
    seed: Annotated[int, Meta(description="Seed of dummy weights.")] = 0
    # -- engine
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto: cuda when a GPU is there.")
    ] = "auto"
    instances: Annotated[
        Count | None,
        Meta(description="Elastic instances; default: as many as GPUs allow, or one on the CPU."),
    ] = None
    tensor_parallel_size: Annotated[
        Count,
        Meta(description="Workers per instance, on one GPU each; must divide the KV heads."),
    ] = 1
    deterministic: Annotated[
        bool, Meta(description="Same tokens in any batch, group and chunks; several times slower.")
    ] = False
    kv_pool_tokens: Annotated[
        Count | None,
        Meta(description="KV slots of each instance; default: what memory allows."),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0, le=1, description="Share of GPU memory for weights, KV and work.")
    ] = 0.9
    profile: Annotated[
        str | None,
        Meta(description="File of loongctl profile to predict from; default: one that matches."),
    ] = None
    policy: Annotated[
        Literal["fcfs", "loongserve"],
        Meta(description="Scheduling policy: loongserve weighs predicted times, and chunks."),
    ] = "loongserve"
    max_prefill_wait: Annotated[
        Seconds,
        Meta(
            description="Seconds that a step of a long prompt may take, and so about the longest "
            "that short ones wait for it. Shorter: they wait less, long prompts take longer."
        ),
    ] = 0.3
    decode_share: Annotated[
        float,
        Meta(
            gt=0,
            le=10,
            description="Seconds of decode for each second of a prefill on the same instance.",
        ),
    ] = 0.5
    max_passes: Annotated[
        Count,
        Meta(description="Requests that may pass the head of the queue while it lacks KV slots."),
    ] = 1000
    max_num_seqs: Annotated[
        Count, Meta(description="Most requests that prefill or decode at the same time.")
    ] = 256
    max_num_batched_tokens: Annotated[
        Count, Meta(description="Most short-prompt tokens that share one prefill step.")
    ] = 8192
    max_step_tokens: Annotated[
        Count,
        Meta(description="Most new tokens of one instance in a step; memory is kept for so many."),
    ] = 131072
    prefill_tokens_per_instance: Annotated[
        Count,
        Meta(description="A prompt gets one more instance for each so many tokens."),
    ] = 512
    default_reserve_tokens: Annotated[
        Count,
        Meta(description="Growth that admission counts on for a request without max_tokens."),
    ] = 1024
    max_num_queued_reqs: Annotated[
        Count, Meta(description="Requests that may wait; more get 503 with Retry-After.")
    ] = 4096
    queue_ahead: Annotated[
        bool, Meta(description="Give workers a group's next decode step before the last has ended.")
    ] = True
    # -- API
    host: Annotated[str, Meta(description="Address of the API.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port of the API; 0 takes a free one.")
    ] = 8000
    api_key: Annotated[
        list[str], Meta(description="Keys that clients must send as Bearer; repeatable.")
    ] = []
    api_key_file: Annotated[
        str | None, Meta(description="File with one key a line; # starts a comment.")
    ] = None
    max_body_bytes: Annotated[Count, Meta(description="Largest request body; more gets 413.")] = (
        64 << 20
    )
    sse_keep_alive_interval: Annotated[
        Seconds, Meta(description="Seconds between comments on a silent stream; 0 is off.")
    ] = 15.0
    # -- operation
    runtime_dir: Annotated[
        str | None,
        Meta(description="Directory (0700) for sockets; default: $RUNTIME_DIRECTORY or per user."),
    ] = None
    cache_dir: Annotated[
        str | None,
        Meta(description="Directory for converted models; default: $CACHE_DIRECTORY or per user."),
    ] = None
    shutdown_timeout: Annotated[
        Seconds, Meta(description="Seconds that SIGTERM waits for running requests.")
    ] = 300.0
    startup_timeout: Annotated[
        Seconds, Meta(description="Seconds without progress after which a start fails.")
    ] = 300.0
    worker_timeout: Annotated[
        Seconds,
        Meta(description="Seconds without a sign of life that make a worker count as dead."),
    ] = 15.0
    step_timeout: Annotated[
        Seconds, Meta(description="Seconds in a step without finishing a layer before a restart.")
    ] = 600.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="Least severe log line.")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="One line, or one JSON object, an event.")
    ] = "text"
    enable_log_requests: Annotated[
        bool, Meta(description="Log one line for each finished or refused request.")
    ] = True


# ---- options as data --------------------------------------------------------------------------


OPTIONS: Mapping[str, Option] = MappingProxyType(options_of(Config))

# The first field of each part of the file and of --help.
SECTIONS: Mapping[str, str] = MappingProxyType(
    {"model": "Model", "device": "Engine", "host": "API", "runtime_dir": "Operation"}
)

# ---- layers -----------------------------------------------------------------------------------


def config_file(env: Mapping[str, str], flag: str | None) -> tuple[str, bool]:
    """The configuration file to read, and whether it must exist (it was asked for by name)."""
    chosen = flag or env.get(ENV_CONFIG)
    return (chosen, True) if chosen else (DEFAULT_FILE, False)


def parse_toml(text: str, *, file_name: str) -> dict[str, Any]:
    """The keys of a configuration file. Raises ConfigError with the line of a syntax error."""
    try:
        return msgspec.toml.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file_name}: not valid TOML: {error}") from error


def merge(
    file: Mapping[str, Any],
    env: Mapping[str, str],
    cli: Mapping[str, Any],
    *,
    file_name: str = "configuration file",
) -> Config:
    """One configuration from its layers: `cli` over `env` over `file` over defaults.

    Args:
        file: keys of the TOML file (from `parse_toml`).
        env: the whole environment; only `LOONGD_*` is looked at.
        cli: fields given on the command line, as strings or typed; absent when not given.
        file_name: how errors call the file.

    Raises:
        ConfigError: one line that names source, key and value. Every layer is checked, also
            where a higher one wins: a broken file is never hidden by a flag.
    """
    values, wrong = _read(file, env, cli, file_name)
    if wrong:
        raise wrong[0]
    config = msgspec.convert(values, Config)
    check(config)
    return config


def problems(
    file: Mapping[str, Any], env: Mapping[str, str], *, file_name: str = "configuration file"
) -> list[str]:
    """All keys and values of the two layers that `merge` refuses, a line each."""
    return [str(error) for error in _read(file, env, {}, file_name)[1]]


def _read(
    file: Mapping[str, Any], env: Mapping[str, str], cli: Mapping[str, Any], file_name: str
) -> tuple[dict[str, Any], list[ConfigError]]:
    """The values of all layers, and what is wrong with them."""
    values: dict[str, Any] = {}
    wrong: list[ConfigError] = []
    for found in _layers(file, env, cli, file_name):
        if isinstance(found, ConfigError):
            wrong.append(found)
            continue
        option, value, where = found
        try:
            values[option.name] = _checked(option, value, where)
        except ConfigError as error:
            wrong.append(error)
    return values, wrong


def _layers(
    file: Mapping[str, Any], env: Mapping[str, str], cli: Mapping[str, Any], file_name: str
) -> Iterator[tuple[Option, Any, str] | ConfigError]:
    """Each value that is given, with its place in words, from the lowest layer up."""
    for key, value in file.items():
        if isinstance(value, dict):
            yield ConfigError(f"{file_name}: [{key}]: no tables: keys go at the top level")
        elif key not in OPTIONS:
            yield ConfigError(f"{file_name}: unknown key {key!r}{_did_you_mean(key)}")
        else:
            yield OPTIONS[key], value, f"{file_name}: {key} = {value!r}"
    by_variable = {option.variable: option for option in OPTIONS.values()}
    for variable in sorted(env):
        if not variable.startswith(ENV_PREFIX) or variable.startswith(_NO_OPTIONS):
            continue
        if variable not in by_variable:
            # Compared without the prefix, which would make any two variables look alike.
            word = variable.removeprefix(ENV_PREFIX).lower()
            yield ConfigError(
                f"environment: unknown variable {variable}{_did_you_mean(word, variable=True)}"
            )
        else:
            text = env[variable]
            yield by_variable[variable], text, f"environment {variable}={text!r}"
    for key, value in cli.items():
        yield OPTIONS[key], value, f"{OPTIONS[key].flag} {value!r}"


def check(config: Config) -> None:
    """Raise ConfigError where two options contradict, or a value is legal but unsupported."""
    if config.max_num_batched_tokens > config.max_step_tokens:
        raise ConfigError(
            f"max_num_batched_tokens is {config.max_num_batched_tokens}, but an instance may have "
            f"only {config.max_step_tokens} new tokens in a step (max_step_tokens)"
        )
    if not config.host:
        raise ConfigError("host is empty: name an address (0.0.0.0 for all of IPv4)")
    if not all(key.strip() for key in config.api_key):
        raise ConfigError("api_key holds an empty key: remove it, or the API stays open to it")
    pool = (config.instances or 0) * (config.kv_pool_tokens or 0)
    if pool and config.max_model_len and config.max_model_len > pool:
        raise ConfigError(
            f"max_model_len is {config.max_model_len} tokens, but the pool holds only {pool} "
            f"({config.instances} instances x {config.kv_pool_tokens} kv_pool_tokens)"
        )


def _checked(option: Option, value: Any, where: str) -> Any:
    """The value in the option's type. Raises ConfigError that starts with `where`."""
    if isinstance(value, str):
        value = _from_text(option, value, where)
    try:
        typed = msgspec.convert({option.name: value}, Config, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        raise ConfigError(f"{where}: {option.expected}") from None
    result = getattr(typed, option.name)
    if isinstance(result, float) and not isfinite(result):
        raise ConfigError(f"{where}: {option.expected}, and finite")
    return result


def _from_text(option: Option, text: str, where: str) -> Any:
    match option.kind:
        case "list":
            return [part.strip() for part in text.split(",") if part.strip()]
        case "int" if text.lower() != "null":
            try:
                return parse_size(text)
            except ValueError:
                raise ConfigError(f"{where}: {option.expected}") from None
        case "bool":
            words = {"on": True, "yes": True, "off": False, "no": False}
            return words.get(text.lower(), text)
        case _:
            return text


def _did_you_mean(word: str, *, variable: bool = False) -> str:
    close = difflib.get_close_matches(word, OPTIONS, n=1)
    if not close:
        return ""
    option = OPTIONS[close[0]]
    return f" (did you mean {(option.variable if variable else option.name)!r}?)"


# ---- the file ---------------------------------------------------------------------------------


def dump_toml(config: Config) -> str:
    """All options as commented TOML that parses back to `config` (API keys included).

    An option that is not set stands as a comment, `# key =`, since TOML has no null.
    """
    lines = [
        "# Configuration of loongd: every option, with its default.",
        "#",
        "# The command line (--max-model-len) wins over the environment (LOONGD_MAX_MODEL_LEN),",
        "# which wins over this file. Check a change with: loongctl config check FILE",
        "# Sizes may be texts with a suffix: k, m, g are decimal, K, M, G binary",
        '# ("128k" is 128,000 and "128K" is 131,072).',
    ]
    for option in OPTIONS.values():
        if option.name in SECTIONS:
            rule = f"# -- {SECTIONS[option.name]} "
            lines += ["", rule + "-" * (80 - len(rule))]
        value = getattr(config, option.name)
        lines += ["", f"# {option.help}"]
        if option.choices and len(option.choices) > 1:
            lines.append(f"# One of: {', '.join(option.choices)}.")
        # For text, numbers, booleans and lists of texts, JSON and TOML are the same, but for
        # the one control character that only TOML wants escaped.
        written = msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
        lines.append(f"# {option.name} =" if value is None else f"{option.name} = {written}")
    return "\n".join(lines) + "\n"
