"""What the daemon finds out about its machine before it does anything that takes long."""

import socket

import msgspec
import pytest

from loongd import node
from loongd.config import Config
from loongd.errors import BusyError, ConfigError


def test_a_runtime_directory_has_room_for_its_sockets(tmp_path):
    config = Config(model="m", runtime_dir=str(tmp_path / "short"))
    assert node.runtime_dir(config) == tmp_path / "short"
    long = msgspec.structs.replace(config, runtime_dir=str(tmp_path / ("a" * 100)))
    with pytest.raises(ConfigError, match=r"runtime_dir .*a has \d+ bytes, of which a socket's"):
        node.runtime_dir(long)


def test_a_busy_port_is_told_at_once():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(BusyError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            node.check_address("127.0.0.1", port)
    node.check_address("127.0.0.1", port)
    node.check_address("127.0.0.1", 0)
