"""Tests of what functions of a program return, and of who asks for parts of tensors."""

import sys

import pytest

from distdiag.probes.parity.functions import Functions


class Layer:
    def forward(self):
        return "seen by its hook"

    def scale(self):
        return 2


def gather(x):
    return [part(x) for part in (abs, float)]


@pytest.fixture
def seen():
    found = []
    functions = Functions(__file__, lambda name, value, _: found.append((name, value)), print)
    functions.found = found
    yield functions
    functions.stop()


def test_what_functions_of_the_program_return_is_reported(seen):
    seen.watch_returns()
    gather(-1)
    Layer().forward()
    Layer().scale()
    seen.stop()
    gather(-2)
    assert seen.found == [("gather", [1, -1.0]), ("Layer.scale", 2)]
    assert sys.getprofile() is None


def test_a_profiler_of_the_program_goes_first(seen):
    def own(*_):
        return None

    sys.setprofile(own)
    try:
        seen.watch_returns()
        gather(1)
        assert sys.getprofile() is own
        seen.stop()
        assert sys.getprofile() is own
    finally:
        sys.setprofile(None)
    assert seen.found == []
