import pytest

from distdiag.checks.shd.indivisible_dimension import IndivisibleDimension
from distdiag.events.models import Mesh, PlanSource
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import plan
from tests.checks.plans import fault, pattern, program, rules
from tests.checks.verdicts import findings


def tensor(axis, length):
    return plan("w", shape=(length, 8), placements=("S(0)",), mesh=Mesh((axis,), (2,), (0, 1)))


def uneven(axis, length):
    return findings(
        IndivisibleDimension, rules({"w": f"Shard(0) over {axis}"}, tensor(axis, length))
    )


def test_experts_that_the_axis_does_not_divide():
    (finding,) = uneven("ep", 7)
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "says Shard(0) over ep, but 7 is no multiple of ep=2" in finding.message


def test_uneven_parts_over_ranks_of_tensor_parallelism_are_a_note():
    (finding,) = uneven("tp", 7)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(("axis", "length"), [("ep", 8), ("tp", 8), ("dp_shard", 7)])
def test_even_parts_and_axes_that_allow_others_are_silent(axis, length):
    assert not uneven(axis, length)


def test_a_dimension_that_the_tensor_lacks_is_left_to_other_checks():
    assert not findings(IndivisibleDimension, rules({"w": "Shard(3) over ep"}, tensor("ep", 7)))


def test_heads_that_a_program_cuts():
    cut = fault("uneven", "wk", "3 heads of 4 cannot be split over 2 ranks")
    (finding,) = findings(IndivisibleDimension, program(pattern("wk", faults=[cut])))
    assert finding.severity is Severity.WARNING
    assert "3 heads of 4 cannot be split over 2 ranks" in finding.message
    view = program(pattern("wk", faults=[cut]), source=PlanSource.TRANSFORMERS)
    (finding,) = findings(IndivisibleDimension, view)
    assert finding.severity is Severity.INFO
    assert not findings(IndivisibleDimension, program(pattern("wk", faults=[fault("clash")])))
