"""`python -m loongd.worker --instance I --socket ADDRESS`: one elastic instance.

Started by the daemon, never by hand. Knows: process-level set-up. Does not know: models, steps.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
from pathlib import Path

import zmq

from loongd.worker.loop import WorkerLoop

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Connect to the daemon and serve it; the exit code."""
    parser = argparse.ArgumentParser(prog="loongd.worker")
    parser.add_argument("--instance", type=int, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args()
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format=f"%(levelname)s instance={args.instance} %(message)s",
    )
    _tie_to_parent(args.instance)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"%d" % args.instance)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(args.socket)
    code = WorkerLoop(socket, args.instance).run()
    socket.close()
    context.term()
    # Communication libraries keep threads that may wait for dead peers for ever: leave at once.
    sys.stderr.flush()
    os._exit(code)


def _tie_to_parent(instance: int) -> None:
    """Die with the daemon; leave terminal signals to it; carry a name that `ps` shows."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("/proc/self/comm").write_text(f"loongd-w{instance}")


if __name__ == "__main__":
    main()
