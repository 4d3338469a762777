"""Who connects to the reporter without being a node of the job changes nothing, nor does it wait.

Nothing here is decided by time: every wait is for an answer, and ends with the test if none comes.
"""

import os
import random
import resource
import select
import socket
import struct
import time
from contextlib import ExitStack, suppress

import msgspec
import pytest

from distdiag.events.errors import DamagedFileError
from distdiag.events.lifecycle import ProbeDisabled, StepEnd
from distdiag.events.ranks import RankSet
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import ReporterAddress, RunDir
from distdiag.record.status_page import StatusPage
from distdiag.record.wire import Interner, encode
from distdiag.transports.forwarder import Forwarder, Outbox
from distdiag.transports.frames import (
    MAX_FRAME,
    Ack,
    Batch,
    Bye,
    Challenge,
    FrameReader,
    Hello,
    Orders,
    Ping,
    Pong,
    Welcome,
    to_bytes,
)
from distdiag.transports.handshake import SECRET, Key, nonce
from distdiag.transports.tcp import HANDSHAKE_S, MOST_STRANGERS, TcpSource

PATIENCE_S = 30


@pytest.fixture
def source():
    with TcpSource("127.0.0.1", (2, 3), Interner()) as source:
        yield source


class Client:
    """A connection to a reporter, spoken by hand."""

    def __init__(self, address):
        self.socket = socket.create_connection((address.host, address.port), timeout=PATIENCE_S)
        self._reader = FrameReader()
        self._frames = []
        self.key = Key(address.token)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    def send(self, *data):
        """Send frames or bytes; the other end may have had enough before all of it is sent."""
        with suppress(ConnectionResetError, BrokenPipeError):
            for each in data:
                self.socket.sendall(each if isinstance(each, bytes) else to_bytes(each))

    def receive(self):
        """Return the next frame, or None when the other end has closed the connection."""
        while not self._frames:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames += self._reader.feed(data)
        return self._frames.pop(0)

    def is_cut_off(self):
        return any(frame is None for frame in iter(self.receive, object()))

    def hello(self, challenge, **changes):
        fields = {"session": "s", "hostname": "h", "ranks": (2, 3), "nonce": nonce()}
        hello = Hello(**(fields | changes))
        return msgspec.structs.replace(hello, proof=hello.prove(self.key, challenge))

    def join(self, **changes):
        """Shake hands as a node does; return the answer."""
        self.send(self.hello(self.receive().nonce, **changes))
        return self.receive()


def steps_of(source, rank, number):
    """Wait until so many steps of a rank have arrived; return all events."""
    events = []
    for _ in range(PATIENCE_S * 100):
        events += source.poll()
        if sum(isinstance(event, StepEnd) and event.rank == rank for event in events) >= number:
            return events
        time.sleep(0.01)
    raise AssertionError(events[-5:])


def step(rank, number=0):
    return (rank, encode(StepEnd(rank=rank, seq=number, time_ns=1, step=number, duration_s=0.1)))


# Who does not hold the key.


@pytest.mark.parametrize(
    "answer",
    [
        lambda client, challenge: client.hello(b"another challenge"),
        lambda client, challenge: msgspec.structs.replace(client.hello(challenge), proof=b""),
        lambda client, challenge: msgspec.structs.replace(client.hello(challenge), ranks=(2,)),
        lambda client, challenge: msgspec.structs.replace(client.hello(challenge), session="x"),
        lambda client, challenge: msgspec.structs.replace(client.hello(challenge), nonce=b"x"),
        lambda client, challenge: client.hello(challenge, ranks=(0,)),
        lambda client, challenge: client.hello(challenge, ranks=()),
        lambda client, challenge: client.hello(challenge, ranks=(2, 3, 4)),
        lambda client, challenge: client.hello(challenge, ranks=(-1,)),
        lambda client, challenge: client.hello(challenge, ranks=(1 << 63,)),
        lambda client, challenge: client.hello(challenge, hostname="h" * (1 << 17)),
        lambda client, challenge: Batch(1, 0, True, (step(2),)),
        lambda client, challenge: Welcome(0),
        lambda client, challenge: b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
        lambda client, challenge: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        lambda client, challenge: (1 << 20).to_bytes(4),
    ],
)
def test_who_does_not_hold_the_key_or_the_ranks_is_cut_off_and_changes_nothing(source, answer):
    with Client(source.address) as client:
        client.send(answer(client, client.receive().nonce))
        assert client.is_cut_off()
    assert not source.connected
    with Client(source.address) as node:
        assert isinstance(node.join(), Welcome)
    assert source.connected == RankSet((2, 3))


