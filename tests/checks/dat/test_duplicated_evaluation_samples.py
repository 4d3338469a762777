import pytest

from distdiag.checks.dat.duplicated_evaluation_samples import DuplicatedEvaluationSamples
from distdiag.events.base import CallSite
from distdiag.events.data import RowsGathered
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Grade, Severity
from tests.checks.streams import TORCH, Program, event_of, together
from tests.checks.verdicts import findings

KEEPING = """
    def evaluate(loader):
        for batch in loader:
            answers.append(gather(model(batch)))  # CALL
    """
CUTTING = (
    KEEPING
    + """
        answers = answers[:50]
    """
)


def gathered(rank, site, **values):
    fields = {
        "name": "train.py:3",
        "number": 0,
        "dataset": "Readings",
        "num_samples": 50,
        "num_rows": 16,
        "num_real": 2,
        "tensors": ("int64 8",),
        "is_dropped_elsewhere": False,
    }
    return event_of(RowsGathered, rank, site=site, **{**fields, **values})


def judged(folder, code=KEEPING, *, is_users=True, **values):
    site = Program(folder, code).site("# CALL")
    site = CallSite(site.frames[1:] if is_users else (TORCH, *site.frames))
    events = [gathered(rank, site, **values) for rank in (0, 1)]
    return findings(DuplicatedEvaluationSamples, together(*events))


def test_answers_of_samples_that_fill_a_batch_up_are_an_alarm(tmp_path):
    (finding,) = judged(tmp_path)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0, 1]))
    assert finding.location.line == 3
    assert "counts 14 of the 50 samples of Readings twice" in finding.message


def test_another_gather_that_drops_them_makes_it_surer(tmp_path):
    (alone,), (beside,) = judged(tmp_path), judged(tmp_path, is_dropped_elsewhere=True)
    assert beside.confidence > alone.confidence
    assert beside.evidence[0].summary.endswith("another call gathers only these of the same batch")


@pytest.mark.parametrize(
    "change",
    [{"code": CUTTING}, {"is_users": False}, {"tensors": ("float32 8 x 128",)}],
    ids=["the program cuts", "a framework gathers", "features of the samples"],
)
def test_it_is_a_note_where(change, tmp_path):
    (finding,) = judged(tmp_path, **change)
    assert finding.grade is Grade.NOTE
    assert "may count" in finding.message
