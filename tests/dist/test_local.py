"""Messages over local sockets: order, any size both ways at once, and peers that are gone."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loongd.errors import WorkerError
from loongd.worker.local import LocalLinks, connect
from loongd.worker.local_ranks import LocalTensorParallel

pytestmark = pytest.mark.timeout(60)

LARGE = 40 << 20
"""Bytes; far more than a socket holds."""
GONE = "another worker does not answer: instance 1"


World = Callable[..., list[LocalLinks]]


@pytest.fixture
def world() -> Iterator[World]:
    """`world(num_ranks)`: all ranks' ends, connected in this process, and closed at last."""
    with ExitStack() as opened:

        def connected(num_ranks: int, *, timeout_s: float = 30) -> list[LocalLinks]:
            ends: list[dict[int, socket.socket]] = [{} for _ in range(num_ranks)]
            for a, b in combinations(range(num_ranks), 2):
                ends[a][b], ends[b][a] = socket.socketpair()
            links = [LocalLinks(mine, timeout_s=timeout_s) for mine in ends]
            for one in links:
                opened.callback(one.close)
            return links

        yield connected


def on_all(work: Callable[[int, LocalLinks], None], links: list[LocalLinks]) -> None:
    """`work(rank, its end)` in a thread for each; raises what one has raised."""
    with ThreadPoolExecutor(len(links)) as pool:
        for done in [pool.submit(work, rank, one) for rank, one in enumerate(links)]:
            done.result()


def message(source: int, target: int, number: int, num_bytes: int) -> Tensor:
    """Bytes that no other message of the test has."""
    generator = torch.Generator().manual_seed(1_000_000 * source + 1000 * target + number)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("num_bytes", [1, 3, 4096, 1 << 20, LARGE])
def test_members_that_send_each_other_at_once_both_go_on(world: World, num_bytes: int) -> None:
    def exchange(me: int, links: LocalLinks) -> None:
        other = 1 - me
        got = torch.zeros(num_bytes, dtype=torch.uint8)
        links.post([(other, message(me, other, 0, num_bytes))], [(other, got)]).wait()
        assert torch.equal(got, message(other, me, 0, num_bytes))

    on_all(exchange, world(2))


def test_four_members_in_a_ring_each_send_more_than_sockets_hold(world: World) -> None:
    def exchange(me: int, links: LocalLinks) -> None:
        to, source = (me + 1) % 4, (me - 1) % 4
        got = torch.zeros(LARGE, dtype=torch.uint8)
        links.post([(to, message(me, to, 0, LARGE))], [(source, got)]).wait()
        assert torch.equal(got, message(source, me, 0, LARGE))

    on_all(exchange, world(4))


def test_messages_come_in_the_order_of_posts_whatever_is_waited_for_first(world: World) -> None:
    """Many batches of odd sizes between all of four, waited for backwards."""
    sizes = [1, 70_000, 5, 3_000_001, 17, 1 << 20, 2, 2, 9_000_000]

    def exchange(me: int, links: LocalLinks) -> None:
        others = [rank for rank in range(4) if rank != me]
        batches = []
        for number, size in enumerate(sizes):
            got = {other: torch.zeros(size, dtype=torch.uint8) for other in others}
            sends = [(other, message(me, other, number, size)) for other in others]
            if (number + me) % 2:  # in one batch, or in two
                links.post(sends, [])
                pending = links.post([], list(got.items()))
            else:
                pending = links.post(sends, list(got.items()))
            batches.append((number, got, pending))
        for number, got, pending in reversed(batches):
            pending.wait()
            for other, tensor in got.items():
                assert torch.equal(tensor, message(other, me, number, sizes[number]))
        links.post([(other, torch.ones(1)) for other in others], []).wait()

    on_all(exchange, world(4))


def test_more_messages_of_a_batch_than_one_system_call_takes(world: World) -> None:
    def exchange(me: int, links: LocalLinks) -> None:
        other = 1 - me
        got = torch.zeros(500, 30, dtype=torch.int64)
        sends = [(other, torch.full((30,), 1000 * me + number)) for number in range(500)]
        links.post(sends, [(other, row) for row in got]).wait()
        assert torch.equal(got[:, 0], 1000 * other + torch.arange(500))
        assert torch.equal(got, got[:, :1].expand(-1, 30))

    on_all(exchange, world(2))


