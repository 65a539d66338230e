"""The two things systemd asks of a service: notifications, and signs of life.

Knows: `sd_notify(3)` over `NOTIFY_SOCKET`, and the watchdog's variables.
Does not know: when to say what (the daemon does), or the environment; callers hand it in.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping


def notify(env: Mapping[str, str], *lines: str) -> bool:
    """Send `READY=1`, `STATUS=...`, `WATCHDOG=1` and the like in one datagram.

    Never blocks and never raises for systemd's sake: a full or vanished socket loses the message,
    which matters less than the requests being served.

    Returns:
        Whether the message was sent; False as well when the daemon does not run under systemd.
    """
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        # An abstract socket's name starts with a zero byte.
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            sender.sendto("\n".join(lines).encode(), address)
        except OSError:
            return False
    return True


def extend_start(env: Mapping[str, str], seconds: float) -> bool:
    """Ask for `seconds` more before systemd calls the start (or stop) timed out."""
    return notify(env, f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")


def watchdog_interval_s(env: Mapping[str, str], pid: int) -> float | None:
    """Seconds between two `WATCHDOG=1`: half of what systemd allows; None when it is off.

    The variables are inherited, so they count only for the process that `WATCHDOG_PID` names.
    """
    allowed = env.get("WATCHDOG_USEC", "")
    if not allowed.isdecimal() or int(allowed) == 0:
        return None
    if env.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    return int(allowed) / 2e6
