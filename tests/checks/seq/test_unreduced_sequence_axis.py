import pytest

from distdiag.checks.seq.unreduced_sequence_axis import UnreducedSequenceAxis
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from distdiag.views.sequences import ModelEquality
from tests.checks.losses import mean, reported
from tests.checks.sequences import both, shared
from tests.checks.verdicts import findings


def judged(**values):
    losses = tuple({r: reported(r, [mean(8)], step=n, members=(r, r + 2)) for r in (0, 1)}
                   for n in range(3))  # fmt: skip
    view = shared(both(0), both(1), losses=losses, **values)
    return findings(UnreducedSequenceAxis, view)


def test_ranks_between_which_nothing_is_reduced_are_named():
    (finding,) = judged(is_reduced=False)
    assert (finding.severity, finding.ranks) == (Severity.ERROR, RankSet([0, 1]))
    assert "over 3 sampled steps" in finding.message
    assert "ranks 0,2, ranks 1,3, each by itself" in finding.evidence[0].summary


@pytest.mark.parametrize(
    "values",
    [{"is_reduced": True}, {"how": "all_gather"}, {"equality": ModelEquality.OTHER_MODELS}],
    ids=["reduced", "gathered keys bring sums of gradients back", "other models"],
)
def test_ranks_with_nothing_more_to_combine_are_silent(values):
    assert not judged(**{"is_reduced": False, **values})


def test_models_that_begin_with_other_weights_may_be_meant_to_be_others():
    (finding,) = judged(is_reduced=False, equality=ModelEquality.OTHER_VALUES)
    assert finding.severity is Severity.INFO


def test_stages_of_a_pipeline_of_which_one_has_the_loss_are_right():
    losses = tuple(
        {0: reported(0, [None], step=n), 1: reported(1, [mean(8)], step=n)} for n in range(3)
    )
    view = shared(both(0), both(1), losses=losses, is_reduced=False, how="all_to_all")
    assert findings(UnreducedSequenceAxis, view) == []
