"""The command `loongctl`: ask a running daemon, or tell it to drain, over its admin socket.

Knows: where the socket may be, the admin API's paths, exit codes (0 well, 1 the answer is no,
2 wrong usage, 3 no daemon answers).
Does not know: the engine; it imports nothing of loongd but the renderer and what one command needs
(sizes, config), so that it starts at once and works beside a daemon that is broken.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import sys
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, NoReturn

from loongd import __version__, ctl_render, ctl_speed

_TIMEOUT_S = 10.0
_MEASURING_TIMEOUT_S = 120.0
"""Longest silence while the daemon measures: one step of the longest prompt."""
_POLL_S = 0.5


class CtlError(Exception):
    """Ends the command with its lines (mostly one) on stderr and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class UnixConnection(HTTPConnection):
    """An HTTP connection over a unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        # here, not when the interpreter ends, where nothing could be said of it any more
        sys.stdout.flush()
    except CtlError as error:
        for line in str(error).splitlines():
            sys.stderr.write(f"loongctl: error: {line}\n")
        return error.code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # whoever read it has seen enough; nothing is left to be written at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code


# ---- the socket -------------------------------------------------------------------------------


def find_socket(args: argparse.Namespace, env: Mapping[str, str], uid: int) -> str:
    """The admin socket: by flag, by environment, else the first of the usual places that exists.

    When none of these exists, the service's own place, which an error can then name.
    """
    if args.socket:
        return str(args.socket)
    if args.runtime_dir:
        return str(Path(args.runtime_dir, "admin.sock"))
    if env.get("LOONGD_ADMIN_SOCKET"):
        return env["LOONGD_ADMIN_SOCKET"]
    if env.get("LOONGD_RUNTIME_DIR"):
        return str(Path(env["LOONGD_RUNTIME_DIR"], "admin.sock"))
    sockets = _usual_sockets(env, uid)
    return next((path for path in sockets if os.path.exists(path)), sockets[0])


def _usual_sockets(env: Mapping[str, str], uid: int) -> list[str]:
    places = [Path("/run/loongd")]
    if env.get("XDG_RUNTIME_DIR"):
        places.append(Path(env["XDG_RUNTIME_DIR"], "loongd"))
    places.append(Path(f"/tmp/loongd-{uid}"))
    return [str(place / "admin.sock") for place in places]


def _silence(path: str, error: OSError) -> CtlError:
    """What to say when nobody answers on `path`, and of the other places if it is a usual one."""
    words = f"no loongd answers on {path}: {_reason(error)}"
    usual = _usual_sockets(os.environ, os.getuid())
    others = [other for other in usual if path in usual and other != path]
    missing = [other for other in others if not os.path.exists(other)]
    if missing:
        words += f"; nor is there a socket at {' or '.join(missing)}"
    # A socket that a dead daemon left behind must not hide one that may answer.
    for other in others:
        if other not in missing:
            words += f"; try --socket {other}"
    return CtlError(words, 3)


def call(path: str, method: str, url: str) -> tuple[int, dict[str, Any]]:
    """One request to the daemon: status and JSON. Raises CtlError 3 when it does not answer."""
    connection = UnixConnection(path, _TIMEOUT_S)
    try:
        connection.request(method, url, headers={"Content-Length": "0"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except OSError as error:
        raise _silence(path, error) from error
    except (HTTPException, ValueError) as error:
        raise CtlError(f"what answers on {path} is not loongd: {error!r}", 3) from error
    finally:
        connection.close()


def stream(path: str, method: str, url: str, body: Mapping[str, Any]) -> Iterator[bytes]:
    """The lines of a long answer as they come. Raises CtlError 1 for an error, 3 for silence."""
    connection = UnixConnection(path, _MEASURING_TIMEOUT_S)
    try:
        connection.request(method, url, json.dumps(body).encode())
        response = connection.getresponse()
        if response.status >= 400:
            raise CtlError(_message(json.loads(response.read())) or f"HTTP {response.status}", 1)
        yield from response
    except OSError as error:
        raise _silence(path, error) from error
    except (HTTPException, ValueError) as error:
        raise CtlError(f"the answer of loongd on {path} broke off: {error!r}", 3) from error
    finally:
        connection.close()


def ask(args: argparse.Namespace, method: str, url: str) -> dict[str, Any]:
    """The JSON of a good answer. Raises CtlError 1 with the daemon's words when it is an error."""
    path = find_socket(args, os.environ, os.getuid())
    status, body = call(path, method, url)
    if status >= 400:
        raise CtlError(_message(body) or f"{method} {url}: HTTP {status}", 1)
    return body


