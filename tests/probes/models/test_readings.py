from __future__ import annotations

import pytest
import torch

from distdiag.events.base import CallSite
from distdiag.events.models import Content, ModelState, Moment
from distdiag.probes.models import snapshot as readings_module
from distdiag.probes.models.snapshot import Reading, Readings
from tests.probes.conftest import Observed
from tests.probes.sample_models import backward, network

ONE = Content("g1", 1, 1.0, 1.0, 1.0)


class Device:
    """Contents that come later, as those of a GPU do."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.is_ready = False
        self.num_guards = 0

    def take(self) -> list[tuple[object, ...] | None] | None:
        return [("g1", 1, 1.0, 1.0, 1.0)] * len(self.tensors) if self.is_ready else None

    def wait(self) -> list[tuple[object, ...] | None] | None:
        self.is_ready = True
        return self.take()

    def guard(self) -> None:
        self.num_guards += 1


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    made: list[Device] = []

    def contents(tensors: list[torch.Tensor]) -> Device:
        made.append(Device(tensors))
        return made[-1]

    monkeypatch.setattr(readings_module, "contents", contents)
    return made


def reading(step: int = 0) -> Reading:
    return Reading("Net", Moment.STEP, step, CallSite(()))


def test_on_a_cpu_contents_are_there_at_once() -> None:
    readings = Readings()
    readings.add(reading(), [torch.ones(3), None, torch.zeros(2)])
    (done,) = readings.take()
    assert [None if c is None else c.mean for c in done.contents] == [1.0, None, 0.0]
    assert not readings.take()


def test_what_is_not_read_yet_is_not_waited_for(devices: list[Device]) -> None:
    readings = Readings()
    readings.add(reading(), [None, torch.ones(1)])
    assert readings.take() == []

    devices[0].is_ready = True

    (done,) = readings.take()
    assert done.contents == [None, ONE]


def test_readings_keep_their_order(devices: list[Device]) -> None:
    readings = Readings()
    for step in (0, 1):
        readings.add(reading(step), [torch.ones(1)])
    devices[1].is_ready = True
    assert readings.take() == []

    devices[0].is_ready = True

    assert [done.step for done in readings.take()] == [0, 1]


def test_the_next_write_waits_for_all_that_is_being_read(devices: list[Device]) -> None:
    readings = Readings()
    for step in (0, 1):
        readings.add(reading(step), [torch.ones(1)])
    readings.guard()
    assert [device.num_guards for device in devices] == [1, 1]


def test_at_the_end_all_can_be_waited_for(devices: list[Device]) -> None:
    readings = Readings()
    readings.add(reading(), [torch.ones(1)])
    assert [done.contents for done in readings.wait()] == [[ONE]]
    assert not readings.wait()


def test_contents_that_come_late_belong_to_the_step_at_which_they_were_asked_for(
    observed: Observed, fake_group: None, devices: list[Device]
) -> None:
    observed.install("steps")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    backward(model)
    optimizer.step()
    assert not observed.events(ModelState)

    for device in devices:
        device.is_ready = True
    backward(model)

    states = [(s.moment, s.step) for s in observed.events(ModelState)]
    moments = (Moment.START, Moment.BACKWARD, Moment.GRADIENT, Moment.STEP)
    assert states == [(moment, 0) for moment in moments]
    assert all(device.num_guards for device in devices[:2])


def test_what_is_read_when_the_script_ends_is_still_reported(
    observed: Observed, fake_group: None, devices: list[Device]
) -> None:
    probes = observed.install("steps")
    backward(network())
    devices[0].is_ready = True

    for probe in probes:
        probe.flush()

    assert [state.moment for state in observed.events(ModelState)] == [Moment.START]
