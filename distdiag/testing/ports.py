"""A port for the ranks of a test that nobody else can take before they do."""

from __future__ import annotations

import socket
from typing import Final

HOST: Final = "127.0.0.1"


def listening_socket() -> socket.socket:
    """Return a socket that listens on a port of the system's choice; rank 0 takes it over."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((HOST, 0))
    listener.listen(128)
    return listener
