"""Tests of the walk over combinations of parallelism."""

from distdiag.parity.lattice import in_order, origins


def test_the_axis_that_differs_alone_is_the_origin_and_what_contains_it_is_not():
    found = origins({"ddp2": False, "tp2": True, "fsdp2": False, "fsdp2xtp2": True})
    assert [origin.label for origin in found] == ["tp2"]


def test_a_combination_may_be_the_origin():
    (found,) = origins({"tp2": False, "fsdp2": False, "fsdp2xtp2": True})
    assert found.phrase() == "fsdp2xtp2 brings the divergence in: tp2 and fsdp2 by themselves agree"


def test_nothing_differs_nothing_is_the_origin():
    assert origins({"tp2": False, "fsdp2xtp2": False}) == []


def test_two_axes_may_differ_each_by_itself():
    found = origins({"tp2": True, "fsdp2": True, "fsdp2xtp2": True})
    assert [origin.label for origin in found] == ["tp2", "fsdp2"]


def test_simple_configurations_run_first():
    assert in_order(["fsdp2xtp2", "tp2", "ddp2"]) == ["tp2", "ddp2", "fsdp2xtp2"]
