"""Which holders send keys: the time of a layer's attention decides, and bytes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongd.wire import Extend, pack_tokens
from loongd.worker.layout import RowBytes
from loongd.worker.passing import key_holders, piece_tokens, pieces

LLAMA_7B = RowBytes.of(32, 32, 128, 2)
LLAMA_8B = RowBytes.of(32, 8, 128, 2)


def chunk(num_new: int, held: dict[int, int], *, master: int | None = None) -> Extend:
    return Extend(
        request_id="a",
        tokens=pack_tokens([0] * num_new),
        start=sum(held.values()),
        master=master,
        segment=1,
        keep=[],
        cached=[0],
        holders=list(held),
        sampling=None,
        holder_tokens=list(held.values()),
    )


@pytest.mark.parametrize(
    ("row", "dop", "num_new", "held", "senders"),
    [
        # one-sided: worth it when a key's way is clearly shorter than the holder's work on it
        (LLAMA_7B, 2, 6144, {0: 80_000}, {0}),
        (LLAMA_7B, 2, 4096, {0: 118_000}, {0}),
        (LLAMA_7B, 2, 2300, {1: 118_000}, {1}),
        (LLAMA_7B, 2, 2100, {1: 118_000}, set()),
        (LLAMA_8B, 2, 600, {0: 118_000}, {0}),
        (LLAMA_8B, 2, 500, {0: 118_000}, set()),
        # a holder sends its keys to every other member
        (LLAMA_7B, 4, 6144, {0: 80_000}, set()),
        (LLAMA_7B, 4, 8192, {0: 80_000}, {0}),
        (LLAMA_8B, 8, 4096, {3: 400_000}, {3}),
        # even loads stay; uneven ones are evened out by all that it takes, and by no more
        (LLAMA_7B, 2, 8192, {0: 40_000, 1: 40_000}, set()),
        (LLAMA_7B, 2, 8192, {0: 44_000, 1: 36_000}, set()),
        (LLAMA_7B, 2, 8192, {0: 64_000, 1: 16_000}, {0, 1}),
        (LLAMA_8B, 4, 8192, {0: 90_000, 1: 30_000, 2: 30_000, 3: 30_000}, {0, 1, 2, 3}),
        (LLAMA_8B, 4, 8192, {0: 90_000, 1: 500}, {0, 1}),
        # few bytes
        (LLAMA_7B, 2, 512, {0: 300}, {0}),
        (LLAMA_7B, 2, 512, {0: 4000}, set()),
        # decode
        (LLAMA_7B, 2, 1, {0: 118_000}, set()),
        (LLAMA_8B, 8, 1, {0: 118_000, 1: 3}, set()),
    ],
)
def test_known_choices(
    row: RowBytes, dop: int, num_new: int, held: dict[int, int], senders: set[int]
) -> None:
    master = 1 if num_new == 1 else None
    found = key_holders(chunk(num_new, held, master=master), dop, row)
    few = {h for h, tokens in held.items() if tokens * row.key < row.query}
    assert found - (few if num_new == 1 else set()) == senders


def test_one_that_computes_alone_passes_what_is_fewer_bytes() -> None:
    """A master with a long chunk: its holder's work would only move to it."""
    assert key_holders(chunk(6144, {0: 80_000}, master=1), 2, LLAMA_7B) == set()
    assert key_holders(chunk(6144, {0: 5_000}, master=1), 2, LLAMA_7B) == {0}


def test_one_new_token_cannot_be_shared() -> None:
    """However long computing takes: its owner would have all of the holder's work."""
    slow = RowBytes(query=1, key=1, pair_flops=1 << 30)
    assert key_holders(chunk(1, {0: 1000}), 2, slow) == set()
    assert key_holders(chunk(2, {0: 1000}), 2, slow) == {0}


def test_nothing_travels_alone_or_when_counts_are_not_told() -> None:
    told = chunk(6144, {0: 80_000})
    assert key_holders(told, 1, LLAMA_7B) == set()
    untold = {name: getattr(told, name) for name in told.__struct_fields__} | {"holder_tokens": []}
    assert key_holders(Extend(**untold), 2, LLAMA_7B) == set()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(2, 8), st.integers(1, 4000))
def test_no_other_choice_is_much_faster(data: st.DataObject, dop: int, share: int) -> None:
    """Against every set of holders, with each member's work counted."""
    num_new = share * dop
    members = data.draw(st.lists(st.integers(0, dop - 1), min_size=1, unique=True))
    held = {m: data.draw(st.integers(1, 100_000)) for m in members}
    row = RowBytes(
        query=0, key=16384, pair_flops=data.draw(st.sampled_from((4096, 16384, 1 << 24)))
    )

    def seconds(senders: set[int] | frozenset[int]) -> float:
        sent = sum(held[m] for m in senders)
        pairs = [share * sent + num_new * held.get(m, 0) * (m not in senders) for m in range(dop)]
        links = [max((dop - 1) * held[m], sent - held[m]) for m in senders]
        links += [sent] if set(range(dop)) - senders else []
        return max(max(pairs) * row.pair_flops / 600e12, max(links, default=0) * row.key / 338e9)

    every = [set(s) for n in range(len(held) + 1) for s in itertools.combinations(held, n)]
    best = min(map(seconds, every))
    chosen = key_holders(chunk(num_new, held), dop, row)
    assert seconds(chosen) <= seconds(set())
    assert seconds(chosen) * 0.79 <= best


@given(st.lists(st.integers(0, 50)), st.integers(1, 20))
def test_pieces_are_full_and_in_order(lens: list[int], most: int) -> None:
    cut = pieces(lens, most)
    sizes = [sum(end - first for _, first, end in piece) for piece in cut]
    assert sizes[:-1] == [most] * (len(sizes) - 1)
    assert all(0 < size <= most for size in sizes)
    tokens = [(n, at) for piece in cut for n, first, end in piece for at in range(first, end)]
    assert tokens == [(n, at) for n, length in enumerate(lens) for at in range(length)]


def test_holders_share_a_round_by_powers_of_two() -> None:
    found = [piece_tokens(n, 100_000, LLAMA_7B) for n in (1, 2, 3, 4, 5, 8)]
    assert found == [32768, 16384, 8192, 8192, 4096, 4096]


def test_many_rounds_grow_to_what_memory_is_kept_for() -> None:
    """Keys of 4 KiB; those of 16 KiB fill the memory of a round with the least number."""
    found = [piece_tokens(1, held, LLAMA_8B) for held in (393_216, 393_217, 800_000, 5_000_000)]
    assert found == [32768, 65536, 131072, 131072]
    assert piece_tokens(2, 400_000, LLAMA_8B) == 65536
    assert piece_tokens(1, 5_000_000, LLAMA_7B) == 32768
    assert 2 * 131072 * LLAMA_8B.key == 2 * 32768 * LLAMA_7B.key == 1 << 30
