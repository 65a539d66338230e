import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from loongd import systemd


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """What NOTIFY_SOCKET says, and the socket at systemd's end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        if request.param == "path":
            address = str(tmp_path / "notify")
            end.bind(address)
        else:
            end.bind("")  # the kernel chooses an abstract name
            address = "@" + end.getsockname()[1:].decode()
        end.settimeout(5)
        yield address, end


def test_lines_arrive_in_one_datagram(manager: tuple[str, socket.socket]) -> None:
    address, end = manager
    assert systemd.notify({"NOTIFY_SOCKET": address}, "READY=1", "STATUS=serving")
    assert end.recv(1000) == b"READY=1\nSTATUS=serving"


def test_more_time_is_asked_for_in_microseconds(manager: tuple[str, socket.socket]) -> None:
    address, end = manager
    assert systemd.extend_start({"NOTIFY_SOCKET": address}, 1.5)
    assert end.recv(1000) == b"EXTEND_TIMEOUT_USEC=1500000"


def test_without_systemd_nothing_is_sent(tmp_path: Path) -> None:
    assert not systemd.notify({}, "READY=1")
    assert not systemd.notify({"NOTIFY_SOCKET": "vsock:2:1"}, "READY=1")
    assert not systemd.notify({"NOTIFY_SOCKET": str(tmp_path / "gone")}, "READY=1")


def test_a_full_socket_does_not_block(manager: tuple[str, socket.socket]) -> None:
    address, _ = manager
    sent = [systemd.notify({"NOTIFY_SOCKET": address}, "WATCHDOG=1") for _ in range(2000)]
    assert sent[0]
    assert not sent[-1]


@pytest.mark.parametrize(
    ("env", "interval_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_the_watchdog_is_fed_twice_as_often_as_needed(
    env: dict[str, str], interval_s: float | None
) -> None:
    assert systemd.watchdog_interval_s(env, 42) == interval_s
