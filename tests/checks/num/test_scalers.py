"""Checks of gradient scalers, autocast, reductions and casts of buffers."""

import pytest

from distdiag.checks.num.endless_skipping import EndlessSkipping
from distdiag.checks.num.missed_clipping import MissedClipping
from distdiag.checks.num.reduction_type import ReductionType
from distdiag.checks.num.rounded_positions import RoundedPositions
from distdiag.checks.num.stale_casts import StaleCasts
from distdiag.checks.num.uneven_skip import UnevenSkip
from distdiag.events.updates import CastsReused, ClipMissed, PositionsRounded, ReducedInType
from distdiag.findings.finding import Severity
from distdiag.views.updates import (
    CastsView,
    ClipView,
    PositionsView,
    ReductionView,
    ScalerView,
    SkippingView,
)
from tests.checks.streams import event_of, plain_site
from tests.checks.updates import call
from tests.checks.verdicts import findings


@pytest.mark.parametrize(("is_known", "severity"), [(True, Severity.ERROR), (False, Severity.INFO)])
def test_a_step_that_one_rank_skips_is_an_error_if_they_train_together(is_known, severity):
    shown = ScalerView({0: call(0), 1: call(1, is_skipped=True)}, is_known)
    (found,) = findings(UnevenSkip, shown)
    assert found.severity is severity
    assert "on rank 1 and takes it on rank 0" in found.message
    assert "at a scale of 65536" in found.evidence[0].summary


def test_many_skips_in_a_row_are_a_warning():
    (found,) = findings(EndlessSkipping, SkippingView({0: call(is_skipped=True, num_skipped=32)}))
    assert "has skipped 32 steps of SGD in a row" in found.message
    few = SkippingView({0: call(is_skipped=True, num_skipped=31)})
    assert not findings(EndlessSkipping, few)


def test_a_reduction_in_a_narrower_type_is_named_with_its_axis():
    event = event_of(
        ReducedInType,
        1,
        parameter="norm.weight",
        dtype="bfloat16",
        reduce_dtype="float32",
        axis="tp",
        axis_size=2,
        site=plain_site(7),
    )
    (found,) = findings(ReductionType, ReductionView({1: event}))
    assert found.subjects == ("norm.weight",)
    assert "2 ranks of axis tp in bfloat16" in found.message


@pytest.mark.parametrize(("last", "num_findings"), [(40.0, 0), (4096.0, 1)])
def test_rounded_frequencies_matter_at_late_positions(last, num_findings):
    event = event_of(
        PositionsRounded,
        buffer="rotary.inv_freq",
        model="Net",
        dtype_before="float32",
        dtype="bfloat16",
        largest_error=1e-3,
        largest_value=1.0,
        largest_angle=last,
        function="cos",
        site=plain_site(7),
    )
    assert len(findings(RoundedPositions, PositionsView({0: event}))) == num_findings


def test_a_pass_on_casts_from_before_a_step_is_reported_at_the_step():
    event = event_of(
        CastsReused, optimizer="SGD", dtype="bfloat16", site=plain_site(8), step_site=plain_site(9)
    )
    (found,) = findings(StaleCasts, CastsView({0: event}))
    assert found.location.line == 9
    assert found.severity is Severity.WARNING


@pytest.mark.parametrize(
    ("scaler", "number", "severity", "words"),
    [
        ("GradScaler", 4, Severity.ERROR, "GradScaler unscales them only afterwards"),
        ("", 4, Severity.WARNING, "no optimizer holds any of the 5 tensors"),
        ("", 0, Severity.WARNING, "is given, and none has a gradient"),
    ],
)
def test_clipping_of_other_gradients_is_reported_at_the_call(scaler, number, severity, words):
    event = event_of(
        ClipMissed,
        optimizer="SGD",
        scaler=scaler,
        max_norm=1.0,
        num_given=5,
        num_with_gradient=number,
        site=plain_site(8),
        step_site=plain_site(9),
    )
    (found,) = findings(MissedClipping, ClipView({0: event}))
    assert (found.location.line, found.severity) == (8, severity)
    assert words in found.message
