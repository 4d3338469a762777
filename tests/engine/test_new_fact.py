"""A new fact is an event, an aligner with its view, and a check: nothing else is edited."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

import distdiag.engine
from distdiag.checks.base import Check
from distdiag.engine.aligner import find_aligners
from distdiag.events.base import Event
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Evidence, Severity
from distdiag.views.base import View
from tests.engine.aligned import engine_of

MODULE = """
from distdiag.engine.aligner import Aligner, NothingThere
from tests.engine.test_new_fact import Temperature, TemperatureView


class TemperatureAligner(Aligner):
    needs = (Temperature,)
    builds = (TemperatureView,)

    def __init__(self, job):
        super().__init__(job)
        self._by_rank = {}

    def feed(self, event):
        self._by_rank[event.rank] = event.celsius
        if self._by_rank.keys() == set(self.job.world):
            yield TemperatureView(dict(self._by_rank))

    def gaps(self):
        nothing = NothingThere("temperatures", "no temperature was read")
        return {} if self._by_rank else {TemperatureView: nothing}
"""


class Temperature(Event, frozen=True, kw_only=True):
    """How hot the device of a rank is."""

    celsius: int


@dataclass(frozen=True, slots=True)
class TemperatureView(View):
    """How hot the devices of all ranks are."""

    by_rank: Mapping[int, int]

    @property
    def supersedes(self):
        return "temperature"


class HotDevice(Check[TemperatureView]):
    """A device is hot."""

    code, name, severity = "XXX001", "hot-device", Severity.WARNING

    def check(self, view):
        hot = RankSet(rank for rank, celsius in view.by_rank.items() if celsius > 90)
        if hot:
            evidence = (Evidence(ranks=hot, summary="above 90 degrees"),)
            yield self.finding("hot", ranks=hot, evidence=evidence)


class Failing(HotDevice):
    """Fails at every view."""

    code = "XXX002"

    def check(self, view):
        raise KeyError("celsius")


@pytest.fixture(autouse=True)
def aligner(tmp_path, monkeypatch):
    """A module of the engine that defines the aligner."""
    (tmp_path / "temperatures.py").write_text(MODULE)
    monkeypatch.setattr(distdiag.engine, "__path__", [*distdiag.engine.__path__, str(tmp_path)])
    find_aligners.cache_clear()
    yield
    find_aligners.cache_clear()
    sys.modules.pop("distdiag.engine.temperatures", None)
    vars(distdiag.engine).pop("temperatures", None)


def read(*celsius):
    return [
        Temperature(rank=rank, seq=0, time_ns=0, celsius=each) for rank, each in enumerate(celsius)
    ]


def test_its_check_finds():
    (finding,) = engine_of(*read(60, 95), checks=[HotDevice()]).findings
    assert (finding.code, finding.ranks) == ("XXX001", RankSet([1]))


def test_a_view_that_is_shown_again_replaces_what_was_found():
    assert not engine_of(*read(60, 95), *read(60, 80), checks=[HotDevice()]).findings


def test_its_gap_is_reported():
    engine = engine_of(checks=[HotDevice()])
    assert engine.not_checked == {"XXX001": "no temperature was read"}
    assert not engine_of(*read(60, 80), checks=[HotDevice()]).not_checked


def test_a_crash_of_its_check_is_reported_and_ends_nothing():
    engine = engine_of(*read(60, 95), *read(60, 95), checks=[Failing(), HotDevice()])
    assert [finding.code for finding in engine.findings] == ["DIA001", "XXX001"]
    assert engine.not_checked == {"XXX002": "the check crashed: KeyError: 'celsius'"}
    assert engine.checked == ("XXX001",)
