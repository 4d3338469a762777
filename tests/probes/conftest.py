from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from distdiag.config import Config
from distdiag.events.base import Event
from distdiag.events.collectives import Collective, CollectiveState
from distdiag.events.files import FileAccess, FileClosed
from distdiag.probes.base import Probe
from distdiag.probes.catalogue import Wiring, find_probes
from distdiag.probes.process.exceptions import ExceptionProbe
from distdiag.record.event_reader import EventReader
from distdiag.record.recorder import Recorder
from distdiag.record.signals import Signals
from distdiag.record.status_page import StatusPage
from distdiag.record.wire import EventDecoder, Interner

E = TypeVar("E", bound=Event)


@dataclass
class Observed:
    """A recorder with probes, and what they have written so far."""

    wiring: Wiring
    folder: Path
    probes: list[Probe] = field(default_factory=list)

    @property
    def recorder(self) -> Recorder:
        """What the probes write with."""
        return self.wiring.recorder

    @property
    def signals(self) -> Signals:
        """What the probes tell each other by."""
        return self.wiring.signals

    def install(self, *names: str, **config: Any) -> list[Probe]:
        """Install the probes of these names; if none is named, all that nothing is missing for."""
        there = [spec for spec in find_probes() if sys.modules.keys() >= set(spec.needs)]
        specs = [spec for spec in find_probes() if spec.name in names] if names else there
        self.wiring.config = Config(**config)
        made = [probe for spec in specs for probe in spec.make(self.wiring)]
        if not names:
            made.append(ExceptionProbe(self.recorder, after_raise=lambda: None))
        for probe in made:
            probe.install()
            self.probes.append(probe)
        return made

    def uninstall(self) -> None:
        """Take all hooks away."""
        while self.probes:
            self.probes.pop().uninstall()

    def events(self, kind: type[E] = Event) -> list[E]:  # type: ignore[assignment]
        """Return the events of a kind, as the monitor would read them."""
        decoder = EventDecoder(self.recorder.rank, Interner())
        found = [decoder.decode(p) for p in EventReader(self.folder, 0).payloads()]
        return [event for event in found if isinstance(event, kind)]

    def calls(self) -> list[Collective]:
        """Return the collectives."""
        return self.events(Collective)

    def states(self, call: Collective) -> list[str]:
        """Return what became of one collective."""
        return [s.state for s in self.events(CollectiveState) if s.call == call.seq]

    def accesses(self, folder: Path) -> list[FileAccess]:
        """Return the accesses to what lies in a folder."""
        inside = f"{folder}/"
        return [access for access in self.events(FileAccess) if access.path.startswith(inside)]

    def said(self, folder: Path) -> list[tuple[str, str]]:
        """Return the actions and the names of the accesses to what lies in a folder."""
        return [
            (access.action.value, str(Path(access.path).relative_to(folder)))
            for access in self.accesses(folder)
        ]

    def end(self, access: FileAccess) -> FileClosed | None:
        """Return the end of an access, None while it has none."""
        return next((e for e in self.events(FileClosed) if e.access == access.seq), None)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the user's, beside the recorder's own, that is the current one."""
    return tmp_path_factory.mktemp("data").resolve()


@pytest.fixture
def observed(tmp_path: Path) -> Iterator[Observed]:
    page = StatusPage(tmp_path / "rank-0.status")
    signals = Signals()
    recorder = Recorder(tmp_path, 0, page, main_script=__file__, before_sync=signals.before_sync)
    result = Observed(Wiring(recorder, signals, Config()), tmp_path)
    yield result
    result.uninstall()


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Two ranks, of which only this one exists: nothing is ever sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def lone_group() -> Iterator[None]:
    """A real gloo group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
