"""The address at which the reporter listens is that of one interface, the one the job uses."""

import socket

import psutil
import pytest

from distdiag.transports.tcp import listen_host


@pytest.mark.parametrize(
    ("master_addr", "host"),
    [("", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("10.1.2.3", "10.1.2.3"), ("::1", "::1")],
)
def test_an_address_is_taken_as_it_is(master_addr, host):
    assert listen_host(master_addr) == host


def test_the_name_of_the_loopback_stays_there():
    assert listen_host("localhost") == "localhost"


def test_a_name_that_leads_to_the_loopback_in_our_own_eyes_is_not_believed(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    own = {a.address for addresses in psutil.net_if_addrs().values() for a in addresses}
    try:
        assert listen_host("node-0") in own - {"127.0.0.1", "127.0.1.1", "::1"}
    except OSError:
        pytest.skip("this machine has no way out")
