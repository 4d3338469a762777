from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distdiag.events.files import FileAccess, HostSynced
from distdiag.events.lifecycle import ProbeDisabled
from tests.probes.conftest import Observed


class Device:
    """A device that is done with what streams waited for when it is told so."""

    is_done = False
    is_capturing = False
    num_asked = 0

    device_index = stream_id = 0

    def record(self, stream: object) -> None:
        assert not self.is_capturing

    def query(self) -> bool:
        assert not self.is_capturing
        self.num_asked += 1
        return self.is_done


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.is_capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: made)
    monkeypatch.setattr(torch.cuda, "Event", lambda: made)
    return made


@pytest.fixture
def watched(observed: Observed) -> Observed:
    observed.install("files", "host-waits")
    return observed


def seen(observed: Observed) -> list[str]:
    """Return what was written down of one file and of the device, in its order."""
    events = observed.events()
    assert not [event for event in events if isinstance(event, ProbeDisabled)]
    return [
        event.api
        for event in events
        if isinstance(event, HostSynced)
        or (isinstance(event, FileAccess) and event.path.endswith("data.txt"))
    ]


def test_a_device_that_is_done_is_reported_before_the_access(
    device: Device, watched: Observed, folder: Path
) -> None:
    path = folder / "data.txt"
    watched.signals.work_waited.emit()
    path.write_text("behind")
    device.is_done = True
    for _ in range(2):
        path.read_text()
    assert seen(watched) == ["start", "open", "torch.cuda.Event.query", "open"]


def test_it_is_reported_before_other_ranks_are_reported_anything(
    device: Device, watched: Observed
) -> None:
    watched.signals.work_waited.emit()
    device.is_done = True
    watched.signals.before_sync.emit(False)
    assert seen(watched) == ["start"]  # what runs on the device comes after all of that anyway
    assert not device.num_asked
    watched.signals.before_sync.emit(True)
    assert seen(watched) == ["start", "torch.cuda.Event.query"]


def test_without_a_wait_nothing_is_asked(device: Device, watched: Observed, folder: Path) -> None:
    (folder / "data.txt").write_text("x")
    assert seen(watched) == ["start", "open"]
    assert device.num_asked == 0


def test_a_graph_that_is_recorded_is_not_disturbed(
    device: Device, watched: Observed, folder: Path
) -> None:
    watched.signals.work_waited.emit()
    device.is_capturing = True
    watched.signals.work_waited.emit()
    (folder / "data.txt").write_text("x")
    assert seen(watched) == ["start", "open"]


def test_a_build_without_a_device_observes_nothing(watched: Observed) -> None:
    if torch.version.cuda is None:
        watched.signals.work_waited.emit()
        assert seen(watched) == []