def test_the_token_never_travels_over_the_connection(source, tmp_path):
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        address = ReporterAddress(host=host, port=port, token=source.address.token)
        with forwarding(tmp_path, address):
            between, _ = server.accept()
            with between, Client(source.address) as client:
                for _ in range(2):  # challenge and hello, welcome and the first ping
                    between.sendall(client.socket.recv(1 << 16))
                    heard.append(between.recv(1 << 16))
                    client.socket.sendall(heard[-1])
                assert isinstance(client.receive(), Welcome | Orders | Pong)
    assert len(heard[0]) > 50
    assert source.address.token.encode() not in b"".join(heard)
    assert bytes.fromhex(source.address.token) not in b"".join(heard)


def test_what_was_heard_is_of_no_use_in_another_connection(source):
    with Client(source.address) as node:
        hello = node.hello(node.receive().nonce)
        node.send(hello)
        assert isinstance(node.receive(), Welcome)
        with Client(source.address) as other:
            other.receive()
            other.send(hello)
            assert other.is_cut_off()
        node.send(Batch(1, 0, True, (step(2),)))
        steps_of(source, 2, 1)


def test_the_ranks_of_a_node_are_not_given_to_another_that_holds_the_key(source):
    with Client(source.address) as node, Client(source.address) as other:
        assert isinstance(node.join(ranks=(2,)), Welcome)
        assert other.join(ranks=(2, 3), session="other") is None
        node.send(Batch(1, 0, True, (step(2), step(3))))
        events = steps_of(source, 2, 1)
    assert {event.rank for event in events} == {2}  # what it says of rank 3 is not believed


class forwarding:
    """A node of ranks 2 and 3 that sends what they write to an address."""

    def __init__(self, folder, address):
        run_dir = RunDir(folder, 0)
        run_dir.folder.mkdir(parents=True, exist_ok=True)
        self.rank = Recorder(run_dir.folder, 2, StatusPage(run_dir.status(2)))
        self.forwarder = Forwarder(Outbox(run_dir, (2, 3)), RankSet((2, 3)), lambda: address)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.forwarder.finish(0)

    def until(self, is_true):
        for _ in range(PATIENCE_S * 100):
            if is_true():
                return
            time.sleep(0.01)
        raise AssertionError(self.forwarder.problem)


@pytest.mark.parametrize("answer", [Welcome(0), Welcome(0, b"x" * 32), Orders(abort=True), Bye()])
def test_who_listens_at_the_address_without_the_key_gives_no_orders(tmp_path, answer):
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        with forwarding(tmp_path, ReporterAddress(host=host, port=port, token="t")) as node:
            connected, _ = server.accept()
            with connected:
                connected.sendall(to_bytes(Challenge(b"x" * 16)) + to_bytes(answer))
                connected.sendall(to_bytes(Orders(abort=True, done=True)))
                node.until(lambda: "not the reporter" in node.forwarder.problem)
            assert node.forwarder.orders == Orders()
            assert not node.forwarder.has_connected


def test_with_a_secret_the_token_alone_is_not_enough(source, tmp_path, monkeypatch):
    monkeypatch.setenv(SECRET, "of this job")
    with TcpSource("127.0.0.1", (2, 3), Interner()) as guarded:
        assert "of this job" not in repr(guarded.address)
        monkeypatch.delenv(SECRET)
        with Client(guarded.address) as client:
            assert client.join() is None
        with forwarding(tmp_path / "without", guarded.address) as node:
            node.until(lambda: SECRET in node.forwarder.problem)
        monkeypatch.setenv(SECRET, "of this job")
        with forwarding(tmp_path / "with", guarded.address) as node:
            node.rank.event(StepEnd, step=0, duration_s=0.1)
            steps_of(guarded, 2, 1)


# Who wants to keep the reporter busy.