def test_a_wait_returns_when_its_own_batch_is_over(world: World) -> None:
    """The batch after it has nothing coming yet."""
    one, other = world(2)
    first, second = torch.zeros(4), torch.zeros(4)
    pending, later = one.post([], [(1, first)]), one.post([], [(1, second)])
    other.post([(0, torch.ones(4))], []).wait()
    pending.wait()
    assert first.tolist() == [1.0] * 4
    other.post([(0, torch.full((4,), 2.0))], []).wait()
    later.wait()
    assert second.tolist() == [2.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
def test_tensors_of_any_type_and_shape(world: World, dtype: torch.dtype) -> None:
    one, other = world(2)
    sent = [torch.arange(24).reshape(2, 3, 4).to(dtype), torch.tensor(7).to(dtype)]
    got = [torch.empty_like(tensor) for tensor in sent]
    other.post([(0, tensor) for tensor in sent], []).wait()
    with torch.inference_mode():
        one.post([], [(1, tensor) for tensor in got]).wait()
    assert all(map(torch.equal, got, sent))


def test_a_sent_tensor_that_nobody_else_holds_arrives_whole(world: World) -> None:
    one, other = world(2)
    got = torch.zeros(LARGE, dtype=torch.uint8)
    pending = other.post([(0, message(1, 0, 0, LARGE))], [])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pending.wait)
        one.post([], [(1, got)]).wait()
        waiting.result()
    assert torch.equal(got, message(1, 0, 0, LARGE))


def test_a_tensor_with_gaps_is_refused(world: World) -> None:
    one, _ = world(2)
    with pytest.raises(AssertionError):
        one.post([], [(1, torch.zeros(4, 4)[:, 0])])


BeforeSleep = Callable[[Callable[[float], None]], None]


@pytest.fixture
def before_sleep(monkeypatch: pytest.MonkeyPatch) -> BeforeSleep:
    """`before_sleep(act)`: `act(until)` whenever a wait is about to sleep."""
    sleep = LocalLinks._sleep

    def install(act: Callable[[float], None]) -> None:
        def patched(links: LocalLinks, until: float) -> None:
            act(until)
            sleep(links, until)

        monkeypatch.setattr(LocalLinks, "_sleep", patched)

    return install


def test_who_waits_sleeps_and_its_patience_starts_anew_with_every_byte(
    before_sleep: BeforeSleep,
) -> None:
    end, slow = socket.socketpair()
    one = LocalLinks({1: end}, timeout_s=20)
    got = torch.zeros(5, dtype=torch.uint8)
    untils: list[float] = []

    def drip(until: float) -> None:
        untils.append(until)
        slow.sendall(bytes([len(untils)]))

    before_sleep(drip)
    with end, slow:
        one.post([], [(1, got)]).wait()
    assert got.tolist() == [1, 2, 3, 4, 5]
    assert untils == sorted(set(untils))


# ---- peers that are gone ---------------------------------------------------------------------


def test_a_peer_that_goes_while_one_waits_for_it(world: World, before_sleep: BeforeSleep) -> None:
    one, other, _third = world(3)
    pending = one.post([], [(2, torch.zeros(1)), (1, torch.zeros(1))])
    before_sleep(lambda _: other.close())
    with pytest.raises(WorkerError, match=GONE):
        pending.wait()


def test_a_peer_that_goes_in_the_middle_of_what_is_sent_to_it(
    world: World, before_sleep: BeforeSleep
) -> None:
    one, other, _third = world(3)
    pending = one.post([(1, torch.zeros(LARGE, dtype=torch.uint8))], [])
    before_sleep(lambda _: other.close())
    with pytest.raises(WorkerError, match=GONE):
        pending.wait()


def test_sending_to_a_peer_that_is_gone(world: World) -> None:
    one, other = world(2)
    other.close()
    with pytest.raises(WorkerError, match=GONE):
        one.post([(1, torch.zeros(1))], [])


