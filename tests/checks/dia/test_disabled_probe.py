import pytest

from distdiag.checks.dia.disabled_probe import DisabledProbe
from distdiag.events.lifecycle import ProbeDisabled
from distdiag.events.ranks import RankSet
from distdiag.findings.finding import Severity
from tests.checks.streams import event_of
from tests.checks.verdicts import findings


@pytest.mark.parametrize(
    ("traceback", "values"), [("", {}), ("Traceback …", {"traceback": "Traceback …"})]
)
def test_a_probe_that_was_switched_off_is_passed_on_as_information(traceback, values):
    event = event_of(ProbeDisabled, 3, probe="steps", reason="disk full", traceback=traceback)
    (finding,) = findings(DisabledProbe, event)
    assert (finding.ranks, finding.severity) == (RankSet([3]), Severity.INFO)
    assert finding.subjects == ("steps",)
    assert finding.evidence[0].values == values
