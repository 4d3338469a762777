"""Evidence of a hang comes by the way that was asked for, and by the next one when that fails."""

import time

import pytest

from distdiag.events.base import Frame
from distdiag.events.ranks import RankSet
from distdiag.events.stacks import Observed, Stacks, ThreadStack
from distdiag.monitor import dump_transport
from distdiag.monitor.dump_transport import DumpTransporter
from distdiag.record.run_dir import ReporterAddress
from distdiag.record.wire import Interner
from distdiag.transports.frames import Orders

pytestmark = pytest.mark.timeout(180)


def seen(rank):
    frames = (Frame("train.py", 3, "main"),)
    stacks = Stacks(
        rank=rank,
        seq=-1,
        time_ns=5,
        source="py-spy",
        threads=(ThreadStack("MainThread", frames),),
    )
    return stacks, Observed(rank=rank, seq=-1, time_ns=6, source="proc", values={"rss_bytes": 7})


class Others:
    """Two other nodes, of which the reporter knows; what they are told is kept."""

    address = ReporterAddress(host="127.0.0.1", port=1, token="t")
    nodes = (RankSet((2, 3)), RankSet((4, 5)))
    ranks = RankSet((2, 3, 4, 5))

    def __init__(self):
        self.orders = []

    def want(self, orders):
        self.orders.append(orders)


def transporter(folder, choice, others=None):
    return DumpTransporter(folder, choice, RankSet((0, 1)), others, Interner())


def until_carried(made):
    deadline = time.monotonic() + 150
    events = []
    while not events:
        assert time.monotonic() < deadline
        time.sleep(0.02)
        events += made.poll()
    return events


@pytest.mark.parametrize("choice", ["auto", "tcp", "files"])
def test_one_node_needs_no_transport(tmp_path, choice):
    made = transporter(tmp_path, choice)
    assert made.ask((0, 1)) == RankSet((0, 1))
    assert made.pass_on(seen(0)) == seen(0)
    assert list(made.poll()) == []
    assert made.way == ""


def test_each_rank_is_to_be_seen_once_for_each_time_that_it_is_wanted(tmp_path):
    others = Others()
    made = transporter(tmp_path, "tcp", others)
    assert [made.ask(ranks) for ranks in ((0, 2), (0, 2), (2,), (), (0,))] == [
        RankSet((0,)),
        RankSet(),
        RankSet(),
        RankSet(),
        RankSet((0,)),
    ]
    assert [orders.stacks for orders in others.orders] == [(0, 2), (0, 2), (2,), (), (0,)]


def test_one_node_with_a_carrier_for_each_rank_takes_the_way_of_several(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_transport, "usable_backend", lambda: "gloo")
    monkeypatch.setattr(dump_transport, "CARRY_S", 120.0)
    made = transporter(tmp_path, "nccl")
    events = (*seen(0), *seen(1))
    made.ask((0, 1))
    assert made.pass_on(events) == ()
    assert made.way == ""
    assert sorted(until_carried(made), key=lambda e: (e.rank, e.time_ns)) == list(events)
    assert made.way == "gloo"
    assert list(tmp_path.iterdir()) == []


def test_what_carriers_did_not_bring_is_used_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_transport, "usable_backend", lambda: "gloo")
    monkeypatch.setattr(dump_transport, "CARRY_S", 0.2)
    made = transporter(tmp_path, "nccl")
    made.ask((0,))
    assert made.pass_on(seen(0)) == ()
    assert until_carried(made) == list(seen(0))
    assert "carriers: " in made.way


def test_one_carrier_for_each_node_or_for_each_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_transport, "usable_backend", lambda: "nccl")
    monkeypatch.setattr(dump_transport, "CARRY_S", 1.0)
    groups = []
    for choice in ("auto", "nccl"):
        for ranks in ((0, 1, 2, 4, 5), (3,)):
            others = Others()
            made = transporter(tmp_path / choice, choice, others)
            made.ask(ranks)
            groups.append(others.orders[-1].carriage.groups)
            made.close()
    assert groups == [
        ((0, 1), (2,), (4, 5)),
        ((), (3,)),
        ((0,), (1,), (2,), (4,), (5,)),
        ((), (3,)),
    ]


def test_without_gpus_several_nodes_use_tcp(tmp_path, monkeypatch):
    monkeypatch.setattr(dump_transport, "usable_backend", lambda: "gloo")
    others = Others()
    made = transporter(tmp_path, "auto", others)
    made.ask((0, 2))
    assert others.orders == [Orders((0, 2))]
    made.saw(seen(2)[0])
    assert made.way == "tcp"


def test_files_stay_where_they_are(tmp_path):
    others = Others()
    made = transporter(tmp_path, "files", others)
    made.ask((2,))
    assert others.orders == [Orders((2,), keep=True)]
    assert made.way.startswith("files")
