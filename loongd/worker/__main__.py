"""`python -m loongd.worker --instance I --tp-rank T --socket ADDRESS`: one worker of an instance.

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

from loongd.worker.heart import Heart, Pulse
from loongd.worker.loop import WorkerLoop

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Connect to the daemon and serve it; the exit code."""
    parser = argparse.ArgumentParser(prog="loongd.worker")
    parser.add_argument("--instance", type=int, required=True)
    parser.add_argument("--tp-rank", type=int, default=0)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--log-level", default="info")
    args = parser.parse_args()
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format=f"%(levelname)s instance={args.instance} tp_rank={args.tp_rank} %(message)s",
    )
    _tie_to_parent(args.instance, args.tp_rank)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    identity = b"%d.%d" % (args.instance, args.tp_rank)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, 2000)
    socket.connect(args.socket)
    pulse = Pulse()
    heart = Heart(context, args.socket, identity, pulse)
    heart.start()
    code = WorkerLoop(socket, args.instance, pulse).run()
    heart.stop()
    socket.close()
    context.term()
    # Communication libraries keep threads that may wait for dead peers for ever: leave at once.
    sys.stderr.flush()
    os._exit(code)


def _tie_to_parent(instance: int, tp_rank: int) -> None:
    """Die with the daemon; leave terminal signals to it; carry a name that `ps` shows."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    part = f".{tp_rank}" if tp_rank else ""
    Path("/proc/self/comm").write_text(f"loongd-w{instance}{part}")


if __name__ == "__main__":
    main()
