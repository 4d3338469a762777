from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.probes.conftest import Observed


@pytest.fixture(autouse=True)
def _installed(observed: Observed) -> None:
    observed.install("files")


def test_binding_makes_the_file_that_a_connection_needs(observed: Observed, folder: Path) -> None:
    path = str(folder / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        with pytest.raises(FileNotFoundError):
            client.connect(path)
        server.bind(path)
        server.listen()
        client.connect(path)

    failed, made, connected = observed.accesses(folder)
    end = observed.end(failed)
    assert end is not None
    assert end.error.startswith("FileNotFoundError")
    assert (made.action, made.is_exclusive, made.api) == ("write", True, "socket.bind")
    assert (connected.action, connected.api) == ("connect", "socket.connect")


def test_other_addresses_are_no_files(observed: Observed, folder: Path) -> None:
    with socket.socket() as server, socket.socket(socket.AF_UNIX) as abstract:
        server.bind(("127.0.0.1", 0))
        abstract.bind("\0distdiag-test-abstract")
        with socket.socket() as client:
            server.listen()
            client.connect(server.getsockname())

    assert observed.said(folder) == []


def test_sockets_are_as_before_afterwards(observed: Observed) -> None:
    assert "connect" in vars(socket.socket)
    observed.uninstall()

    assert "connect" not in vars(socket.socket)
    assert "bind" not in vars(socket.socket)
