from distdiag.checks.shd.forgotten_parameter import ForgottenParameter
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import optimizers
from tests.checks.verdicts import findings

NEW = {"forgotten": ("head.weight", "head.bias")}


def test_the_parameters_and_the_ranks_are_named():
    (finding,) = findings(ForgottenParameter, optimizers({}, NEW, NEW))
    assert (finding.ranks, finding.subjects) == (RankSet([1, 2]), ("head.weight", "head.bias"))
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.LIKELY)
    assert "head.weight and 1 more have gradients and no optimizer" in finding.message


def test_what_has_replaced_others_is_left_to_another_check():
    replaced = {**NEW, "replaced": ("head.weight",)}
    assert not findings(ForgottenParameter, optimizers(replaced, replaced))


def test_an_optimizer_that_holds_all_is_silent():
    assert not findings(ForgottenParameter, optimizers({}, {}))
