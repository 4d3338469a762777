"""Events reach the reporter once and in order, whatever happens to the connection."""

import socket
import time

import pytest

from distdiag.events.base import CallSite, Frame, Phase
from distdiag.events.collectives import Collective, ProcessGroup, Signature
from distdiag.events.lifecycle import (
    EventsLost,
    Exited,
    Finished,
    Heartbeat,
    NodeLost,
    ProbeDisabled,
    StepEnd,
)
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Stacks
from distdiag.record.event_file import segment_path
from distdiag.record.recorder import Recorder
from distdiag.record.run_dir import ReporterAddress, RunDir
from distdiag.record.status_page import StatusPage
from distdiag.record.wire import Interner
from distdiag.transports.forwarder import WINDOW_BYTES, Forwarder, Outbox
from distdiag.transports.frames import Orders
from distdiag.transports.tcp import CONNECT_NS, LOST_NS, TcpSource
from tests.transports.relay import Relay

SECOND = 1_000_000_000
FAR_NS = 7_000 * SECOND  # the clocks of two machines have nothing in common


class Node:
    """Ranks 2 and 3 on another machine, and the connection that they have to this one."""

    def __init__(self, folder, *, offset_ns=0):
        self.now_ns = None
        self.source = TcpSource("127.0.0.1", (2, 3), Interner(), clock=self.clock)
        address = self.source.address
        self.relay = Relay((address.host, address.port))
        host, port = self.relay.address
        self.address = ReporterAddress(host=host, port=port, token=address.token)
        self.run_dir = RunDir(folder, 0)
        self.run_dir.folder.mkdir(parents=True)
        self.ranks = {rank: self._rank(rank) for rank in (2, 3)}
        self.outbox = Outbox(self.run_dir, (2, 3))
        self.forwarder = None
        self.offset_ns = offset_ns
        self.events = []

    def _rank(self, rank):
        return Recorder(self.run_dir.folder, rank, StatusPage(self.run_dir.status(rank)))

    def clock(self):
        return time.monotonic_ns() if self.now_ns is None else self.now_ns

    def connect(self, address=None):
        self.forwarder = Forwarder(
            self.outbox,
            RankSet((2, 3)),
            lambda: address or self.address,
            clock=lambda: time.monotonic_ns() - self.offset_ns,
        )

    def until(self, is_true, timeout_s=30):
        deadline = time.monotonic() + timeout_s
        while not is_true():
            self.events += self.source.poll()
            assert time.monotonic() < deadline, self.events[-5:]
            time.sleep(0.01)

    def steps(self, rank):
        return [e.step for e in self.events if isinstance(e, StepEnd) and e.rank == rank]

    def has(self, *kinds):
        return [event for event in self.events if isinstance(event, kinds)]

    def close(self):
        if self.forwarder is not None:
            self.forwarder.finish(0)
        self.source.close()
        self.relay.close()


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path)
    yield node
    node.close()


def end_steps(recorder, steps):
    for step in steps:
        recorder.event(StepEnd, step=step, duration_s=0.1)


def test_all_that_ranks_wrote_and_their_monitor_saw_arrives_in_order(node):
    group = ProcessGroup("0", "default_pg", (2, 3), "gloo")
    for recorder in node.ranks.values():
        number = recorder.define_group("g", group)
        signature = recorder.define_signature("s", Signature("all_reduce", ((4,),)))
        site = CallSite((Frame("train.py", 3, "main"),))
        place = recorder.define_site("l", site, api=None, is_own_call=True, kept_alive=None)
        recorder.call(number, 0, signature, place.number, False, None, None)
        end_steps(recorder, range(3))
    node.connect()
    node.until(lambda: len(node.steps(2)) == len(node.steps(3)) == 3)
    first, second = node.has(Collective)
    assert first.group is second.group  # one object for equal values, over all ranks
    assert first.signature is second.signature
    end_steps(node.ranks[3], (3,))
    node.forwarder.put(Stacks(rank=3, seq=-1, time_ns=1, source="py-spy", error="none"))
    node.ranks[3].event(Finished, exit_status=0)
    node.forwarder.put(Exited(rank=3, seq=-1, time_ns=2))
    node.until(lambda: node.has(Exited))
    assert [type(e) for e in node.events if e.rank == 3][-3:] == [Finished, Stacks, Exited]
    assert node.steps(3) == [0, 1, 2, 3]


def test_a_connection_that_breaks_loses_and_repeats_nothing(node):
    node.connect()
    for start in range(0, 500, 100):
        end_steps(node.ranks[2], range(start, start + 100))
        node.until(lambda end=start + 50: len(node.steps(2)) > end)
        node.relay.cut()
        end_steps(node.ranks[3], range(start, start + 100))
        time.sleep(0.1)
        node.relay.mend()
    node.until(lambda: len(node.steps(2)) == len(node.steps(3)) == 500)
    assert node.steps(2) == node.steps(3) == list(range(500))
    assert node.relay.num_connections > 2


