"""One rank's side of `bench_esp`: a started runner, steps as the daemon would send them, timing.

Knows: how to make prefill and decode steps over any placement, and to time them on all ranks.
Does not know: which cases are measured, or what a good figure is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from loongd.wire import Extend, RunStep, Sampling, Start, pack_tokens
from loongd.worker.heart import Pulse
from loongd.worker.runner import Runner

GREEDY = Sampling()
Work = Callable[[], object]
Placed = tuple[int, dict[int, int]]
"""A request's segment, and instance -> tokens of it."""


class Ranks:
    """One rank's side; every rank makes the same calls in the same order."""

    def __init__(self, rank: int, args: argparse.Namespace, rendezvous: str) -> None:
        self.rank, self.world, self.args = rank, args.instances, args
        self.ids = 0
        self.kept: list[int] = []
        start = Start(
            rank=rank,
            world_size=args.instances,
            epoch=1,
            rendezvous=rendezvous,
            model_dir=str(args.shape),
            load_format="dummy",
            dtype=args.dtype,
            device=args.device,
            cores=[],
            kv_pool_tokens=args.pool_tokens,
            gpu_memory_utilization=0.9,
            max_step_tokens=8192,
            seed=0,
        )
        self.runner = Runner.start(start, lambda *_: None, Pulse())
        self.on_gpu = args.device == "cuda"
        kv = self.runner.parts.kv
        for layer in (*kv.k_LSKH, *kv.v_LSKH):  # what lies in new memory may not be numbers
            layer.normal_()

    def sync(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def timed(self, members: list[int], work: Work) -> float:
        """Wall seconds of the slowest member; the others wait at the barriers."""
        dist.barrier()
        self.sync()
        began = time.perf_counter()
        if self.rank in members:
            work()
        self.sync()
        spent = time.perf_counter() - began if self.rank in members else 0.0
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, spent)
        return max(everyone)

    def median(self, members: list[int], *prepare: Callable[[], Work]) -> list[float]:
        """Median over repeats of freshly prepared steps, one figure for each of `prepare`.

        They take turns, so that a device that slows down does so for all; segments are freed after
        each.
        """
        times: list[list[float]] = [[] for _ in prepare]
        for number in range(self.args.repeats + 1):
            for figures, one in zip(times, prepare, strict=True):
                spent = self.timed(members, one())
                self.runner.keep(self.kept)
                if number:
                    figures.append(spent)
        return [statistics.median(figures) for figures in times]

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def prefill(self, members: list[int], lengths: list[int], keep_on: list[int]) -> RunStep:
        """A striped prefill whose KV is dealt to `keep_on` in equal consecutive runs."""
        batch = []
        for number, length in enumerate(lengths):
            share, left = divmod(length, len(keep_on))
            keep = [(i, share + (n < left)) for n, i in enumerate(keep_on)]
            batch.append(
                Extend(
                    request_id=str(number),
                    tokens=pack_tokens([(7 * i + number) % 1000 for i in range(length)]),
                    start=0,
                    master=None,
                    segment=self.new_id(),
                    keep=[(i, n) for i, n in keep if n],
                    cached=[],
                    holders=[],
                    sampling=GREEDY,
                )
            )
        return RunStep(step_id=self.new_id(), epoch=1, members=members, batch=batch)

    def fill(self, lengths: list[int], places: list[list[int]]) -> list[Placed]:
        """Slots with random KV, for requests spread evenly over their places."""
        requests = []
        for length, where in zip(lengths, places, strict=True):
            segment, share = self.new_id(), length // len(where)
            placed = dict.fromkeys(where, share)
            placed[where[0]] += length - share * len(where)
            first = 0
            for instance, tokens in placed.items():
                if instance == self.rank:
                    positions = torch.arange(first, first + tokens).numpy()
                    self.runner.parts.kv.extend(segment, positions)
                first += tokens
            requests.append((segment, placed))
        return requests

    def decode(
        self, members: list[int], requests: list[Placed], masters: list[int], num_steps: int
    ) -> list[RunStep]:
        """Consecutive decode steps, each following the one before."""
        tails = [self.new_id() for _ in requests]
        steps: list[RunStep] = []
        for number in range(num_steps):
            batch = []
            for request, tail, master in zip(requests, tails, masters, strict=True):
                segment, placed = request
                held = dict(placed)
                held[master] = held.get(master, 0) + number
                holders = [m for m in members if held.get(m)]
                batch.append(
                    Extend(
                        request_id=str(segment),
                        tokens=b"" if number else pack_tokens([segment % 1000]),
                        start=sum(held.values()),
                        master=master,
                        segment=tail,
                        keep=[],
                        cached=[segment, tail],
                        holders=holders,
                        sampling=GREEDY,
                        holder_tokens=[held[m] for m in holders],
                    )
                )
            steps.append(
                RunStep(
                    step_id=self.new_id(),
                    epoch=1,
                    members=members,
                    batch=batch,
                    follows=steps[-1].step_id if steps else 0,
                )
            )
        return steps

    def run_queued(self, steps: list[RunStep]) -> None:
        """Each step is started before the one before it has been waited for, as in service."""
        flights: deque[Any] = deque()
        for step in steps:
            flights.append(self.runner.launch(step))
            if len(flights) > 1:
                flights.popleft().wait()
        while flights:
            flights.popleft().wait()
