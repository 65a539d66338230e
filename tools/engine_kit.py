"""Runs workers' steps without a daemon, for the benchmarks of the engine.

Knows: how to start one process per instance with dummy weights and to end all when one fails, the
steps that the daemon would send (prefills, decode steps that go on from each other), and how to
time them over all members.
Does not know: what is measured, or why.

Every rank makes the same calls in the same order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from loongd.wire import Extend, RunStep, Sampled, Sampling, Start, pack_tokens
from loongd.worker.heart import Pulse
from loongd.worker.runner import Runner

GREEDY = Sampling()
_VOCAB = 1000
"""Prompts are made of the first so many ids."""


def on_all_ranks(instances: int, work: Callable[..., None], *args: Any) -> None:
    """`work(rank, *args)` in a process of each instance.

    When one fails, its traceback is shown and the others are killed at once: they would wait for
    it in an exchange. Raises RuntimeError then.
    """
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=_one_rank, args=(work, rank, args)) for rank in range(instances)
    ]
    try:
        for process in ranks:
            process.start()
        running = {process.sentinel: rank for rank, process in enumerate(ranks)}
        while running:
            for sentinel in wait(list(running)):
                rank = running.pop(sentinel)  # type: ignore[arg-type]
                ranks[rank].join()
                if ranks[rank].exitcode:
                    raise RuntimeError(f"rank {rank} failed: exit code {ranks[rank].exitcode}")
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()


def _one_rank(work: Callable[..., None], rank: int, args: Sequence[Any]) -> None:
    try:
        work(rank, *args)
    except BaseException:  # noqa: BLE001 - the process's top: its rank fails, whatever it is
        print(f"rank {rank}: {traceback.format_exc()}", file=sys.stderr, flush=True)
        os._exit(1)
    sys.stdout.flush()
    # a communicator's own threads may outlive the interpreter's end, or wait for another rank
    os._exit(0)


def commit() -> str:
    """This checkout's commit."""
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def fullest_tokens(
    length: int, places: Sequence[Sequence[int]], masters: Sequence[int], grown: int
) -> int:
    """Slots that the fullest instance needs for a batch in decode, `grown` tokens a request
    included."""
    needed: dict[int, int] = {}
    for where, master in zip(places, masters, strict=True):
        for place in where:
            needed[place] = needed.get(place, 0) - (-length // len(where))
        needed[master] = needed.get(master, 0) + grown
    return max(needed.values())


@dataclass(frozen=True)
class Setup:
    """What all ranks start with; `pool_tokens` and `max_step_tokens` as in `wire.Start`."""

    shape: Path
    device: str
    dtype: str
    instances: int
    pool_tokens: int | None
    max_step_tokens: int


class Harness:
    """One rank's runner, and the clock that all ranks share."""

    def __init__(self, rank: int, setup: Setup, rendezvous: str) -> None:
        """Raises ModelError or WorkerError, as `Runner.start`."""
        self.rank, self.world = rank, setup.instances
        self.on_gpu = setup.device == "cuda"
        self._ids = 0
        began = time.perf_counter()
        start = Start(
            rank=rank,
            world_size=setup.instances,
            epoch=1,
            rendezvous=rendezvous,
            model_dir=str(setup.shape),
            load_format="dummy",
            dtype=setup.dtype,
            device=setup.device,
            cores=[],
            kv_pool_tokens=setup.pool_tokens,
            gpu_memory_utilization=0.9,
            max_step_tokens=setup.max_step_tokens,
            seed=0,
        )
        self.runner = Runner.start(start, lambda *_: None, Pulse())
        self.start_s = time.perf_counter() - began
        # what memory held before may be no numbers, and would stay so through every layer
        kv = self.runner.parts.kv
        with torch.inference_mode():
            for layer in range(len(kv.k_LSKH)):
                kv.k_LSKH[layer].normal_(0.0, 0.5)
                kv.v_LSKH[layer].normal_(0.0, 0.5)

    @property
    def everyone(self) -> list[int]:
        return list(range(self.world))

    def new_id(self) -> int:
        """A number that no step or segment has had, the same on all ranks."""
        self._ids += 1
        return self._ids

    # ---- time ----------------------------------------------------------------------------------

    def sync(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            dist.barrier()
        self.sync()

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self.world == 1:
            return [mine]
        everyones: list[Any] = [None] * self.world
        dist.all_gather_object(everyones, mine)
        return everyones

    def timed(self, members: Sequence[int], work: Callable[[], object]) -> float:
        """Wall seconds of the slowest member, from a common start; the same on all ranks."""
        self.barrier()
        began = time.perf_counter()
        if self.rank in members:
            work()
        self.sync()
        mine = time.perf_counter() - began if self.rank in members else 0.0
        everyones: list[float] = self.gather(mine)
        return max(everyones)

    # ---- steps ---------------------------------------------------------------------------------

    def step(self, members: Sequence[int], batch: list[Extend], *, follows: int = 0) -> RunStep:
        """A step of the group, with an id of its own."""
        return RunStep(
            step_id=self.new_id(), epoch=1, members=list(members), batch=batch, follows=follows
        )

    def prefill(
        self, members: Sequence[int], lengths: Sequence[int], keep_on: Sequence[int]
    ) -> RunStep:
        """A striped prefill whose KV is dealt to `keep_on` in equal consecutive runs."""
        batch = []
        for number, length in enumerate(lengths):
            share, left = divmod(length, len(keep_on))
            keep = [(i, share + (n < left)) for n, i in enumerate(keep_on)]
            tokens = (7 * np.arange(length) + number) % _VOCAB
            batch.append(
                Extend(
                    request_id=str(number),
                    tokens=tokens.astype("<i4").tobytes(),
                    start=0,
                    master=None,
                    segment=self.new_id(),
                    keep=[(i, n) for i, n in keep if n],
                    cached=[],
                    holders=[],
                    sampling=GREEDY,
                )
            )
        return self.step(members, batch)

    def fill(self, length: int, places: Sequence[int]) -> tuple[int, dict[int, int]]:
        """A segment of `length` tokens that holds whatever the pool does; its tokens by place."""
        segment, (share, left) = self.new_id(), divmod(length, len(places))
        placed = {place: share + (n < left) for n, place in enumerate(places)}
        first = 0
        for place, tokens in placed.items():
            if place == self.rank and tokens:
                positions = np.arange(first, first + tokens, dtype=np.int64)
                self.runner.parts.kv.extend(segment, positions)
            first += tokens
        return segment, {place: tokens for place, tokens in placed.items() if tokens}


@dataclass
class _Request:
    """One request in decode: `placed` counts its KV by instance, `token` is its newest one."""

    request_id: str
    segments: list[int]
    open_segment: int
    placed: dict[int, int]
    length: int
    master: int
    token: int


@dataclass
class Decoding:
    """A batch in decode: each step goes on from the one before, with one token a request."""

    harness: Harness
    members: Sequence[int]
    requests: list[_Request] = field(default_factory=list)
    last_step: int = 0

    @classmethod
    def begin(
        cls,
        harness: Harness,
        members: Sequence[int],
        *,
        length: int,
        places: Sequence[Sequence[int]],
        masters: Sequence[int],
    ) -> Decoding:
        """A request for each of `masters`, with `length` tokens of KV over its `places`."""
        requests = []
        for number, (where, master) in enumerate(zip(places, masters, strict=True)):
            segment, placed = harness.fill(length, where)
            opened, token = harness.new_id(), number % _VOCAB
            one = _Request(str(number), [segment], opened, placed, length, master, token)
            requests.append(one)
        return cls(harness, members, requests)

    def next_step(self, *, queued: bool = False) -> RunStep:
        """The next step; `queued` when the one before may not have ended, but was launched."""
        follows = self.last_step if queued else 0
        batch = [self._extend(request, queued=bool(follows)) for request in self.requests]
        step = self.harness.step(self.members, batch, follows=follows)
        self.last_step = step.step_id
        return step

    def drew(self, sampled: Sequence[Sampled]) -> None:
        """The tokens that a step has drawn on this rank: the next one's, where it is master.

        Raises RuntimeError when one is missing.
        """
        tokens = {one.request_id: one.token for one in sampled}
        for request in self.requests:
            if request.master == self.harness.rank:
                if request.request_id not in tokens:
                    raise RuntimeError(f"no token was drawn for request {request.request_id}")
                request.token = tokens[request.request_id]

    def run_queued(self, steps: int) -> tuple[list[float], list[float]]:
        """One step and `steps` more, each launched while the one before it runs, as in service.

        Seconds between the ends of steps (`steps` of them) and of their launches, on this rank.
        """
        launch = self.harness.runner.launch
        taken: list[float] = []
        hosts: list[float] = []
        last = launch(self.next_step(queued=True))
        sampled: list[Sampled] = []
        ended = 0.0
        for number in range(steps + 1):
            step = self.next_step(queued=True) if number < steps else None
            began = time.perf_counter()
            following = launch(step) if step is not None else None
            hosts.append(time.perf_counter() - began)
            sampled = last.wait()
            now = time.perf_counter()
            if number:
                taken.append(now - ended)
            ended = now
            if following is not None:
                last = following
        self.drew(sampled)
        return taken, hosts[:-1]

    def skip(self, steps: int) -> None:
        """On a rank that is no member: the ids of later steps are the same on all ranks."""
        for _ in range(steps):
            self.next_step()

    def _extend(self, request: _Request, *, queued: bool) -> Extend:
        """One request's part of the next step; afterwards it has one token more."""
        holders = [member for member in self.members if request.placed.get(member)]
        extend = Extend(
            request_id=request.request_id,
            tokens=b"" if queued else pack_tokens([request.token]),
            start=request.length,
            master=request.master,
            segment=request.open_segment,
            keep=[],
            cached=list(request.segments),
            holders=holders,
            sampling=GREEDY,
            holder_tokens=[request.placed[member] for member in holders],
        )
        if len(request.segments) == 1:
            request.segments.append(request.open_segment)
        request.placed[request.master] = request.placed.get(request.master, 0) + 1
        request.length += 1
        return extend
