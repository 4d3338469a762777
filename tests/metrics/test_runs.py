"""Which files are ranks or attempts of one run, and which are runs of their own."""

from __future__ import annotations

import numpy as np

from distdiag.metrics.runs import runs_of
from tests.metrics.judging.healthy import curves_of

LOSS = np.linspace(3, 1, 100)
STEPS = np.arange(1, 101)


def part(name: str, begin: int, end: int, **more: int):
    """Return the steps after `begin` up to `end` of a run."""
    return curves_of({"loss": (STEPS[begin:end], LOSS[begin:end])}, name=name, **more)


def shape(*curves):
    """Return the name of each run with the rank and the attempt of each of its curves."""
    return {run.name: [(c.rank, c.attempt) for c in run.curves] for run in runs_of(curves)}


def test_files_of_ranks_are_one_run():
    found = shape(part("logs/r0.log", 0, 100, rank=0), part("logs/r1.log", 0, 100, rank=1))
    assert found == {"logs": [(0, 0), (1, 0)]}


def test_two_logs_that_begin_alike_are_two_runs():
    assert shape(part("a.log", 0, 100), part("b.log", 0, 80)) == {
        "a.log": [(None, 0)],
        "b.log": [(None, 0)],
    }


def test_a_log_that_goes_on_is_another_attempt():
    found = shape(part("x/train.1.log", 0, 60), part("x/train.2.log", 50, 100))
    assert found == {"x": [(None, 0), (None, 1)]}


def test_attempts_within_one_file_stay_apart():
    found = shape(part("a.log", 0, 60), part("a.log", 50, 100, attempt=1))
    assert found == {"a.log": [(None, 0), (None, 1)]}


def test_the_folders_of_torchrun_are_one_run():
    found = shape(
        *(
            part(f"logs/attempt_{attempt}/{rank}/stdout.log", 0, 50, rank=rank, attempt=attempt)
            for attempt in (0, 1)
            for rank in (0, 1)
        )
    )
    assert list(found.values()) == [[(0, 0), (1, 0), (0, 1), (1, 1)]]


def test_ranks_of_two_runs_in_two_folders_stay_apart():
    found = shape(
        *(part(f"{run}/rank{rank}.log", 0, 100, rank=rank) for run in ("a", "b") for rank in (0, 1))
    )
    assert found == {"a": [(0, 0), (1, 0)], "b": [(0, 0), (1, 0)]}


def test_names_get_longer_until_they_differ():
    assert set(shape(part("a/train.log", 0, 9), part("b/train.log", 0, 9))) == {
        "a/train.log",
        "b/train.log",
    }
