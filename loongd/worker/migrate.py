"""Moving KV from one instance's pool to another's.

Knows: how the newest tokens of segments leave a pool and join another, all layers, in parts of
bounded size. Does not know: why they move.

Both sides derive the parts from the message, so they agree without talking. One part travels
while the next is read from the pool and the one before is written to the other. Positions travel
with the tokens: a segment's order in a pool carries no meaning, its positions do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loongd.errors import PlanError, WorkerError
from loongd.wire import RunMigrate
from loongd.worker.comm import Pending, Transport
from loongd.worker.kvcache import KvCache

_PART_BYTES = 128 << 20
"""Most bytes of K and V in one message; two are in memory at a time. NVLink moves 64 MiB at two
thirds of the rate of 512."""

Ints = npt.NDArray[np.int64]


def migrate(message: RunMigrate, rank: int, kv: KvCache, transport: Transport) -> None:
    """This instance's side of a migration. Raises PlanError before anything has been sent.

    Raises WorkerError when checksums are asked for and differ.
    """
    if rank not in message.members or message.source == message.target:
        raise PlanError(f"step {message.step_id}: migration {message.members} at instance {rank}")
    if rank == message.source:
        _send(message, kv, transport)
    else:
        _receive(message, kv, transport)


def _send(message: RunMigrate, kv: KvCache, transport: Transport) -> None:
    for segment, tokens in message.moves:
        held = len(kv.slots_of([segment]))
        if not 0 < tokens <= held:
            raise PlanError(
                f"step {message.step_id}: {tokens} tokens of segment {segment} to move, {held} here"
            )
    for segment, tokens in message.moves:
        slots = kv.slots_of([segment])[-tokens:]
        positions = torch.from_numpy(kv.positions_of([segment])[-tokens:].copy())
        leaving = transport.post([(message.target, positions.to(kv.device))], [])
        for lo, hi in _parts(tokens, kv):
            block = kv.read(slots[lo:hi])
            sends = [(message.target, block)]
            if message.verify:
                sends.append((message.target, _checksum(block)))
            following = transport.post(sends, [])
            leaving.wait()
            leaving = following
        leaving.wait()
        kv.truncate(segment, tokens)


def _receive(message: RunMigrate, kv: KvCache, transport: Transport) -> None:
    source = message.source
    if sum(tokens for _, tokens in message.moves) > kv.num_free:
        raise PlanError(f"step {message.step_id}: {kv.num_free} free slots for {message.moves}")
    for segment, tokens in message.moves:
        positions = torch.empty(tokens, dtype=torch.int64, device=kv.device)
        transport.post([], [(source, positions)]).wait()
        slots = kv.adopt(segment, positions.cpu().numpy())
        arriving: deque[_Part] = deque()
        for lo, hi in _parts(tokens, kv):
            block = kv.empty_block(hi - lo)
            claimed = torch.empty(1, dtype=torch.int64, device=kv.device)
            receives = [(source, block), (source, claimed)] if message.verify else [(source, block)]
            moving = transport.post([], receives)
            arriving.append(_Part(segment, slots[lo:hi], block, claimed, moving))
            if len(arriving) > 1:
                _take(arriving.popleft(), message, kv)
        _take(arriving.popleft(), message, kv)


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens on their way here."""

    segment: int
    slots: Ints
    block: Tensor
    claimed: Tensor
    moving: Pending


def _take(part: _Part, message: RunMigrate, kv: KvCache) -> None:
    part.moving.wait()
    if message.verify and not torch.equal(_checksum(part.block), part.claimed):
        raise WorkerError(
            f"KV of segment {part.segment} arrived damaged from instance {message.source}"
        )
    kv.write(part.slots, part.block)


def _parts(tokens: int, kv: KvCache) -> Iterator[tuple[int, int]]:
    step = max(1, _PART_BYTES // kv.empty_block(1).nbytes)
    for lo in range(0, tokens, step):
        yield lo, min(lo + step, tokens)


def _checksum(block: Tensor) -> Tensor:
    """Sum of the block's bits, as 64-bit integers: int64[1]."""
    bits = {4: torch.int32, 2: torch.int16}[block.element_size()]
    return block.view(bits).sum(dtype=torch.int64).view(1)