def _message(body: Mapping[str, Any]) -> str | None:
    error = body.get("error")
    return error.get("message") if isinstance(error, dict) else None


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


# ---- commands ---------------------------------------------------------------------------------


def run_status(args: argparse.Namespace) -> int:
    while True:
        snapshot = ask(args, "GET", "/admin/status")
        if args.watch is not None and sys.stdout.isatty():
            # Home and clear to the end: no scrolling, no flicker.
            print("\x1b[H\x1b[J", end="")
        print(json.dumps(snapshot) if args.json else ctl_render.status(snapshot), flush=True)
        if args.watch is None:
            return 0
        time.sleep(args.watch)


def run_drain(args: argparse.Namespace) -> int:
    answer = ask(args, "POST", "/admin/drain")
    if not args.wait:
        print(f"draining: {_left(answer)}")
        return 0
    deadline = time.monotonic() + args.wait
    shown = None
    while left := answer["running"] + answer["waiting"]:
        if left != shown:
            shown = left
            print(f"draining: {_left(answer)}", file=sys.stderr, flush=True)
        if time.monotonic() >= deadline:
            raise CtlError(f"after {args.wait:g} s not empty: {_left(answer)}", 1)
        time.sleep(_POLL_S)
        answer = ask(args, "GET", "/admin/status")["queue"]
    print("drained: no request is left")
    return 0


def run_undrain(args: argparse.Namespace) -> int:
    answer = ask(args, "POST", "/admin/undrain")
    print(f"admitting requests: {_left(answer)}")
    return 0


def run_story(args: argparse.Namespace) -> int:
    tale = ask(args, "GET", "/admin/story/" + urllib.parse.quote(args.request, safe=""))
    print(json.dumps(tale) if args.json else ctl_render.story(tale))
    return 0


def run_profile(args: argparse.Namespace) -> int:
    path = find_socket(args, os.environ, os.getuid())
    wanted = {"quick": args.quick, "check": args.check, "save": args.out is None}
    if args.seed is not None:
        wanted["seed"] = args.seed
    try:
        last = ctl_speed.follow(stream(path, "POST", "/admin/profile", wanted), sys.stderr)
    except ValueError as error:
        raise CtlError(str(error), 1) from error
    if "error" in last:
        raise CtlError(last["error"], 1)
    if args.out is not None:
        try:
            ctl_speed.write_profile(last["profile"], args.out)
        except OSError as error:
            raise CtlError(f"{args.out}: cannot be written: {_reason(error)}", 1) from error
        last["path"] = args.out
    found = last["check"] if args.check else last
    show = ctl_speed.check if args.check else ctl_speed.profile
    print(json.dumps(found) if args.json else show(found))
    return 0 if not args.check or ctl_speed.is_good(found) else 1


def run_plan(args: argparse.Namespace) -> int:
    query = urllib.parse.urlencode({"tokens": args.tokens, "max_tokens": args.max_tokens})
    answer = ask(args, "GET", f"/admin/plan?{query}")
    print(json.dumps(answer) if args.json else ctl_speed.plan(answer))
    return 0 if answer["dop"] else 1


def run_config_check(args: argparse.Namespace) -> int:
    # Here and not above: msgspec and tomllib would slow down every other command.
    from loongd import config, errors  # noqa: PLC0415

    path, must_exist = config.config_file(os.environ, args.file)
    is_there = must_exist or Path(path).exists()
    try:
        text = Path(path).read_text(encoding="utf-8") if is_there else ""
        file = config.parse_toml(text, file_name=path)
        if found := config.problems(file, os.environ, file_name=path):
            raise CtlError("\n".join(found), 1)
        settings = config.merge(file, os.environ, {}, file_name=path)
    except (OSError, UnicodeDecodeError) as error:
        raise CtlError(f"{path}: cannot be read: {_reason(error)}", 1) from error
    except errors.ConfigError as error:
        raise CtlError(str(error), 1) from error
    if args.dump:
        print(config.dump_toml(settings), end="")
    else:
        what = path if is_there else f"environment (there is no {path})"
        print(f"{what}: good" + ("" if settings.model else "; no model is named"))
    return 0


