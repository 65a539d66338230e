"""All instances of a model in one process, driven by hand-made plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from loongd.model.llama import Llama
from loongd.model.spec import ModelSpec
from loongd.model.weights import load_weights
from loongd.wire import Extend, RunMigrate, RunStep, Sampled, Sampling, pack_tokens
from loongd.worker.comm import LoopbackWorld
from loongd.worker.heart import Pulse
from loongd.worker.kvcache import KvCache
from loongd.worker.numerics import Numerics
from loongd.worker.runner import Parts, Runner

CPU = torch.device("cpu")
GREEDY = Sampling(num_logprobs=1)


@dataclass
class Sequence:
    """A request as a scheduler would know it: tokens so far, and where their KV lies."""

    name: str
    tokens: list[int]
    done: int = 0
    segments: list[int] = field(default_factory=list)
    placed: dict[int, dict[int, int]] = field(default_factory=dict)
    """segment -> instance -> tokens"""

    def on(self, instance: int) -> int:
        """Tokens of this request that the instance holds."""
        return sum(where.get(instance, 0) for where in self.placed.values())

    @property
    def holders(self) -> list[int]:
        found = {i for where in self.placed.values() for i, n in where.items() if n}
        return sorted(found)


class Cluster:
    """`num_instances` runners over a loopback world; every step checks all pools."""

    def __init__(
        self,
        model_dir: Path,
        num_instances: int,
        *,
        num_slots: int = 512,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
        deterministic: bool = False,
        num_layers: int | None = None,
    ) -> None:
        """`num_layers` leaves out all but the first layers of the model."""
        self.spec = ModelSpec.from_dir(model_dir)
        self._dtype = dtype
        self._device = device
        weights = load_weights(
            model_dir,
            self.spec,
            load_format="safetensors",
            dtype=dtype,
            device=device,
            seed=0,
            progress=lambda *_: None,
        )
        self.spec = replace(self.spec, num_layers=num_layers or self.spec.num_layers)
        weights = replace(weights, layers=weights.layers[: self.spec.num_layers])
        self._numerics = Numerics.choose(
            device, dtype, self.spec.head_dim, deterministic=deterministic
        )
        arithmetic = self._numerics.arithmetic
        self._model = Llama(self.spec, weights, device, dtype, arithmetic=arithmetic)
        self._weights_bytes = weights.num_bytes()
        self.world = LoopbackWorld(num_instances, timeout_s=60)
        self.transports = [self.world.transport(rank) for rank in range(num_instances)]
        self.pools = [self._pool(num_slots) for _ in range(num_instances)]
        self.runners = [self._runner(rank) for rank in range(num_instances)]
        self._num_steps = 0
        self._num_segments = 0

    def _pool(self, num_slots: int) -> KvCache:
        pool = KvCache(
            num_layers=self.spec.num_layers,
            num_slots=num_slots,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self._dtype,
            device=self._device,
        )
        pool.k_LSKH.fill_(torch.nan)
        pool.v_LSKH.fill_(torch.nan)
        return pool

    def _runner(self, rank: int) -> Runner:
        parts = Parts(
            spec=self.spec,
            device=self._device,
            dtype=self._dtype,
            weights_bytes=self._weights_bytes,
            model=self._model,
            transport=self.transports[rank],
            backend=self._numerics.backend,
            kv=self.pools[rank],
            tensor_parallel=None,
            partials=self._numerics.partials,
        )
        return Runner(parts, rank, Pulse())

    def extend(
        self,
        members: list[int],
        work: list[tuple[Sequence, int, int | None, list[tuple[int, int]]]],
        *,
        sample: bool = True,
        sampling: Mapping[str, Sampling] = MappingProxyType({}),
        pauses: Iterable[int] = (),
        between: Callable[[], object] = lambda: None,
    ) -> dict[str, Sampled]:
        """One step: (sequence, new tokens, master or None, keep) for each request of the batch.

        It pauses before each layer of `pauses`, where `between` is called.
        """
        batch = []
        for sequence, count, master, keep in work:
            segment = self._num_segments = self._num_segments + 1
            holders = [m for m in members if sequence.on(m)]
            assert set(sequence.holders) <= set(members)
            batch.append(
                Extend(
                    request_id=sequence.name,
                    tokens=pack_tokens(sequence.tokens[sequence.done : sequence.done + count]),
                    start=sequence.done,
                    master=master,
                    segment=segment,
                    keep=keep if master is None else [],
                    cached=list(sequence.segments),
                    holders=holders,
                    sampling=sampling.get(sequence.name, GREEDY) if sample else None,
                    holder_tokens=[sequence.on(m) for m in holders],
                )
            )
            placed: dict[int, int] = {}
            for instance, tokens in keep if master is None else [(master, count)]:
                placed[instance] = placed.get(instance, 0) + tokens
            sequence.segments.append(segment)
            sequence.placed[segment] = placed
            sequence.done += count
        resumes = 0
        for until_layer in pauses:
            self._num_steps += 1
            step = RunStep(self._num_steps, 1, members, batch, 0, until_layer, resumes)
            resumes, batch = step.step_id, []
            assert self._all(members, step) == [[]] * len(members)
            between()
        self._num_steps += 1
        step = RunStep(self._num_steps, 1, members, batch, resumes=resumes)
        results = self._all(members, step)
        return {sampled.request_id: sampled for part in results for sampled in part}

    def migrate(self, sequence: Sequence, source: int, target: int, count: int) -> None:
        """Move `count` of the sequence's newest tokens on `source` to `target`."""
        moves = []
        for segment in reversed(sequence.segments):
            where = sequence.placed[segment]
            tokens = min(count, where.get(source, 0))
            if tokens:
                moves.append((segment, tokens))
                where[source] -= tokens
                where[target] = where.get(target, 0) + tokens
                count -= tokens
        self._num_steps += 1
        message = RunMigrate(
            step_id=self._num_steps,
            epoch=1,
            source=source,
            target=target,
            moves=moves,
            verify=True,
        )
        self._all([source, target], message)

    def free(self, sequence: Sequence) -> None:
        for runner in self.runners:
            runner.free(sequence.segments)

    def reset(self) -> None:
        """Empty pools and a silent world, whatever an earlier case has left."""
        for runner in self.runners:
            runner.keep([])

    def check(self, *sequences: Sequence) -> None:
        """Every pool holds exactly what the sequences say."""
        for instance, pool in enumerate(self.pools):
            pool.check()
            assert pool.num_used == sum(sequence.on(instance) for sequence in sequences)
            for sequence in sequences:
                positions = pool.positions_of(sequence.segments)
                assert len(np.unique(positions)) == len(positions)

    def _all(self, members: list[int], message: RunStep | RunMigrate) -> list[list[Sampled]]:
        results: dict[int, list[Sampled]] = {}

        def run(member: int) -> None:
            runner = self.runners[member]
            if isinstance(message, RunMigrate):
                runner.migrate(message)
                results[member] = []
            else:
                results[member] = runner.run(message)

        threads = [threading.Thread(target=run, args=(member,)) for member in members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == sorted(members), "a member failed"
        return [results[member] for member in members]
