"""What the monitor keeps of a run does not grow with it, and what it forgets is no difference."""

import importlib.util
import sys
from pathlib import Path

import pytest

from distdiag.engine import bounded, evaluations, logged
from distdiag.engine.bounded import Filter, Forgotten, Recent, SinceFirst, Turns
from distdiag.engine.collectives import calls
from distdiag.engine.files import order, races
from distdiag.engine.losses import gradients
from distdiag.record.event_file import EventWriter

pytestmark = pytest.mark.timeout(120)

SCRIPT = Path(__file__).parents[2] / "scripts" / "simulate_week.py"
STEPS = 32


@pytest.fixture(scope="module")
def simulation():
    spec = importlib.util.spec_from_file_location("simulate_week", SCRIPT)
    module = sys.modules["simulate_week"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["simulate_week"]


@pytest.fixture
def small(monkeypatch):
    """Make all tables so small that a short run fills them."""
    begin = Recent.__init__

    def begin_small(self, most, what="", forgotten=None):
        begin(self, min(most, 16), what, forgotten)

    monkeypatch.setattr(Recent, "__init__", begin_small)
    monkeypatch.setattr(calls, "_MOST_IDLE", 8)
    monkeypatch.setattr(bounded, "_MOST_SITES", 16)
    monkeypatch.setattr(gradients, "_MOST_CALLS", 16)
    monkeypatch.setattr(logged, "MOST_KEPT", 16)
    monkeypatch.setattr(evaluations, "_MOST_READS", 16)
    monkeypatch.setattr(evaluations, "_MOST_WRITES", 16)
    monkeypatch.setattr(races, "_FEWEST_KEPT", 64)
    monkeypatch.setattr(races, "_MOST_LISTINGS", 64)
    monkeypatch.setattr(order, "_MOST_LOGGED", 128)
    monkeypatch.setattr(order, "_MOST_PUBLISHED", 64)
    monkeypatch.setattr(races.PathIndex.__init__, "__defaults__", (128,))
    monkeypatch.setitem(EventWriter.__init__.__kwdefaults__, "segment_bytes", 1 << 13)


def test_no_table_grows_with_the_run_and_planted_faults_are_found(simulation, small, tmp_path):
    week = simulation.Week(tmp_path, 2, list(simulation.KINDS))
    sizes = []
    for _ in range(3):
        for _ in range(STEPS):
            week.step()
        sizes.append(simulation.tables(week, "week"))
    first, second, third = sizes
    grown = {
        path: (first.get(path, 0), second.get(path, 0), third[path])
        for path in third
        # One more for each step of either rank would be twice that.
        if third[path] - second.get(path, 0) >= STEPS and second.get(path, 0) >= first.get(path, 0)
    }
    assert not grown, "\n".join(f"{path}: {sizes}" for path, sizes in grown.items())
    assert not week.alarms()
    assert {"BAR001", "COL003", "REP003"} <= week.plant().keys()
    assert any(what.startswith("older ") for what in week.engine.not_checked)


def test_a_table_forgets_what_was_not_used_for_longest_and_counts_it():
    forgotten = Forgotten()
    table = Recent(2, "models", forgotten)
    for name in ("a", "b", "a", "c"):
        table.of(name, list)
    assert list(table) == ["a", "c"]
    (reason,) = forgotten.reasons().values()
    assert "the newest 2 are kept, and 1 before" in reason


def test_what_began_before_it_was_forgotten_never_begins_again():
    table = SinceFirst(1)
    assert table.find("a", list) == []
    assert table.find("b", list) == []
    assert table.find("a", list) is None


def test_times_are_numbered_anew_only_if_all_ranks_were_as_far():
    turns = Turns(2, 1)
    assert [turns.next("a", 0), turns.next("a", 1), turns.next("a", 0)] == [0, 0, 1]
    turns.next("b", 0)
    turns.next("b", 1)
    assert turns.next("a", 1) is None
    assert turns.next("c", 0) == 0
    assert turns.next("b", 0) == 0


def test_after_a_gap_nothing_is_known_of_what_came_first():
    forgotten = Forgotten()
    turns, table = Turns(2, 9, forgotten=forgotten), SinceFirst(9, forgotten=forgotten)
    forgotten.has_gap = True
    assert turns.next("a", 0) is None
    assert table.find("a", list) is None


def test_a_filter_knows_all_that_was_added():
    known = Filter()
    assert "a" not in known
    for number in range(1000):
        known.add(number)
    assert all(number in known for number in range(1000))
    assert sum(number in known for number in range(1000, 2000)) < 10
