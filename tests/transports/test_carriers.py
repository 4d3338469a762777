"""Carriers bring what they are given to one place, or end in time and say why not."""

import os
import time
from pathlib import Path

import pytest

from distdiag.transports.carriers import CarriageError, Carriers, plan_carriage

pytestmark = pytest.mark.timeout(180)

PLENTY_S = 120.0


def wait(*carriers):
    deadline = time.monotonic() + 150
    while not all([each.is_over for each in carriers]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def carry(folder, groups, payloads, *, deadline_s=PLENTY_S, backend="gloo"):
    """Carry over as many machines as there are groups; return what each of them got."""
    carriage, meeting = plan_carriage("127.0.0.1", groups, backend=backend, deadline_s=deadline_s)
    nodes = [
        Carriers(folder / str(n), carriage, group, meeting=None if n else meeting)
        for n, group in enumerate(groups)
    ]
    for node in nodes:
        node.load(payloads)
    wait(*nodes)
    return nodes


@pytest.mark.slow
def test_the_first_machine_gets_everything_and_the_others_nothing(tmp_path):
    payloads = {0: b"zero", 1: os.urandom(3_000_000), 2: b"", 3: b"three" * 1000}
    nodes = carry(tmp_path, [(0, 1), (2,), (3,)], payloads)
    assert [node.result() for node in nodes] == [payloads, {}, {}]


def test_one_machine_may_have_a_carrier_for_each_rank(tmp_path):
    carriage, meeting = plan_carriage(
        "127.0.0.1", [(), (4,), (5,)], backend="gloo", deadline_s=PLENTY_S
    )
    carriers = Carriers(tmp_path, carriage, (4, 5), meeting=meeting)
    carriers.load({4: b"four", 5: b"five"})
    wait(carriers)
    assert carriers.result() == {4: b"four", 5: b"five"}
    assert sorted(path.name for path in tmp_path.glob("parcel*")) == [
        "parcel-0",
        "parcel-1",
        "parcel-2",
    ]


def test_a_carrier_that_does_not_come_costs_no_more_than_the_deadline(tmp_path):
    carriage, meeting = plan_carriage("127.0.0.1", [(0,), (1,)], backend="gloo", deadline_s=3.0)
    carriers = Carriers(tmp_path, carriage, (0,), meeting=meeting)
    carriers.load({0: b"zero"})
    wait(carriers)
    with pytest.raises(CarriageError, match=r"within 3 s|Error"):
        carriers.result()


def test_a_carrier_that_gets_no_parcel_is_ended(tmp_path):
    carriage, meeting = plan_carriage("127.0.0.1", [(0,)], backend="gloo", deadline_s=2.0)
    carriers = Carriers(tmp_path, carriage, (0,), meeting=meeting)
    wait(carriers)
    with pytest.raises(CarriageError, match="was not done within 2 s"):
        carriers.result()


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="needs no GPU here")
def test_without_a_usable_backend_the_reason_is_reported(tmp_path):
    carriage, meeting = plan_carriage("127.0.0.1", [(0,)], backend="nccl", deadline_s=PLENTY_S)
    carriers = Carriers(tmp_path, carriage, (0,), meeting=meeting)
    carriers.load({0: b"zero"})
    wait(carriers)
    with pytest.raises(CarriageError, match=r"a carrier ended with .*no GPU here"):
        carriers.result()


def test_the_port_is_open_at_one_address_only():
    _, meeting = plan_carriage("127.0.0.1", [(0,)], backend="gloo", deadline_s=1.0)
    with meeting:
        assert meeting.getsockname()[0] == "127.0.0.1"
    with pytest.raises(OSError, match="assign"):
        plan_carriage("192.0.2.1", [(0,)], backend="gloo", deadline_s=1.0)
