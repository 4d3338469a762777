import pytest

from distdiag.checks.shd.ambiguous_plan_pattern import AmbiguousPlanPattern
from distdiag.events.models import PlanSource
from distdiag.findings.finding import Severity
from tests.checks.models import plan
from tests.checks.plans import fault, pattern, program, rules
from tests.checks.verdicts import findings

TENSORS = [plan("a.experts.w"), plan("b.experts.w"), plan("a.gate")]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Shard(0) over ep", "Shard(1) over ep"),
        ("Shard(0) over ep", "Replicate over *"),
        ("Replicate over ep", "Shard(0) over ep, Shard(1) over tp"),
    ],
)
def test_rules_that_disagree_about_a_parameter(one, other):
    (finding,) = findings(AmbiguousPlanPattern, rules({"*": one, "*.experts.*": other}, *TENSORS))
    assert finding.severity is Severity.WARNING
    assert finding.subjects == ("a.experts.w", "b.experts.w")
    assert f'over ep two patterns of the [plan] table differ: "*" says {one}' in finding.message


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Shard(0) over ep", "Shard(1) over tp"),
        ("Shard(0) over ep", "Shard(-2) over ep"),
        ("Replicate over *", "Replicate over ep"),
    ],
)
def test_rules_that_say_the_same_or_of_other_axes_are_silent(one, other):
    assert not findings(AmbiguousPlanPattern, rules({"*": one, "*.experts.*": other}, *TENSORS))


def test_rules_that_share_no_parameter_are_silent():
    table = {"*.gate": "Replicate over ep", "*.experts.*": "Shard(0) over ep"}
    assert not findings(AmbiguousPlanPattern, rules(table, *TENSORS))


def test_a_pattern_of_a_program_that_comes_too_late():
    taken = fault("clash", "w", 'but "*" comes first')
    view = program(pattern("w", faults=[taken]), source=PlanSource.VEOMNI)
    (finding,) = findings(AmbiguousPlanPattern, view)
    assert finding.subjects == ("w",)
    assert 'but "*" comes first' in finding.message
    assert not findings(AmbiguousPlanPattern, program(pattern("w", faults=[fault("uneven")])))
