"""Where converted models live, and whether one is there.

Knows: the name of the directory that a GGUF file converts into, and the mark of a finished one.
Does not know: how to convert; it imports nothing heavy, so that the daemon can ask.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
SOURCE_FILE = "loongd-source.json"


def source_identity(gguf_path: Path, dtype: str) -> dict[str, Any]:
    """What a converted directory was made from: file name, size, mtime, dtype, format version.

    Raises FileNotFoundError when the GGUF file does not exist.
    """
    stat = gguf_path.stat()
    return {
        "name": gguf_path.name,
        "size_bytes": stat.st_size,
        "mtime_ns": stat.st_mtime_ns,
        "dtype": dtype,
        "format": FORMAT_VERSION,
    }


def converted_dir(gguf_path: Path, dtype: str, cache_dir: Path) -> Path:
    """The directory under `cache_dir` that `gguf_path` converts into for `dtype`.

    A changed file (size or mtime) gets another directory. Raises FileNotFoundError when the
    GGUF file does not exist.
    """
    identity = json.dumps(source_identity(gguf_path, dtype), sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cache_dir / f"{gguf_path.stem}-{dtype}-{digest}"


def is_converted(directory: Path) -> bool:
    """Whether `directory` holds a finished conversion; unfinished ones never have this name."""
    return (directory / SOURCE_FILE).is_file()


def converted_from(directory: Path) -> dict[str, Any] | None:
    """The `source_identity` that `directory` was made from; None when it is not a conversion."""
    if not is_converted(directory):
        return None
    identity: dict[str, Any] = json.loads((directory / SOURCE_FILE).read_text())
    return identity