def test_a_thousand_connections_keep_no_node_away(source):
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with ExitStack() as stack:
        idle = []
        for _ in range(min(1000, most // 2)):
            idle.append(socket.create_connection((source.address.host, source.address.port)))
            stack.enter_context(idle[-1])
        node = stack.enter_context(Client(source.address))
        assert isinstance(node.join(), Welcome)
        node.send(Batch(1, 0, True, (step(2),)))
        steps_of(source, 2, 1)
        assert len(source._listener._connections) <= MOST_STRANGERS + 2
        poll = select.poll()
        for each in idle:
            poll.register(each, select.POLLRDHUP)
        cut_off = {descriptor for descriptor, _ in poll.poll(0)}
        assert len(cut_off) >= len(idle) - MOST_STRANGERS - 2


@pytest.mark.slow
def test_who_takes_its_time_is_cut_off_while_a_node_is_served(source):
    with Client(source.address) as slow, Client(source.address) as node:
        assert isinstance(node.join(), Welcome)
        hello = to_bytes(slow.hello(slow.receive().nonce, session="slow", hostname="h" * 1000))
        begun = time.monotonic()
        sent = 0
        poll = select.poll()
        poll.register(slow.socket, select.POLLRDHUP)
        while not poll.poll(100):  # one byte each tenth of a second: the whole takes 100 s
            slow.send(hello[sent : sent + 1])
            sent += 1
            assert time.monotonic() - begun < 4 * HANDSHAKE_S
        node.send(Batch(1, 0, True, (step(2),)))
        steps_of(source, 2, 1)


def test_half_a_frame_keeps_nobody_waiting(source):
    with Client(source.address) as slow, Client(source.address) as node:
        slow.send(to_bytes(slow.hello(slow.receive().nonce))[:-1])
        assert isinstance(node.join(), Welcome)
        node.send(Ping(5))
        answers = iter(node.receive, None)
        assert next(each for each in answers if isinstance(each, Pong)).sent_ns == 5


def test_without_a_free_descriptor_nodes_are_served_and_others_wait(source):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Client(source.address) as node, socket.socket() as other:
        assert isinstance(node.join(), Welcome)
        other.settimeout(PATIENCE_S)
        lowest = os.dup(other.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            other.connect((source.address.host, source.address.port))
            node.send(Batch(1, 0, True, (step(2),)))
            steps_of(source, 2, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        (frame,) = FrameReader().feed(other.recv(100))
        assert isinstance(frame, Challenge)


def test_a_node_that_does_not_read_is_cut_off_and_takes_no_memory(source):
    with Client(source.address) as node:
        assert isinstance(node.join(), Welcome)
        node.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        pings = to_bytes(Ping(1)) * 10_000
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while True:  # each is answered, and no answer is read
                node.socket.sendall(pings)


# Who holds the key and has lost its mind.


@pytest.mark.parametrize(
    "frame",
    [
        (MAX_FRAME + 1).to_bytes(4),
        Hello("s", "h", (2, 3), b""),
        Welcome(1),
        Ack(1),
        Orders(abort=True),
        Challenge(b""),
        struct.pack(">I", 1) + b"\xc1",
    ],
)
def test_a_node_that_does_not_speak_as_it_should_is_cut_off_and_may_come_again(source, frame):
    with Client(source.address) as node:
        assert isinstance(node.join(), Welcome)
        node.send(frame)
        assert node.is_cut_off()
    with Client(source.address) as node:
        assert isinstance(node.join(), Welcome)
        node.send(Batch(1, 0, True, (step(2),)))
        steps_of(source, 2, 1)


@pytest.mark.parametrize(
    ("record", "reported"),
    [((2, b"\xc1"), [2]), ((3, b""), [3]), ((9, b"\x90"), [])],
)
def test_a_record_that_makes_no_sense_is_reported_and_the_rest_is_taken(source, record, reported):
    with Client(source.address) as node:
        node.join()
        node.send(Batch(1, 0, True, (record, record, step(2))))
        events = steps_of(source, 2, 1)
    assert [event.rank for event in events if isinstance(event, ProbeDisabled)] == reported


@pytest.mark.parametrize("number", [0, 2, -1, 1 << 63])
def test_a_batch_out_of_its_turn_is_not_taken(source, number):
    with Client(source.address) as node:
        node.join()
        node.send(Batch(number, 0, True, (step(2, 7),)), Batch(1, 0, True, (step(2, 1),)))
        events = steps_of(source, 2, 1)
    assert [event.step for event in events] == [1]


@pytest.mark.parametrize("offset_ns", [(1 << 64) - 1, -(1 << 63), 1 << 62])
def test_times_that_no_clock_shows_are_reported_and_not_taken(source, offset_ns):
    with Client(source.address) as node:
        node.join()
        node.send(Batch(1, offset_ns, True, (step(2),)), Batch(2, 0, True, (step(2, 1),)))
        events = steps_of(source, 2, 1)
    reported, taken = events
    assert "a time that no clock shows" in reported.reason
    assert taken.step == 1


def test_bytes_of_all_kinds_do_not_end_the_listener(source):
    rng = random.Random(7)
    frames = [Ping(1), Batch(1, 0, True, (step(2), step(3))), Ack(3), Orders(), Bye()]
    for number in range(200):
        data = bytearray(to_bytes(rng.choice(frames)))
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] = rng.choice((0, 127, 128, 255, rng.randrange(256)))
        with Client(source.address) as client:
            if number % 2:
                client.join()
            client.send(bytes(data), os.urandom(rng.randrange(200)))
        with suppress(DamagedFileError):
            for event in source.poll():
                encode(event)
    assert source._listener._thread.is_alive()
    with Client(source.address) as node:
        assert isinstance(node.join(), Welcome)