def test_what_a_peer_has_sent_before_it_went_arrives(world: World) -> None:
    one, other = world(2)
    other.post([(0, torch.ones(1000))], []).wait()
    other.close()
    got = torch.zeros(1000)
    one.post([], [(1, got)]).wait()
    assert bool(got.all())
    with pytest.raises(WorkerError, match=GONE):
        one.post([], [(1, got)]).wait()


def test_a_message_that_never_comes_is_an_error(world: World) -> None:
    one, _other, _third = world(3, timeout_s=0.2)
    with pytest.raises(WorkerError, match=r"nothing came from or went to instance 2 in 0\.2 s"):
        one.post([], [(2, torch.zeros(1))]).wait()


# ---- tensor parallelism ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_over_ranks_has_the_same_bits_on_all(world: World, dtype: torch.dtype) -> None:
    parts = [torch.randn(7, 33, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    found: dict[int, Tensor] = {}

    def add(rank: int, links: LocalLinks) -> None:
        found[rank] = parts[rank].to(dtype, copy=True)
        ranks = LocalTensorParallel(links, rank, 3)
        ranks.all_reduce(found[rank])
        ranks.all_reduce(found[rank][:0])

    on_all(add, world(3))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    rounding = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found[0].float(), sum(parts), atol=rounding, rtol=rounding)


def test_ranks_gather_in_order_and_agree_on_the_smallest(world: World) -> None:
    def gather(rank: int, links: LocalLinks) -> None:
        ranks = LocalTensorParallel(links, rank, 3)
        columns = torch.full((4, 6), rank)[:, ::2]
        expected = torch.tensor([[0] * 3 + [1] * 3 + [2] * 3] * 4)
        assert torch.equal(ranks.all_gather(columns), expected)
        assert ranks.all_gather(columns[:0]).shape == (0, 9)
        assert ranks.smallest([7, 3, 5][rank], torch.device("cpu")) == 3

    on_all(gather, world(3))


# ---- connecting ------------------------------------------------------------------------------


def _connected(base: Path, num_ranks: int) -> list[LocalLinks]:
    barrier = threading.Barrier(num_ranks, timeout=20)
    with ThreadPoolExecutor(num_ranks) as pool:
        found = [
            pool.submit(connect, rank, num_ranks, base, barrier.wait) for rank in range(num_ranks)
        ]
        return [LocalLinks(one.result()) for one in found]


def test_each_rank_finds_each_other_below_a_path_of_any_length(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 40) / ("longer" * 30)
    directory.mkdir(parents=True)
    (directory / "rendezvous-7.0.1").touch()  # one that is left over

    def greet(rank: int, links: LocalLinks) -> None:
        me = torch.tensor([rank])
        got = {other: torch.zeros_like(me) for other in range(4) if other != rank}
        links.post([(other, me) for other in got], list(got.items())).wait()
        assert {other: int(tensor) for other, tensor in got.items()} == {o: o for o in got}

    links = _connected(directory / "rendezvous-7.0", 4)
    on_all(greet, links)
    for one in links:
        one.close()
    assert list(directory.iterdir()) == [], "no sockets are left"


def test_one_rank_alone_has_no_peers(tmp_path: Path) -> None:
    assert connect(0, 1, tmp_path / "rendezvous", lambda: None) == {}


def test_only_this_user_can_connect(tmp_path: Path) -> None:
    modes = []

    def all_listen() -> None:
        path = tmp_path / "rendezvous.0"
        modes.append((stat.S_ISSOCK(path.stat().st_mode), stat.S_IMODE(path.stat().st_mode)))

    connect(0, 1, tmp_path / "rendezvous", all_listen)
    assert modes == [(True, 0o600)]


def test_a_stranger_that_connects_is_an_error(tmp_path: Path) -> None:
    def stranger() -> None:
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(str(tmp_path / "r.0"))
            end.sendall((7).to_bytes(8, "little"))

    with pytest.raises(WorkerError, match=r"7"):
        connect(0, 2, tmp_path / "r", stranger)
