"""Whole traces of the scheduler, to be read by people and compared to the letter.

Regenerate after a wanted change: LOONGD_TEST_GOLDEN=write pytest tests/unit/test_sched_golden.py
"""

import os
from pathlib import Path

import pytest
from sched_kit import VirtualTime

GOLDEN = Path(__file__).parent / "golden"


def chats_and_a_document():
    """Two chats decode; a document of 1,200 tokens comes, then a third chat."""
    world = VirtualTime(4_000, 4_000)
    world.arrive("chat-1", 20, max_tokens=60)
    world.arrive("chat-2", 30, max_tokens=40, at=0.05)
    world.arrive("document", 1_200, max_tokens=2, at=0.11)
    world.arrive("chat-3", 25, max_tokens=3, at=0.4)
    return world


def a_full_pool():
    """Both requests outgrow what they reserved; one is preempted and comes back."""
    world = VirtualTime(60)
    world.arrive("old", 20, max_tokens=32, reserve=1)
    world.arrive("new", 12, max_tokens=30, reserve=1, at=0.2)
    return world


def passing():
    """A head that lacks slots, one request that may pass it and one that may not."""
    world = VirtualTime(200, 200)
    world.arrive("elder", 150, max_tokens=12)
    world.arrive("head", 300, max_tokens=4)
    world.arrive("small", 10, max_tokens=4)
    world.arrive("large", 80, max_tokens=60)
    world.run(until=0.3)
    world.cancel("large")
    return world


@pytest.mark.parametrize("scenario", [chats_and_a_document, a_full_pool, passing])
def test_trace(scenario):
    world = scenario().run()
    trace = f"# {scenario.__doc__}\n" + "\n".join(shorten(world.lines)) + "\n"
    path = GOLDEN / f"sched_{scenario.__name__}.txt"
    if os.environ.get("LOONGD_TEST_GOLDEN") == "write":
        path.write_text(trace, encoding="ascii")
    assert trace == path.read_text(encoding="ascii")


def shorten(lines):
    """Runs of equal decode steps as one line, without the steps' numbers."""
    shown, num_left_out = [], 0
    events = []
    for line in lines:
        if line[0] == " " and line[14:15] != " " and not line.strip()[0].isdigit():
            events[-1].append(line)
        else:
            events.append([line])
    last = None
    for event in events:
        what = [line.partition(": ")[2] or line for line in event[1:]]
        if what and what == last and "decode" in what[-1]:
            num_left_out += 1
            continue
        if num_left_out:
            shown.append(f"              ... {num_left_out} more steps like this")
        num_left_out, last = 0, what
        shown.extend(event)
    return shown
