from dataclasses import replace

import pytest

from distdiag.checks.moe.aux_loss_scale import AuxLossScale
from distdiag.events.losses import Factor
from distdiag.findings.finding import Grade, Severity
from distdiag.views.losses import AuxLossView, CombinedAuxLossView
from tests.checks.losses import aux, losses, mean, over, part, times, window
from tests.checks.verdicts import findings

COEFFICIENT = times(0.01)


def found(*passes, kind=AuxLossView, **values):
    """What is found where the configuration declares the coefficient."""
    values = {"aux_coefficient": 0.01} | values
    return findings(AuxLossScale, losses(*passes, kind=kind, **values))


def counted(*inner, num_passes=1, **values):
    """Passes whose tokens are divided by the number of all; both terms are multiplied by two."""
    term = aux(*inner, outer=(times(2),), **values)
    number = 40 * num_passes
    return [part(20, 2 / number, times(2), over(number), aux=(term,))] * num_passes


def apart(*inner, **values):
    """Two passes; what both terms are multiplied by lies within the one over tokens."""
    return [mean(20, over(2), aux=(aux(*inner, **values),))] * 2


WRONG = {
    "ranks": (counted(COEFFICIENT), "weighs 2 times", "multiplied by 2 to undo the average"),
    "ranks, no coefficient": (counted(), "weighs 2 times", "multiplied by 2"),
    "passes": (apart(COEFFICIENT), "weighs 2 times", "each of 2 micro-steps and not divided"),
    "layers": (counted(COEFFICIENT, Factor("mean", 2.0)), "weighs 2 times", "multiplied by 2"),
    "injected": (apart(over(1), COEFFICIENT), "weighs 2 times", "each of 2 micro-steps"),
    "experts": (apart(COEFFICIENT, times(8)), "weighs 2 times", "each of 2 micro-steps"),
    "both": (counted(COEFFICIENT, num_passes=4), "weighs 8 times", "each of 4 micro-steps"),
    "ranks, not passes": (
        counted(over(4), COEFFICIENT, num_passes=4),
        "weighs 2 times",
        "multiplied by 2 to undo the average",
    ),
    "counted for all": (
        [part(20, 2 / 160, times(2), over(160), aux=(aux(COEFFICIENT),))] * 4,
        "weighs 4 times",
        "each of 4 micro-steps",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_auxiliary_loss_that_grows_is_found(name):
    passes, times_, reason = WRONG[name]
    (finding,) = found(passes, passes)
    assert (finding.grade, finding.severity) == (Grade.LIKELY, Severity.WARNING)
    assert times_ in finding.message
    assert reason in finding.message


RIGHT = {
    "own means": [mean(20, aux=(aux(COEFFICIENT),))],
    "own means that are added up": [mean(20, aux=(aux(COEFFICIENT),))] * 2,
    "divided together": [mean(20, over(2), aux=(aux(COEFFICIENT, outer=(over(2),)),))] * 2,
    "divided both": apart(over(2), COEFFICIENT),
    "divided by ranks": counted(over(2), COEFFICIENT),
    "divided by both": counted(over(8), COEFFICIENT, num_passes=4),
    "divided beforehand": counted(times(0.005)),
    "divided by steps beforehand": apart(times(0.005)),
    "multiplied apart": [part(20, 2 / 40, times(2), over(40), aux=(aux(COEFFICIENT),))],
    "not read": [*apart(COEFFICIENT), None],
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_auxiliary_loss_that_does_not_is_silent(name):
    assert not found(RIGHT[name], RIGHT[name])


@pytest.mark.parametrize("options", [{"has_wrapper": False}, {"divisor": 0.0}], ids=str)
def test_nothing_is_said_where_it_is_not_known_who_averages(options):
    passes = counted(COEFFICIENT)
    assert not found(passes, passes, **options)


def test_a_rank_tells_by_itself_that_an_auxiliary_loss_is_not_divided_by_its_passes():
    passes = apart(over(1), COEFFICIENT)
    (finding,) = found(passes, passes, has_wrapper=False, divisor=0.0)
    assert finding.severity is Severity.WARNING
    assert "weighs 2 times" in finding.message


def test_ranks_that_tell_different_things_by_themselves_are_silent():
    passes = apart(over(1), COEFFICIENT), apart(over(2), COEFFICIENT)
    assert not found(*passes, has_wrapper=False, divisor=0.0)


def test_passes_before_the_routers_are_known_tell_nothing():
    passes = apart(over(1), COEFFICIENT)
    declared = {"aux_coefficient": 0.01}
    whole = losses(passes, passes, kind=AuxLossView, **declared)
    late = window([mean(20, over(2)), passes[0]], passes, **declared)
    (finding,) = findings(AuxLossScale, replace(whole, windows=(late, *whole.windows)))
    assert finding.severity is Severity.WARNING


DOUBTFUL = {
    "a sum of all ranks": (counted(COEFFICIENT, is_own_mean=False), 0.01),
    "no declaration": (counted(COEFFICIENT), 0.0),
    "another declaration": (counted(COEFFICIENT), 0.5),
}


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_may_be_meant_is_a_note(name):
    passes, declared = DOUBTFUL[name]
    (finding,) = found(passes, passes, aux_coefficient=declared)
    assert finding.grade is Grade.NOTE


@pytest.mark.parametrize("is_measured", [True, False])
def test_gradients_that_are_averaged_by_hand_are_judged_the_same_way(is_measured):
    passes = counted(COEFFICIENT)
    found_ = found(passes, passes, kind=CombinedAuxLossView, is_measured=is_measured)
    assert [each.grade for each in found_] == [Grade.LIKELY] * is_measured
