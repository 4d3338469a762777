"""What an optimizer holds when it is about to step; rank 0, 1, … differ from a healthy one."""

import pytest

from distdiag.checks.shd.counted_dummy_step import CountedDummyStep
from distdiag.checks.shd.forgotten_parameter import ForgottenParameter
from distdiag.checks.shd.missing_gradients import MissingGradients
from distdiag.checks.shd.optimizer_before_sharding import OptimizerBeforeSharding
from distdiag.checks.shd.stale_optimizer_state import StaleOptimizerState
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.models import optimizers
from tests.checks.verdicts import findings

NEW = {"forgotten": ("head.weight", "head.bias")}
REPLACED = {"num_foreign": 4, "replaced": ("layer.weight", "layer.bias")}
COPIED = {
    "num_without_gradient": 4,
    "num_idle": 2,
    "copied": ("layer.weight", "layer.bias"),
    "copied_model": "DDP Net",
}
COUNTED = {"num_steps": 1, "num_zero_steps": 1, "least_count": 1, "greatest_count": 1}
EMPTY = {"num_without_gradient": 4, "num_gradients": 0}
SKIPPED = {**EMPTY, "was_fed": True, "num_idle": 1}
STALE = {
    "num_stale_states": 4,
    "num_stateless": 2,
    "stateless": ("layer.weight", "layer.bias"),
    "num_parameters": 2,
}


@pytest.mark.parametrize(
    ("check", "changes", "ranks", "subjects", "grade", "words"),
    [
        (
            CountedDummyStep,
            [COUNTED, COUNTED],
            [0, 1],
            ("AdamW",),
            Grade.LIKELY,
            "AdamW counts 1 steps, 1 of them with gradients that were all zero",
        ),
        (
            ForgottenParameter,
            [{}, NEW, NEW],
            [1, 2],
            ("head.weight", "head.bias"),
            Grade.LIKELY,
            "head.weight and 1 more have gradients, but no optimizer holds them",
        ),
        (
            MissingGradients,
            [EMPTY, EMPTY],
            [0, 1],
            ("AdamW",),
            Grade.PROVEN,
            "AdamW steps on ranks 0-1 though none of its 4 parameters",
        ),
        (
            OptimizerBeforeSharding,
            [COPIED, {}],
            [0],
            ("layer.weight", "layer.bias"),
            Grade.PROVEN,
            "AdamW holds 4 parameters that have no gradient; layer.weight and 1 more of DDP Net, "
            "another copy of the same model, have gradients, but no optimizer holds them on rank 0",
        ),
        (
            OptimizerBeforeSharding,
            [REPLACED, REPLACED],
            [0, 1],
            ("layer.weight", "layer.bias"),
            Grade.PROVEN,
            "AdamW holds 4 parameters that are no longer in any model; layer.weight and 1 more "
            "have gradients, but no optimizer holds them",
        ),
        (
            OptimizerBeforeSharding,
            [{}, REPLACED],
            [1],
            ("layer.weight", "layer.bias"),
            Grade.PROVEN,
            "AdamW holds 4 parameters",
        ),
        (
            StaleOptimizerState,
            [{}, STALE, STALE],
            [1, 2],
            ("layer.weight", "layer.bias"),
            Grade.PROVEN,
            "AdamW keeps state for 4 parameters that it does not hold, and has no state for "
            "layer.weight and 1 more",
        ),
        (
            StaleOptimizerState,
            [{**STALE, "num_stale_states": 2}],  # as many as parameters: all of them
            [0],
            ("layer.weight", "layer.bias"),
            Grade.PROVEN,
            "AdamW keeps state for 2 parameters",
        ),
    ],
)
def test_the_ranks_and_parameters_are_named(check, changes, ranks, subjects, grade, words):
    (finding,) = findings(check, optimizers(*changes))
    assert (finding.ranks, finding.subjects, finding.grade) == (RankSet(ranks), subjects, grade)
    assert finding.severity is check.severity
    assert finding.location.line == 40 + min(ranks)
    assert words in finding.message


SILENT = {
    "zeros: healthy": (CountedDummyStep, {}),
    "zeros: reset": (CountedDummyStep, {**COUNTED, "least_count": 0}),
    "zeros: without counter": (CountedDummyStep, {**COUNTED, "least_count": -1}),
    "zeros: none": (CountedDummyStep, {**COUNTED, "num_zero_steps": 0}),
    "zeros: always": (CountedDummyStep, {"num_steps": 3, "num_zero_steps": 3, "least_count": 3}),
    "forgotten: holds all": (ForgottenParameter, {}),
    "forgotten: left to another check": (ForgottenParameter, {**NEW, "replaced": ("head.weight",)}),
    "gradients: all": (MissingGradients, {}),
    "gradients: one has one": (MissingGradients, {"num_without_gradient": 3}),
    "gradients: another model has": (MissingGradients, {**EMPTY, "num_gradients": 2}),
    "gradients: no model's parameters": (MissingGradients, {**EMPTY, "num_foreign": 1}),
    "gradients: no backward": (MissingGradients, {**EMPTY, "num_backwards": 0}),
    "gradients: no parameters": (
        MissingGradients,
        {**EMPTY, "num_parameters": 0, "num_without_gradient": 0},
    ),
    "sharding: healthy": (OptimizerBeforeSharding, {}),
    "sharding: nothing was replaced": (OptimizerBeforeSharding, {"num_foreign": 2}),
    "state: healthy": (StaleOptimizerState, {}),
    "state: only stale": (StaleOptimizerState, {"num_stale_states": 4}),
    "state: only fresh": (StaleOptimizerState, {**STALE, "num_stale_states": 0}),
    "state: no parameters": (StaleOptimizerState, {"num_stale_states": 4, "num_parameters": 0}),
    "state: a part was replaced": (StaleOptimizerState, {**STALE, "num_parameters": 3}),
    "state: more parameters than stale": (StaleOptimizerState, {**STALE, "num_stale_states": 1}),
}


@pytest.mark.parametrize(("check", "change"), SILENT.values(), ids=SILENT)
def test_other_optimizers_are_silent(check, change):
    assert not findings(check, optimizers(change, change))


@pytest.mark.parametrize(
    "other", [{}, {**COUNTED, "num_zero_steps": 0}, {**COUNTED, "least_count": 0}], ids=str
)
def test_zeros_that_only_some_ranks_have_counted_came_from_their_data(other):
    assert not findings(CountedDummyStep, optimizers(COUNTED, other))
    assert not findings(CountedDummyStep, optimizers(other, COUNTED))


def test_the_one_rank_without_gradients_is_named_and_the_others_are_evidence():
    states = optimizers({}, EMPTY, {"num_without_gradient": 1})
    (finding,) = findings(MissingGradients, states)
    assert finding.ranks == RankSet([1])
    assert [each.ranks for each in finding.evidence[1:]] == [RankSet([0]), RankSet([2])]
    assert finding.evidence[2].summary == "3 of 4 parameters have a gradient"


@pytest.mark.parametrize(("num_idle", "severity"), [(1, Severity.INFO), (3, Severity.ERROR)])
def test_gradients_that_never_come_back_are_an_error_and_one_step_left_out_is_a_note(
    num_idle, severity
):
    change = {**SKIPPED, "num_idle": num_idle}
    (finding,) = findings(MissingGradients, optimizers(change, change))
    assert finding.severity is severity
