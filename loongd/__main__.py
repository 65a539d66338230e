"""The command `loongd`: arguments to a configuration, a configuration to a running daemon.

Knows: the command line, which file to read, and exit codes (0 stopped as asked, 1 failed,
2 wrong usage or configuration, which trying again cannot help).
Does not know: what any option means; flags and help are made from `Config`.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from loongd import __version__, config, log
from loongd.config import Config
from loongd.errors import ConfigError, LoongError
from loongd.options import Option


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to stop; the exit code."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:  # before the daemon listens for signals
        return 130


def _run(argv: Sequence[str]) -> int:
    try:
        settings = load(argv, os.environ)
    except ConfigError as error:
        return _complain(error, 2)
    log.setup(settings.log_level, settings.log_format, env=os.environ)

    # Here and not above: the daemon brings in aiohttp, tokenizers and more, half a second that
    # --help, --version and a wrong option should not wait for.
    import uvloop  # noqa: PLC0415

    from loongd.daemon import Daemon  # noqa: PLC0415

    try:
        return uvloop.run(Daemon(settings).run())
    except ConfigError as error:
        return _complain(error, 2)
    except LoongError as error:
        return _complain(error, 1)


def load(argv: Sequence[str], env: Mapping[str, str]) -> Config:
    """The configuration that command line, environment and file make together.

    Raises:
        ConfigError: one line for a person.
        SystemExit: after --help and --version, and for an unknown flag.
    """
    if argv[:1] == ["serve"] and not Path("serve").exists():  # the habit of vLLM
        raise ConfigError('there is no command "serve": loongd MODEL ...')
    given = vars(build_parser().parse_args(argv))
    positional, file_flag = given.pop("positional_model"), given.pop("config")
    if positional is not None and given.setdefault("model", positional) != positional:
        raise ConfigError(f"two models are given: {positional!r} and --model {given['model']!r}")
    path, must_exist = config.config_file(env, file_flag)
    settings = config.merge(read_file(path, must_exist=must_exist), env, given, file_name=path)
    if not settings.model:
        raise ConfigError("no model is given: loongd --model PATH (or LOONGD_MODEL, or the file)")
    return settings


def read_file(path: str, *, must_exist: bool) -> dict[str, Any]:
    """The keys of a configuration file; none when it need not exist and does not."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"{path}: no such file") from None
        return {}
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    return config.parse_toml(text, file_name=path)


def build_parser() -> argparse.ArgumentParser:
    """The command line: one flag for each field of `Config`, in the groups of the file."""
    parser = _Parser(
        prog="loongd",
        usage="loongd [OPTIONS] [MODEL]",
        description="Serve a language model with elastic sequence parallelism.",
        epilog="Each option is also a key of the configuration file (max_model_len) and an "
        "environment variable (LOONGD_MAX_MODEL_LEN); the command line wins over the "
        "environment, which wins over the file. Sizes take suffixes: 128k is 128,000, "
        "128K is 131,072. Exit codes: 0 stopped as asked; 1 failed, or what it needs is missing or "
        "taken (model, memory, address, port, runtime directory); 2 wrong usage or configuration.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "positional_model", metavar="MODEL", nargs="?", help="the same as --model MODEL"
    )
    parser.add_argument("--version", action="version", version=f"loongd {__version__}")
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"configuration file (default: {config.DEFAULT_FILE}, if it exists)",
    )
    group = parser.add_argument_group("General")
    for option in config.OPTIONS.values():
        if option.name in config.SECTIONS:
            group = parser.add_argument_group(config.SECTIONS[option.name])
        _add_flag(group, option)
    return parser


def _add_flag(group: argparse._ArgumentGroup, option: Option) -> None:
    # Values stay texts, and absent flags stay absent: `config.merge` gives them types and
    # defaults, so that a wrong one is reported alike from every source.
    common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
    stated = "" if option.default in (None, "", []) else f" (default: {_shown(option.default)})"
    common["help"] = f"{option.help}{stated}".replace("%", "%%")
    match option.kind:
        case "bool":
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, **common)
        case "list":
            group.add_argument(option.flag, action="append", metavar="KEY", **common)
        case kind:
            words = {"int": "N", "float": "X", "str": "TEXT"}
            metavar = f"{{{','.join(option.choices)}}}" if option.choices else words[kind]
            short = ["-tp"] if option.name == "tensor_parallel_size" else []
            group.add_argument(*short, option.flag, metavar=metavar, **common)


def _shown(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) else f"{default}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # The usual error repeats the usage of forty flags, and the one line that matters drowns.
        self.exit(2, f"loongd: error: {message} ({self._did_you_mean(message)}see loongd --help)\n")

    def _did_you_mean(self, message: str) -> str:
        """`did you mean '--model'? `, where a flag is unknown and like one that there is."""
        is_unknown = message.startswith("unrecognized arguments:")
        words = re.findall(r"(?<!\S)--[^\s=]+", message) if is_unknown else []
        close = [difflib.get_close_matches(w, self._option_string_actions, n=1) for w in words]
        found = ", ".join(repr(flag) for flags in close for flag in flags)
        return f"did you mean {found}? " if found else ""


def _complain(error: LoongError, code: int) -> int:
    sys.stderr.write(f"loongd: error: {error}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