def _left(answer: Mapping[str, int]) -> str:
    return f"{answer['running']:,} running, {answer['waiting']:,} waiting"


# ---- arguments --------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized") and re.search(
            r"--(socket|runtime-dir)( |=|$)", message
        ):
            message += "; --socket and --runtime-dir go ahead of the command"
        self.exit(2, f"loongctl: error: {message} (see {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The command line of `loongctl`."""
    parser = _Parser(
        prog="loongctl",
        description="Ask a running loongd, or tell it to drain.",
        epilog="Exit codes: 0 well; 1 the answer is no; 2 wrong usage; 3 no daemon answers.",
    )
    parser.add_argument("--version", action="version", version=f"loongctl {__version__}")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--socket",
        metavar="PATH",
        help="the daemon's admin socket (default: $LOONGD_ADMIN_SOCKET, "
        "$LOONGD_RUNTIME_DIR/admin.sock, or where a daemon usually has it)",
    )
    where.add_argument(
        "--runtime-dir", metavar="DIR", help="the daemon's --runtime-dir, which has the socket"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    one = commands.add_parser("status", help="instances, groups, pool and queue")
    one.add_argument("--json", action="store_true", help="the daemon's own JSON, on one line")
    one.add_argument("--watch", type=_positive, metavar="SECONDS", help="again and again")
    one.set_defaults(run=run_status)

    one = commands.add_parser("drain", help="refuse new requests; accepted ones go on")
    one.add_argument(
        "--wait",
        type=_positive,
        nargs="?",
        const=float("inf"),
        metavar="SECONDS",
        help="return when no request is left; exit code 1 if SECONDS pass first",
    )
    one.set_defaults(run=run_drain)

    one = commands.add_parser("undrain", help="admit requests again")
    one.set_defaults(run=run_undrain)

    one = commands.add_parser("story", help="what happened to one request, and why")
    one.add_argument(
        "request",
        metavar="REQUEST",
        help="its id, from a response or the log; or your own X-Request-Id",
    )
    one.add_argument("--json", action="store_true", help="the daemon's own JSON, on one line")
    one.set_defaults(run=run_story)

    one = commands.add_parser("profile", help="measure how fast the workers are, and keep it")
    one.add_argument("--quick", action="store_true", help="half a minute, on CPUs some 3 minutes")
    what = one.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare predictions with new steps")
    what.add_argument("--out", metavar="FILE", help="default: the daemon's state directory")
    one.add_argument("--seed", type=int, metavar="N", help="check other batches")
    one.add_argument("--json", action="store_true", help="the daemon's own JSON, on one line")
    one.set_defaults(run=run_profile)

    one = commands.add_parser("plan", help="what would happen to a prompt now")
    one.add_argument(
        "tokens", type=_count, metavar="TOKENS", help="length of the prompt, such as 8000 or 8K"
    )
    text = "longest answer (default: %(default)s)"
    one.add_argument("--max-tokens", type=_count, default=128, metavar="N", help=text)
    one.add_argument("--json", action="store_true", help="the daemon's own JSON, on one line")
    one.set_defaults(run=run_plan)

    checks = commands.add_parser("config", help="check a configuration file")
    one = checks.add_subparsers(metavar="COMMAND", required=True).add_parser(
        "check", help="say whether file and environment make a configuration"
    )
    one.add_argument("file", metavar="FILE", nargs="?", help="default: the daemon's own")
    one.add_argument(
        "--dump", action="store_true", help="print every option in force, API keys included"
    )
    one.set_defaults(run=run_config_check)
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, above 0")
    return value


def _count(text: str) -> int:
    from loongd.sizes import parse_size  # noqa: PLC0415 - fractions are slow to import

    try:
        value = parse_size(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected a whole number of at least 1 (8k is 8,000, 8K is 8,192)"
        )
    return value


if __name__ == "__main__":
    sys.exit(main())
