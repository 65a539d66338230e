"""A worker's signs of life, from a thread of its own.

Knows: how often, and how many layers the main thread has finished. Does not know: steps.
The main thread is inside a step for seconds to minutes; this one tells the daemon that the process
runs, and whether the step moves on.
"""

from __future__ import annotations

import threading

import zmq

from loongd.wire import Beat, encode

_INTERVAL_S = 1.0


class Pulse:
    """Counts finished layers; written by the main thread, read by the heart."""

    def __init__(self) -> None:
        self.layers = 0


class Heart(threading.Thread):
    """Sends `Beat` once a second over a socket that only this thread uses."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, identity: bytes, pulse: Pulse
    ) -> None:
        super().__init__(name="heart", daemon=True)
        self._context = context
        self._address = address
        self._identity = identity
        self._pulse = pulse
        self._stopped = threading.Event()

    def run(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, b"heart-" + self._identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address)
        while not self._stopped.wait(_INTERVAL_S):
            beat = Beat(worker=self._identity.decode(), layers=self._pulse.layers)
            socket.send(encode(beat), zmq.DONTWAIT)
        socket.close()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        self.join()
