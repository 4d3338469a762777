"""What the script's own handlers raise is the script's, wherever it strikes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import ClassVar

import pytest

from distdiag.events.lifecycle import ProbeDisabled
from distdiag.probes.base import Probe
from tests.probes.conftest import Observed


class Told(Exception):
    """What the script raises when it is told to stop."""


def stop(number: int, frame: FrameType | None) -> None:
    raise Told


class Stopper:
    def stop(self, number: int, frame: FrameType | None) -> None:
        raise Told


class Interrupted(Probe):
    name: ClassVar[str] = "interrupted"

    def _install(self) -> None:
        return

    def observe(self) -> None:
        try:
            signal.raise_signal(signal.SIGALRM)
        except Exception as error:  # noqa: BLE001 (as probes do)
            self.fail(error)


@pytest.fixture(params=[stop, Stopper().stop], ids=["function", "method"])
def handler(request: pytest.FixtureRequest) -> Iterator[None]:
    # Set before any agent is there, or by C: `signal.signal` was not seen.
    before = signal.signal(signal.SIGALRM, request.param)
    yield
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("handler")
def test_what_a_handler_raises_goes_to_the_script_and_the_probe_stays_on(
    observed: Observed,
) -> None:
    probe = Interrupted(observed.recorder)
    with pytest.raises(Told):
        probe.observe()
    assert not probe.is_off
    assert observed.events(ProbeDisabled) == []


def test_what_the_probe_itself_raises_switches_it_off(observed: Observed) -> None:
    probe = Interrupted(observed.recorder)
    probe.fail(ValueError("its own"))
    assert probe.is_off
    (event,) = observed.events(ProbeDisabled)
    assert event.reason == "ValueError: its own"