def test_while_nothing_gets_through_memory_is_bounded_and_the_disk_has_the_rest(node):
    node.connect()
    node.until(lambda: node.source.connected)
    node.relay.hold()
    text = "x" * 10_000
    for recorder in node.ranks.values():
        for step in range(500):
            recorder.event(ProbeDisabled, step=step, probe="p", reason=text)
    time.sleep(1)
    assert node.outbox._num_bytes < WINDOW_BYTES + (1 << 20)
    node.relay.mend()
    node.until(lambda: len(node.has(ProbeDisabled)) == 1000)
    steps = [e.step for e in node.has(ProbeDisabled) if e.rank == 2]
    assert steps == list(range(500))


def test_a_segment_that_was_dropped_before_it_could_be_sent_is_reported(node):
    for step in range(3 * 110):
        node.ranks[2].event(ProbeDisabled, step=step, probe="p", reason="x" * 10_000)
    segment_path(node.run_dir.folder, 2, 1).unlink()
    node.connect()
    node.until(lambda: node.has(EventsLost))
    (lost,) = node.has(EventsLost)
    assert (lost.rank, lost.num_segments) == (2, 1)


def test_times_are_those_of_the_reporters_clock(tmp_path):
    node = Node(tmp_path, offset_ns=FAR_NS)
    try:
        node.connect()
        node.until(lambda: node.source.connected)
        before = time.monotonic_ns()
        there = before - FAR_NS
        beat = Heartbeat(rank=2, seq=-1, time_ns=there, phase=Phase.SCRIPT, beat_ns=there - SECOND)
        node.forwarder.put(beat)
        node.forwarder.put(Exited(rank=2, seq=-1, time_ns=there, gone_ns=there + SECOND))
        node.until(lambda: node.has(Exited))
        (event,) = node.has(Heartbeat)
        assert abs(event.time_ns - before) < SECOND // 10
        assert event.time_ns - event.beat_ns == SECOND
        (event,) = node.has(Exited)
        assert abs(event.time_ns - before) < SECOND // 10
        assert event.gone_ns - event.time_ns == SECOND
    finally:
        node.close()


def test_orders_reach_a_node_also_when_it_connects_later(node):
    node.source.want(Orders(stacks=(3,)))
    node.connect()
    node.until(lambda: node.forwarder.orders.stacks == (3,))
    node.relay.cut()
    node.source.want(Orders(abort=True))
    time.sleep(0.1)
    node.relay.mend()
    node.until(lambda: node.forwarder.orders.abort)
    node.source.close()
    node.until(lambda: node.forwarder.orders.done)


def test_a_node_that_has_said_all_is_neither_lost_nor_out_of_sight(node):
    node.connect()
    node.until(lambda: not node.source.out_of_sight)
    end_steps(node.ranks[2], range(3))
    assert node.forwarder.finish(10)
    node.until(lambda: len(node.steps(2)) == 3)
    node.now_ns = time.monotonic_ns() + 2 * LOST_NS
    assert list(node.source.poll()) == []
    assert not node.source.lost
    assert not node.source.out_of_sight


def test_a_node_that_is_not_heard_any_more_is_lost_and_that_is_said_once(node):
    node.connect()
    node.until(lambda: not node.source.out_of_sight)
    node.forwarder.put(Exited(rank=2, seq=-1, time_ns=2))
    node.until(lambda: node.has(Exited))
    node.relay.hold()
    time.sleep(0.1)
    node.now_ns = time.monotonic_ns() + LOST_NS // 2
    assert node.source.out_of_sight == RankSet((3,))
    assert not node.source.lost
    node.now_ns += LOST_NS
    assert node.source.lost == RankSet((3,))
    reported, lost = node.source.poll()
    assert isinstance(reported, ProbeDisabled)
    assert (reported.rank, reported.probe) == (3, "event-file")
    assert "not heard of any more" in reported.reason
    assert isinstance(lost, NodeLost)
    assert (lost.rank, lost.hostname) == (3, socket.gethostname())
    assert lost.time_ns + int(lost.silent_s * SECOND) == pytest.approx(node.now_ns, abs=SECOND)
    assert list(node.source.poll()) == []
    node.now_ns = None
    node.relay.mend()
    node.until(lambda: not node.source.lost)


def test_at_the_end_it_is_said_whose_last_acts_are_not_known(node):
    assert [event.rank for event in node.source.give_up()] == [2, 3]
    assert list(node.source.give_up()) == []


def test_at_the_end_nothing_is_said_of_a_node_that_is_in_sight(node):
    node.connect()
    node.until(lambda: not node.source.out_of_sight)
    assert list(node.source.give_up()) == []


def test_a_node_that_never_connects_is_given_up_after_a_while(node):
    assert list(node.source.poll()) == []
    assert node.source.out_of_sight == RankSet((2, 3))
    node.now_ns = time.monotonic_ns() + CONNECT_NS + SECOND
    assert [event.rank for event in node.source.poll()] == [2, 3]
    assert node.source.lost == RankSet((2, 3))


def test_who_cannot_be_reached_keeps_what_it_has_and_says_why(node):
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    node.connect(ReporterAddress(host=host, port=port, token="t"))
    end_steps(node.ranks[2], range(3))
    assert not node.forwarder.finish(1)
    assert "refused" in node.forwarder.problem
    assert not node.forwarder.has_connected


def test_nobody_listens_at_an_address_that_is_not_this_machines():
    with pytest.raises(OSError, match="assign"):
        TcpSource("192.0.2.1", (2, 3), Interner())
