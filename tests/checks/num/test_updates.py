"""Checks of what optimizer steps change, and in which types."""

from dataclasses import replace

import pytest

from distdiag.checks.num.exploding_gradient import ExplodingGradient
from distdiag.checks.num.lost_update import LostUpdate
from distdiag.checks.num.module_imbalance import ModuleImbalance
from distdiag.checks.num.narrow_optimizer_state import NarrowOptimizerState
from distdiag.checks.num.type_mismatch import TypeMismatch
from distdiag.checks.num.vanished_gradient import VanishedGradient
from distdiag.config.numerics import NumericsConfig
from distdiag.findings.finding import Severity
from tests.checks.updates import look, looks, moving, tensor, view
from tests.checks.verdicts import findings


def severities(check, shown):
    return [each.severity for each in findings(check, shown)]


def test_a_parameter_that_no_step_moves_is_named_with_the_reason():
    (found,) = findings(LostUpdate, view(looks(tensor(), moving())))
    assert found.severity is Severity.WARNING
    assert found.subjects == ("norm.weight",)
    assert found.step == 1
    assert "are 0.0078 apart, and the mean update is 0.0001" in found.message


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(looks(tensor(), numbers=(0, 1, 2)), id="too few looks"),
        pytest.param(looks(moving()), id="it moves"),
        pytest.param(looks(tensor(num_unchanged=63)), id="an element moves"),
        pytest.param(looks(tensor(num_moved=9)), id="it moved between looks"),
        pytest.param(looks(tensor(keeps_precision=True)), id="another copy"),
        pytest.param(looks(tensor(), keeps_copies=True), id="copies in the optimizer"),
        pytest.param(looks(tensor(learning_rate=0.0)), id="a group that rests"),
        pytest.param(looks(tensor(), rate=0.0), id="no rate"),
        pytest.param(looks(tensor(), full_rate=1e-3), id="low on purpose"),
        pytest.param(
            tuple(look(number, rate=1e-6 * (number + 1)) for number in (0, 1, 2, 4)), id="warm-up"
        ),
        pytest.param(looks(tensor(num_sampled=0, num_unchanged=0)), id="no gradient"),
    ],
)
def test_what_stays_for_another_reason_is_not_lost(history):
    assert not findings(LostUpdate, view(history))


@pytest.mark.parametrize(
    "history",
    [
        pytest.param(looks(tensor(), rounds_to_nearest=False), id="too few expected"),
        pytest.param(
            looks(
                tensor(expected_changes=9.0, num_small_changed=8),
                tensor("other.weight", num_small_changed=20),
                rounds_to_nearest=False,
            ),
            id="stochastic rounding",
        ),
        pytest.param(
            looks(tensor(gradient_norm=1e-6), moving(gradient_norm=1.0)), id="rounding noise"
        ),
        pytest.param(
            (look(0, tensor(gradient_norm=100.0)), *looks(tensor(), numbers=(1, 2, 4, 8))),
            id="at its end",
        ),
        pytest.param(looks(moving(num_unchanged=64, num_moved=0)), id="float32"),
    ],
)
def test_what_may_be_meant_is_a_note(history):
    assert severities(LostUpdate, view(history)) == [Severity.INFO]


def test_an_unknown_optimizer_is_judged_by_what_stochastic_rounding_would_do():
    history = looks(tensor(expected_changes=4.0), rounds_to_nearest=False)
    assert severities(LostUpdate, view(history)) == [Severity.WARNING]


def test_narrow_state_is_a_warning_only_if_updates_are_lost():
    assert severities(NarrowOptimizerState, view(looks(tensor()))) == [Severity.WARNING]
    moves = looks(tensor(num_unchanged=0, num_moved=64))
    assert severities(NarrowOptimizerState, view(moves)) == [Severity.INFO]
    assert not findings(NarrowOptimizerState, view(looks(moving())))


def test_types_that_differ_between_ranks_are_named():
    shown = view(looks(moving()), looks(moving()), looks(moving(state=(("exp_avg", "bfloat16"),))))
    (found,) = findings(TypeMismatch, shown)
    assert found.ranks == {2}
    assert "exp_avg in bfloat16 on rank 2" in found.message
    assert not findings(TypeMismatch, view(looks(moving()), looks(moving())))
    assert not findings(TypeMismatch, view(looks(moving()), looks(moving("other.weight"))))


def test_a_rank_whose_part_is_empty_has_no_type_that_differs():
    own = moving(state=(("exp_avg", "float32"),))
    assert not findings(TypeMismatch, view(looks(moving()), looks(own)))


def test_gradients_that_were_always_zero_are_a_warning():
    none = looks(moving(gradient_norm=0.0))
    assert severities(VanishedGradient, view(none, none)) == [Severity.WARNING]
    assert not findings(VanishedGradient, view(none, looks(moving())))
    assert not findings(VanishedGradient, view(none[:2]))
    later = (look(0, moving()), *looks(moving(gradient_norm=0.0), numbers=(1, 2, 4)))
    (found,) = findings(VanishedGradient, view(later))
    assert found.severity is Severity.INFO
    assert "at step 0, so the loss may have reached its minimum" in found.evidence[0].summary


def test_gradients_that_grow_are_a_warning_and_large_ones_a_note():
    norms = (1.0, 20.0, 500.0, 9000.0)
    grown = tuple(look(n, moving(gradient_norm=norm)) for n, norm in enumerate(norms))
    assert severities(ExplodingGradient, view(grown)) == [Severity.WARNING]
    assert not findings(ExplodingGradient, view(grown[:3]))
    large = looks(moving(gradient_norm=5000.0))
    (found,) = findings(ExplodingGradient, view(large))
    assert (found.severity, found.fix[:7]) == (Severity.INFO, "Nothing")
    assert "becomes inf" not in found.why
    allowed = replace(view(large), numerics=NumericsConfig(largest_gradient_norm=1e4))
    assert not findings(ExplodingGradient, allowed)


def test_modules_out_of_proportion_are_a_note():
    uneven = looks(moving("encoder.weight", gradient_norm=1e-3), moving(gradient_norm=1.0))
    (found,) = findings(ModuleImbalance, view(uneven))
    assert found.severity is Severity.INFO
    assert found.subjects == ("head", "encoder")
    assert not findings(ModuleImbalance, view(looks(moving("encoder.weight"), moving())))
