import pytest

from distdiag.checks.col.unwaited_work import UnwaitedWork
from distdiag.events.base import CallSite, Frame
from distdiag.events.collectives import CollectiveState
from distdiag.findings.finding import Severity
from distdiag.views.rank_states import WorkView
from tests.checks.streams import TORCH, Job, event_of, plain_site, signature
from tests.checks.verdicts import findings

FRAMEWORK = Frame("/site-packages/accelerate/utils.py", 3, "gather", user=False)


def judged(site=None, state="dropped", **values):
    job = Job()
    given = {"is_async": True, "api": "all_reduce"} | values
    call = job.call(0, site, **given)
    event = event_of(CollectiveState, call=call.seq, state=state)
    return findings(UnwaitedWork, WorkView(event, (call,)))


def test_a_result_that_nobody_waited_for_is_a_warning():
    (finding,) = judged(plain_site(12))
    assert (finding.severity, finding.location.line) == (Severity.WARNING, 12)


@pytest.mark.parametrize(
    "sign", [signature("barrier"), signature("isend", peer=1)], ids=lambda s: s.op
)
def test_calls_without_a_result_are_a_note(sign):
    (finding,) = judged(sign=sign)
    assert finding.severity is Severity.INFO


@pytest.mark.parametrize(
    "values",
    [
        {"state": "waited"},
        {"state": "completed"},
        {"is_async": False},
        {"api": None},
        {"site": CallSite((TORCH, FRAMEWORK, Frame("train.py", 1, "main")))},
    ],
    ids=["waited", "completed", "synchronous", "made in C++", "made by a framework"],
)
def test_what_is_waited_for_or_not_the_user_s_own_is_silent(values):
    assert not judged(**values)


def test_a_call_that_is_no_longer_known_is_silent():
    event = event_of(CollectiveState, call=77, state="dropped")
    assert not findings(UnwaitedWork, WorkView(event))
