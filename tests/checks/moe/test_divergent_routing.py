from distdiag.checks.moe.divergent_routing import DivergentRouting
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.routing import divergence, routing, view
from tests.checks.verdicts import findings


def judged(*divergences):
    return findings(DivergentRouting, view(routing(), divergences=divergences))


def test_ranks_that_send_the_same_tokens_elsewhere_are_named():
    (finding,) = judged(divergence(), divergence(layer="layers.1.gate"))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert finding.subjects == ("layers.0.gate", "layers.1.gate")
    assert "by different scores: 2 of 8 choices" in finding.message


def test_equal_scores_are_said_and_need_no_common_model():
    (finding,) = judged(divergence(members=(), scores="equal"))
    assert finding.severity is Severity.WARNING
    assert "with equal scores" in finding.message


def test_models_that_may_be_different_ones_are_a_note():
    (finding,) = judged(divergence(members=()))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)


def test_ranks_that_route_alike_are_silent():
    assert not judged()
