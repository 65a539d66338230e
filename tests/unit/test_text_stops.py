from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loongd.errors import RequestError
from loongd.text.stops import StopMatcher

TEXT = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str] | None:
    """What comes before the stop string that is complete first, by searching the whole text."""
    found = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    if not found:
        return None
    _, start, stop = min(found)
    return text[:start], stop


def waiting(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that could become a stop string."""
    sizes = range(1, len(text) + 1)
    return max((n for n in sizes if any(s.startswith(text[-n:]) for s in stops)), default=0)


@given(pieces=st.lists(TEXT, max_size=12), stops=STOPS, include=st.booleans())
def test_equals_searching_the_whole_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    sent, hit, seen = "", None, ""
    for piece in pieces:
        text, hit = matcher.push(piece)
        sent, seen = sent + text, seen + piece
        if hit is None:
            # Nothing leaks, and nothing waits that need not.
            held = 0 if include else waiting(seen, stops)
            assert sent == seen[: len(seen) - held]
    want = expected("".join(pieces), stops)
    if want is None:
        assert hit is None
        assert sent + matcher.finish() == "".join(pieces)
    else:
        before, stop = want
        assert hit == stop
        assert sent == before + (stop if include else "")
        assert matcher.finish() == ""


def test_prefix_of_a_stop_string_does_not_leak() -> None:
    matcher = StopMatcher(["DEFGHIJ"])
    assert matcher.push("ABCDEF") == ("ABC", None)
    assert matcher.push("GHIJK") == ("", "DEFGHIJ")
    assert matcher.push("LMN") == ("", "DEFGHIJ")
    assert matcher.finish() == ""


def test_text_without_stop_strings_streams_at_once() -> None:
    matcher = StopMatcher([])
    assert matcher.push("a,") == ("a,", None)
    assert matcher.finish() == ""


def test_longer_of_two_that_end_together_wins() -> None:
    assert StopMatcher(["c", "bc"]).push("abcd") == ("a", "bc")


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopMatcher(["x", ""])
    assert caught.value.param == "stop"
