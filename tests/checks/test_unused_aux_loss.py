import pytest

from distdiag.checks.unused_aux_loss import UnusedAuxLoss
from distdiag.finding import Grade, Severity
from tests.checks.routing import aux_loss, view


def judged(*steps, **values):
    aux = [aux_loss(rank, step, **{**values, **each}) for step, each in steps for rank in (0, 1)]
    return list(UnusedAuxLoss().check_routing(view(aux=aux)))


def test_a_loss_whose_injection_is_thrown_away_is_found():
    (finding,) = judged((0, {}), (1, {}), num_injected=2)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "balancing loss of layers.0.gate beside a tensor" in finding.message
    assert list(finding.ranks) == [0, 1]


def test_a_loss_with_a_coefficient_that_nothing_adds_is_found():
    (finding,) = judged((0, {}), (1, {}), coefficient="aux_loss_coef = 0.01")
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "which has aux_loss_coef = 0.01, is computed" in finding.message


@pytest.mark.parametrize("values", [{"num_injected": 2}, {"coefficient": "alpha_aux = 1"}], ids=str)
def test_a_loss_that_is_used_in_a_step_is_right(values):
    assert not judged((0, {}), (1, {"num_used": 1}), **values)


def test_a_number_may_be_meant_for_the_log():
    (finding,) = judged((0, {}), (1, {}))
    assert finding.grade is Grade.NOTE


def test_one_step_is_a_note():
    (finding,) = judged((0, {}), num_injected=2)
    assert finding.grade is Grade.NOTE


def test_layers_are_told_together():
    (finding,) = judged(*((0, {"layer": f"layers.{n}"}) for n in range(5)), num_injected=2)
    assert "layers.0, layers.1, layers.2 and 2 more" in finding.message


def test_routing_without_a_balancing_loss_is_silent():
    assert not judged()
