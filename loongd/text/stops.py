"""Stop strings in a stream of text.

Knows: how to find the first stop string however the text is cut, and which characters must wait.
Does not know: tokens, requests.

One Knuth-Morris-Pratt automaton per stop string: its state after each character is the length
of the longest suffix of the text that is a prefix of the stop string. The largest state is
exactly what must be held back, and a full state is a hit. Cost per character does not depend on
the length of the text or of the stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence

from loongd.errors import RequestError


class StopMatcher:
    """Passes text on until one of `stops` appears in it.

    The hit is the stop string that is complete first; of two that end on the same character,
    the longer. Text before it has then been returned, and it has not, unless `include_stop`.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        """Raises RequestError when a stop string is empty."""
        if not all(stops):
            raise RequestError("a stop string is empty", param="stop")
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include_stop = include_stop
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; return what can be sent, and the stop string once it was hit.

        After a hit nothing more comes out, whatever is pushed.
        """
        if self._hit is not None or not self._automata:
            return ("" if self._hit else text), self._hit
        buffer, first_new = self._held + text, len(self._held)
        for index in range(first_new, len(buffer)):
            for automaton in self._automata:
                if automaton.step(buffer[index]):
                    self._hit, self._held = automaton.stop, ""
                    end = index + 1
                    keep = end if self._include_stop else end - len(automaton.stop)
                    return buffer[:keep], self._hit
        num_held = 0
        if not self._include_stop:
            num_held = max(automaton.state for automaton in self._automata)
        cut = len(buffer) - num_held
        self._held = buffer[cut:]
        return buffer[:cut], None

    def finish(self) -> str:
        """The text that was held back; call once the stream has ended."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """How much of one stop string the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = [0] * len(stop)
        length = 0
        for index in range(1, len(stop)):
            while length and stop[index] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[index] == stop[length]
            self._fallback[index] = length

    def step(self, char: str) -> bool:
        """Advance by one character; True when the stop string is complete."""
        while self.state and char != self.stop[self.state]:
            self.state = self._fallback[self.state - 1]
        self.state += char == self.stop[self.state]
        return self.state == len(self.stop)
