"""Compiling kernels before they are launched: all at once instead of one after the other.

Knows: which variant of a kernel a launch needs follows from its arguments, so a rehearsal of
launches with any contents finds them (`Recording`); threads compile them (`Compiling`), as Triton
gives up Python's lock in all of its passes and runs the assembler, and the C compiler that some of
its versions want for a launch, as processes. They leave all in Triton's directory, where a launch
finds it (3 ms), as does the next start.
Does not know: what is rehearsed, kernels.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from loongd.errors import WorkerError

_log = logging.getLogger(__name__)
_MOST_THREADS = 16
"""A tenth of the work holds Python's lock, so that more would wait for each other."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel for one kind of arguments, as Triton describes it."""

    kernel: Any  # triton's JITFunction, which is not typed
    target: GPUTarget
    signature: dict[str, Any]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's."""
        return str(self.kernel.__name__)

    def compile(self, parsing: Lock) -> None:
        """Into Triton's directory, with what launches it. `parsing`: see `_Source`."""
        source = _Source(self.kernel, self.signature, self.constants, self.attributes)
        source.parsing = parsing
        compiled = triton.compile(source, target=self.target, options=self.options)
        driver.active.launcher_cls(source, compiled.metadata)


class _Source(ASTSource):  # type: ignore[misc]
    """A kernel whose Python is read by one thread at a time.

    Python (3.11 at least) counts the depth of the syntax tree that it builds for all threads
    together, and fails when two build one.
    """

    parsing: Lock

    def make_ir(self, *args: Any, **kwargs: Any) -> Any:
        with self.parsing:
            return super().make_ir(*args, **kwargs)


class Recording(AbstractContextManager["Recording"]):
    """While it is entered, launches that would have to be compiled are noted and not done.

    What such a kernel should have written keeps its contents: results are good for nothing. All
    threads' launches are noted.
    """

    def __init__(self) -> None:
        self._variants: dict[tuple[Any, str], Variant] = {}
        self._lock = Lock()
        self._before: Any = None

    @property
    def variants(self) -> list[Variant]:
        """Each once, in the order of their first launches."""
        return list(self._variants.values())

    def __enter__(self) -> Recording:
        self._before = knobs.runtime.jit_cache_hook
        knobs.runtime.jit_cache_hook = self._found
        return self

    def __exit__(self, *_: object) -> None:
        knobs.runtime.jit_cache_hook = self._before

    def _found(self, *, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Triton asks this before it compiles for a launch; True leaves both out."""
        options = json.loads(compile["specialization_data"])["options"].items()
        variant = Variant(
            fn.jit_function,
            driver.active.get_current_target(),
            compile["signature"],
            compile["constants"],
            compile["configs"][0],
            {key: tuple(value) if isinstance(value, list) else value for key, value in options},
        )
        with self._lock:  # a kernel's hash is that of its source, which is parsed here
            self._variants.setdefault((variant.kernel, compile["key"]), variant)
        return True


class Watch(AbstractContextManager["Watch"]):
    """While it is entered, the names of kernels that are compiled, not found, are noted."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._before: Any = None

    def __enter__(self) -> Watch:
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self._compiled
        return self

    def __exit__(self, *_: object) -> None:
        knobs.compilation.listener = self._before

    def _compiled(self, *, src: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            self.names.append(src.name)
        if self._before is not None:
            self._before(src=src, cache_hit=cache_hit, **others)


class Compiling:
    """Variants that are being compiled."""

    def __init__(self, variants: Sequence[Variant], workers: Executor) -> None:
        self._workers = workers
        parsing = Lock()
        self._jobs: dict[Future[None], Variant] = {
            workers.submit(variant.compile, parsing): variant for variant in variants
        }

    @classmethod
    def start(cls, variants: Sequence[Variant], *, share: tuple[int, int] = (0, 1)) -> Compiling:
        """Begin, on all cores that this process may use.

        `share` is (number, count) of this process among those that compile the same for one
        directory: each begins with its own part, and finds most of the others' done.
        """
        _find_directory()
        number, count = share
        first = len(variants) * number // count
        num_threads = min(len(os.sched_getaffinity(0)), _MOST_THREADS)
        workers = ThreadPoolExecutor(num_threads, "compile")
        return cls([*variants[first:], *variants[:first]], workers)

    def finish(self, progress: Callable[[float], None]) -> None:
        """Wait until all are there; `progress` is called with the fraction done.

        Raises WorkerError for the first that cannot be compiled.
        """
        try:
            for number, job in enumerate(as_completed(self._jobs)):
                error = job.exception()
                if error is not None:
                    name = self._jobs[job].name
                    _log.error("kernel %s", name, exc_info=error)
                    raise WorkerError(f"kernel {name} cannot be compiled: {_first_line(error)}")
                progress((number + 1) / len(self._jobs))
        finally:
            self._workers.shutdown(wait=False, cancel_futures=True)


def _find_directory() -> None:
    """Give Triton a directory of this process where its own cannot be written."""
    directory = Path(knobs.cache.dir)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return
    except OSError as error:
        knobs.cache.dir = tempfile.mkdtemp(prefix="loongd-kernels-")
        _log.warning("kernels are compiled at every start: %s", error)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
