import pytest

from distdiag.checks.col.changed_in_flight import ChangedInFlight
from distdiag.events.collectives import BufferChanged, CollectiveState
from distdiag.findings.finding import Severity
from distdiag.views.rank_states import WorkView
from tests.checks.streams import Job, event_of, plain_site, signature
from tests.checks.verdicts import findings


def judged(device="cpu", call_seq=None, **fields):
    call = Job().call(1, plain_site(12), is_async=True, api="isend", sign=signature("send", peer=0))
    seq = call.seq if call_seq is None else call_seq
    event = event_of(
        BufferChanged, rank=1, call=seq, num_changes=3, device=device, site=plain_site(20)
    )
    return findings(ChangedInFlight, WorkView(event, (call,)))


@pytest.mark.parametrize(
    ("device", "severity"), [("cpu", Severity.WARNING), ("cuda", Severity.INFO)]
)
def test_a_tensor_that_is_sent_and_changed_is_named_by_the_call(device, severity):
    (finding,) = judged(device)
    assert (finding.severity, finding.location.line, list(finding.ranks)) == (severity, 12, [1])
    assert "3 times" in finding.message


def test_a_call_that_is_no_longer_known_is_silent():
    assert not judged(call_seq=77)


def test_other_states_of_a_call_are_silent():
    call = Job().call(0, plain_site(12), is_async=True, api="isend")
    event = event_of(CollectiveState, call=call.seq, state="dropped")
    assert not findings(ChangedInFlight, WorkView(event, (call,)))
