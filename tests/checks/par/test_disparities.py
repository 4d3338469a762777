"""What differs between two runs is named by one check for each subject."""

import math

import msgspec
import pytest

from distdiag.checks.par.batch_dependence import BatchDependence
from distdiag.checks.par.data_disparity import DataDisparity
from distdiag.checks.par.gradient_disparity import GradientDisparity
from distdiag.checks.par.loss_disparity import LossDisparity
from distdiag.checks.par.output_disparity import OutputDisparity
from distdiag.checks.par.reordered_parts import ReorderedParts
from distdiag.checks.par.shard_wise_update import ShardWiseUpdate
from distdiag.checks.par.shared_gradient_factor import SharedGradientFactor
from distdiag.checks.par.start_disparity import StartDisparity
from distdiag.checks.par.update_disparity import UpdateDisparity
from distdiag.events.base import Frame
from distdiag.events.comparisons import Difference, Divergence, Reason, Subject
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.streams import event_of
from tests.checks.verdicts import findings

CHECKS = {
    Subject.DATA: DataDisparity,
    Subject.GRADIENT: GradientDisparity,
    Subject.LOSS: LossDisparity,
    Subject.OUTPUT: OutputDisparity,
    Subject.START: StartDisparity,
    Subject.UPDATE: UpdateDisparity,
}
LARGE = Difference(name="Net/layers.1.weight", measured=0.5, bound=0.001, ratio=500.0, factor=2.0)


def divergence(subject, *, difference=LARGE, culprits=(), explanation="", step=3, **more):
    more.setdefault("differences", () if subject is Subject.DATA else (difference,))
    return event_of(
        Divergence,
        step=step,
        subject=subject,
        candidate="2 ranks",
        reference="1 rank",
        num_compared=10,
        explanation=explanation,
        culprits=RankSet(culprits),
        **more,
    )


def found(subject, *, check=None, **values):
    shown = findings(check or CHECKS[subject], divergence(subject, **values))
    return shown[0] if shown else None


@pytest.mark.parametrize("subject", CHECKS)
@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.code)
def test_a_disparity_of_another_kind_is_left_to_another_check(check, subject):
    shown = divergence(subject, explanation="ranks 0 and 1 got the same samples")
    assert bool(findings(check, shown)) == (CHECKS[subject] is check)


def test_data_names_the_ranks_and_what_they_share():
    finding = found(Subject.DATA, culprits=(0, 1), explanation="0 and 1 got the same samples")
    assert finding.ranks == RankSet([0, 1])
    assert "0 and 1 got the same samples" in finding.message


def test_a_gradient_is_named_with_the_factor():
    finding = found(Subject.GRADIENT, explanation="times the number of ranks (2)")
    assert finding.subjects == ("layers.1.weight",)
    assert "times the number of ranks (2)" in finding.message
    assert finding.evidence[0].values["factor"] == 2.0


def test_a_loss_shows_the_weights_of_the_data():
    finding = found(Subject.LOSS, weights=(0.5, 0.5), due=(0.75, 0.25), explanation="weights")
    weights = finding.evidence[1].values
    assert weights["weight of coordinate 0"] == 0.5
    assert weights["due weight of coordinate 0"] == 0.75


def test_an_output_names_module_rank_and_step():
    finding = found(Subject.OUTPUT, culprits=(1,))
    assert (finding.ranks, finding.subjects) == (RankSet([1]), ("layers.1.weight",))
    assert "on rank 1" in finding.message and "step 3" in finding.message


def test_the_parameter_that_begins_unlike_is_named():
    finding = found(Subject.START, step=0)
    assert finding.subjects == ("layers.1.weight",)
    assert "1 of 10 parameters" in finding.message


def test_an_update_names_the_parameter_and_the_rates():
    finding = found(Subject.UPDATE, details=("rank 1 has the learning rates (0.1,)",))
    assert finding.subjects == ("layers.1.weight",)
    assert "rank 1 has the learning rates" in finding.evidence[1].summary
    assert finding.severity is Severity.WARNING
    assert found(Subject.UPDATE).severity is Severity.ERROR


def test_copies_that_part_are_reported_without_a_size():
    nothing = {"measured": math.nan, "bound": 0.0, "ratio": math.inf, "factor": math.nan}
    difference = Difference(name="Net/a.weight", **nothing)
    finding = found(Subject.UPDATE, culprits=[1], difference=difference)
    assert "a.weight differs between the ranks that hold it" in finding.message
    assert "nan" not in finding.message
    assert finding.ranks == RankSet([1])


def test_a_learning_rate_is_not_called_a_parameter():
    rate = msgspec.structs.replace(LARGE, name="learning rate of parameter group 0")
    finding = found(Subject.UPDATE, difference=rate)
    assert "at step 3 of 2 ranks the learning rate of parameter group 0 differs" in finding.message
    assert finding.subjects == ("learning rate of parameter group 0",)


@pytest.mark.parametrize(
    ("reason", "subject", "check", "words"),
    [
        (Reason.BATCH, Subject.LOSS, BatchDependence, "because it depends on which samples"),
        (Reason.BATCH, Subject.OUTPUT, BatchDependence, "the output of layers.1.weight"),
        (Reason.SHARDS, Subject.UPDATE, ShardWiseUpdate, "Muon updates layers.1.weight"),
        (Reason.AXIS, Subject.GRADIENT, SharedGradientFactor, "layers.1.weight"),
    ],
)
def test_what_is_behind_a_difference_has_a_check_of_its_own(reason, subject, check, words):
    site = Frame("train.py", 47, "direction")
    finding = found(subject, check=check, reason=reason, explanation="Muon", site=site)
    assert words in finding.message and finding.severity is check.severity
    assert (finding.location.file, finding.location.line) == ("train.py", 47)
    assert found(subject, reason=reason) is None


def test_a_function_is_named_before_what_differs():
    moved = msgspec.structs.replace(LARGE, name="Net.whole()#0")
    finding = found(
        Subject.GRADIENT, check=ReorderedParts, reason=Reason.ORDER, differences=(moved, LARGE)
    )
    assert finding.subjects[0] == "Net.whole"
    assert "Net.whole returns the values of 1 rank in a different order" in finding.message


def test_what_names_suggest_is_likely():
    finding = found(Subject.LOSS, is_filled=True)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)


@pytest.mark.parametrize(
    "subject", [Subject.GRADIENT, Subject.LOSS, Subject.OUTPUT, Subject.UPDATE]
)
def test_what_the_comparison_itself_has_filled_up_proves_nothing(subject):
    finding = found(subject, padded=("1", "batch/y"))
    assert (finding.grade, finding.severity) == (Grade.NOTE, Severity.INFO)
    assert "--pad 1=VALUE --pad y=VALUE" in finding.message
