import pytest

from distdiag.checks.ckp.rebuilt_average import RebuiltAverage
from distdiag.events.checkpoints import AverageSaved
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.streams import event_of, plain_site
from tests.checks.verdicts import findings


def judged(**values):
    fields = {
        "path": "ema",
        "first_path": "model",
        "num_tensors": 4,
        "share_of_file": 0.01,
        "share_of_start": 0.9,
        "likeness": 0.2,
        "site": plain_site(30),
    }
    return findings(RebuiltAverage, event_of(AverageSaved, 0, step=8, **{**fields, **values}))


@pytest.mark.parametrize("path", ["ema", "state.model_ema", "averaged", "teacher", "shadow"])
def test_an_average_that_keeps_the_first_weights_alone_is_named(path):
    (finding,) = judged(path=path)
    assert (finding.severity, finding.ranks) == (Severity.WARNING, RankSet([0]))
    assert finding.message.startswith(f"{path} of the checkpoint was not loaded")
    assert "keeps 90% of the model that was read, and 1% of" in finding.evidence[0].summary
    assert finding.location.line == 30


@pytest.mark.parametrize("path", ["best", "teachers_pet", "remainder", "target"])
def test_other_weights_may_begin_anew(path):
    (finding,) = judged(path=path)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    "values", [{"share_of_file": 0.3}, {"share_of_start": 0.5}, {"likeness": 0.9}]
)
def test_an_average_that_may_go_on_is_silent(values):
    assert judged(**values) == []
