import pytest

from distdiag.checks.dat.skipped_epoch import SkippedEpoch
from distdiag.engine.data import DataAligner
from distdiag.events.data import LoaderResumed
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from distdiag.views.alignment import ResumedLoaderView
from tests.checks.streams import event_of, plain_site
from tests.engine.aligned import aligned


def resumed(rank, **values):
    fields = {
        "loader": "StatefulDataLoader",
        "dataset": "Texts",
        "number": 1,
        "num_batches": 0,
        "epoch": 2,
        "saved_epochs": (1,),
        "saved_at": plain_site(30),
        "site": plain_site(40),
    }
    return event_of(LoaderResumed, rank, **{**fields, **values})


def findings(**values):
    events = [resumed(rank, **values) for rank in (0, 1)]
    return aligned(DataAligner, *events, checks=[SkippedEpoch()]).findings


def test_an_epoch_for_which_the_state_of_another_has_no_batch_is_a_warning():
    (finding,) = findings()
    assert (finding.severity, finding.grade) == (Severity.WARNING, Grade.PROVEN)
    assert (finding.ranks, finding.subjects) == (RankSet([0, 1]), ("StatefulDataLoader",))
    assert finding.message == (
        "StatefulDataLoader of Texts has no batch for epoch 2: its state is from the end of epoch 1"
    )
    assert finding.location.line == 40
    assert finding.evidence[1].location.line == 30


def test_a_state_of_another_process_is_a_note():
    (finding,) = findings(saved_epochs=(), saved_at=None)
    assert (finding.severity, finding.grade) == (Severity.INFO, Grade.NOTE)


@pytest.mark.parametrize(
    "values",
    [
        {"epoch": 1},  # this pass ends the epoch
        {"epoch": 0, "saved_epochs": (0, 1)},  # an older state, saved in the same place
        {"num_batches": 3},
        {"epoch": None, "saved_epochs": (1,), "num_batches": 1},
    ],
)
def test_a_pass_that_may_be_right_is_silent(values):
    assert not findings(**values)


def test_a_run_without_resumed_loaders_says_so():
    assert aligned(DataAligner).why(ResumedLoaderView)
