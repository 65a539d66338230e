"""What the daemon finds out about its machine: directories, GPUs, cores.

Knows: defaults that depend on the user and the environment. Does not know: models, workers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import NamedTuple

from loongd.config import Config
from loongd.errors import BusyError, ConfigError

_MOST_PATH_BYTES = 80
"""A socket's path has 107, and the daemon's sockets have names in its directory."""
_LEAST_PINNED = 4
"""Cores of a worker on a CPU from which on it keeps to its own."""


def runtime_dir(config: Config) -> Path:
    """The directory for sockets, made with mode 0700. Raises ConfigError."""
    user = os.getuid()
    candidates = (config.runtime_dir, os.environ.get("RUNTIME_DIRECTORY"))
    fallback = os.environ.get("XDG_RUNTIME_DIR")
    chosen = next((c for c in candidates if c), None) or (
        f"{fallback}/loongd" if fallback else f"/tmp/loongd-{user}"
    )
    path = Path(chosen).absolute()
    if len(os.fsencode(path)) > _MOST_PATH_BYTES:
        raise ConfigError(
            f"runtime_dir {path} has {len(os.fsencode(path))} bytes, of which a socket's path "
            f"leaves room for {_MOST_PATH_BYTES}"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
        if status.st_uid != user:
            raise ConfigError(f"runtime_dir {path} belongs to user {status.st_uid}, not {user}")
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"runtime_dir {path}: {error.strerror or error}") from None
    return path


def check_address(host: str, port: int) -> None:
    """Raise BusyError when another server listens there; before what takes long."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:  # of the others the server itself is a better judge
            where = f"{host}:{port}"
            raise BusyError(f"cannot listen on {where}: {error.strerror}") from None


def claim(directory: Path) -> int:
    """Take a runtime directory for this process; returns the descriptor that holds the lock.

    Two daemons in one directory would unlink each other's sockets. Raises BusyError.
    """
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise BusyError(
            f"runtime_dir {directory} is in use by another loongd (pid {holder}); "
            "stop it, or give --runtime-dir"
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def cache_dir(config: Config) -> Path:
    """The directory for converted models; not made yet."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    base = os.environ.get("CACHE_DIRECTORY")
    if base:
        return Path(base)
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "loongd" / "converted"


def gpus() -> list[str]:
    """GPUs that a worker would see, without loading CUDA into the daemon."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    nodes = sorted(p.name for p in Path("/dev").glob("nvidia[0-9]*"))
    return nodes if visible is None else [part for part in visible.split(",") if part.strip()]


def device(config: Config) -> str:
    """cpu or cuda."""
    if config.device == "auto":
        return "cuda" if gpus() else "cpu"
    return config.device


def num_instances(config: Config, device: str) -> int:
    """How many instances to start, each of `tensor_parallel_size` workers with a GPU each.

    Raises ConfigError when GPUs are missing.
    """
    if device == "cpu":
        return config.instances or 1
    visible, size = len(gpus()), config.tensor_parallel_size
    if not visible:
        raise ConfigError("device is cuda, but no GPU is visible")
    wanted = (config.instances or 1) * size
    if wanted > visible:
        parts = f"instances is {config.instances}" if config.instances else ""
        if size > 1:
            parts += f"{' and ' if parts else ''}tensor_parallel_size is {size}"
            parts += f", which takes {wanted} GPUs" if config.instances else ""
        raise ConfigError(f"{parts}, but {visible} GPUs are visible")
    return config.instances or visible // size


class CoreShare(NamedTuple):
    """Cores that a worker may run on, and how many threads it computes with."""

    cores: list[int]
    num_threads: int


def share_cores(cores: list[int], num_workers: int, *, device: str) -> list[CoreShare]:
    """Equal consecutive shares, with a thread for each core.

    Workers on a CPU with less than `_LEAST_PINNED` cores each may run on all of them: one that
    waits for another leaves its core to whoever needs it. Bound to one core each, two workers that
    exchange messages beside other processes waited for 4 ms every tenth time, else for 0.1 ms. With
    fewer cores than workers, workers on GPUs take turns on them.
    """
    each = len(cores) // num_workers
    if device == "cpu" and each < _LEAST_PINNED:
        return [CoreShare(cores, max(each, 1))] * num_workers
    if each == 0:
        return [CoreShare([cores[i % len(cores)]], 1) for i in range(num_workers)]
    return [CoreShare(cores[i * each : (i + 1) * each], each) for i in range(num_workers)]
