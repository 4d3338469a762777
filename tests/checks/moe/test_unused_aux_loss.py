import re

import pytest

from distdiag.checks.moe.unused_aux_loss import UnusedAuxLoss
from distdiag.events.base import CallSite, Frame
from distdiag.findings.finding import Grade, Severity
from distdiag.views.routing import AuxLossRouting
from tests.checks.routing import aux_loss, view
from tests.checks.verdicts import findings


def judged(*steps, num_steps=0, **values):
    aux = [aux_loss(rank, step, **{**values, **each}) for step, each in steps for rank in (0, 1)]
    return findings(UnusedAuxLoss, view(aux=aux, num_steps=num_steps, kind=AuxLossRouting))


THROWN = "def forward(weights, loss):\n    Inject.apply(\n        weights, loss\n    )\n"
RETURNED = "def inject(*tensors):\n    return Inject.apply(*tensors)\n\n\ninject(1, 2)\n"
KEPT = "def forward(self, weights, loss):\n    other = Inject.apply(weights, loss)\n"
HANDED_ON = "def forward(self, weights, loss):\n    self.outs.append(Inject.apply(weights, loss))\n"
FAR = ((0, {}), (99, {}), (400, {}))


def site_in(tmp_path, text, *lines):
    """A site of a file with this text; the innermost line comes first."""
    path = tmp_path / "model.py"
    path.write_text(text)
    names = [*re.findall(r"def (\w+)", text), "<module>"]
    frames = [
        Frame(str(path), line, name, user=True) for line, name in zip(lines, names, strict=False)
    ]
    return CallSite(tuple(frames))


@pytest.mark.parametrize(("text", "lines"), [(THROWN, (3,)), (RETURNED, (2, 5))])
def test_a_loss_whose_injection_is_thrown_away_is_found(tmp_path, text, lines):
    site = site_in(tmp_path, text, *lines)
    (finding,) = judged((0, {}), (1, {}), num_injected=2, site=site)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "a function got the auxiliary loss of layers.0.gate and a tensor" in finding.message
    assert list(finding.ranks) == [0, 1]


@pytest.mark.parametrize("text", [KEPT, HANDED_ON])
def test_an_injection_whose_result_may_be_used_later_is_a_note(tmp_path, text):
    site = site_in(tmp_path, text, 2)
    (finding,) = judged((0, {}), (1, {}), num_injected=2, site=site)
    assert finding.grade is Grade.NOTE


def test_a_loss_with_a_coefficient_may_be_added_later():
    (finding,) = judged((0, {}), (1, {}), (300, {}), coefficient="aux_loss_coef = 0.01")
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)
    assert "in the 3 sampled steps from 0 to 300" in finding.message


def test_a_loss_with_a_coefficient_that_nothing_adds_for_long_is_found():
    (finding,) = judged(*FAR, coefficient="aux_loss_coef = 0.01")
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "which has aux_loss_coef = 0.01, is computed" in finding.message


COEFFICIENT = {"coefficient": "aux_loss_coef = 0.01"}


@pytest.mark.parametrize("values", [COEFFICIENT, {"num_injected": 2}], ids=str)
def test_a_run_that_is_over_has_forgotten_the_loss(values):
    (finding,) = judged((0, {}), (5, {}), num_steps=6, **values)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert "in the 2 sampled steps from 0 to 5 of the 6 that" in finding.message


@pytest.mark.parametrize(
    ("last", "num_steps", "values"),
    [(3, 20, COEFFICIENT), (2, 3, COEFFICIENT), (19, 20, {})],
    ids=["begun", "short", "number"],
)
def test_the_end_of_a_run_may_tell_too_little(last, num_steps, values):
    (finding,) = judged((0, {}), (last, {}), num_steps=num_steps, **values)
    assert finding.grade is Grade.NOTE


@pytest.mark.parametrize("values", [{"num_injected": 2}, {"coefficient": "alpha_aux = 1"}], ids=str)
def test_a_loss_that_is_used_in_a_step_is_right(values):
    assert not judged((0, {}), (1, {"num_used": 1}), **values)


def test_a_number_may_be_meant_for_the_log():
    (finding,) = judged(*FAR)
    assert finding.grade is Grade.NOTE


def test_one_step_is_a_note():
    (finding,) = judged((0, {}), num_injected=2)
    assert finding.grade is Grade.NOTE


def test_layers_are_reported_together():
    (finding,) = judged(*((0, {"layer": f"layers.{n}"}) for n in range(5)), num_injected=2)
    assert "layers.0, layers.1, layers.2 and 2 more" in finding.message


def test_routing_without_an_auxiliary_loss_is_silent():
    assert not judged()
