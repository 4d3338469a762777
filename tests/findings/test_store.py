"""How many findings are kept of a run in which the same goes wrong again and again."""

from distdiag.findings.finding import Severity
from distdiag.findings.store import MOST_OF_A_CODE, FindingStore
from tests.reports.synthetic_run import make_finding


def finding(number, code="BAR001", **changes):
    return make_finding(code=code, subjects=(f"file {number}",), **changes)


def test_the_first_findings_of_a_check_are_kept_and_those_of_others():
    store = FindingStore({})
    for number in range(MOST_OF_A_CODE + 50):
        store.add(finding(number))
    store.add(finding(0))
    store.add(finding(1, code="COL001"))
    kept = store.all()
    assert [each.code for each in kept].count("BAR001") == MOST_OF_A_CODE
    assert kept[0] == finding(0)
    assert kept[-1].code == "COL001"
    assert store.left_out() == {"findings of BAR001 after the first 2,000": "only so many are kept"}


def test_what_is_replaced_or_taken_back_makes_room():
    store = FindingStore({})
    for number in range(MOST_OF_A_CODE - 1):
        store.add(finding(number))
    for _ in range(10):
        store.revise("one subject", [finding("revised")])
    assert not store.left_out()
    store.revise("one subject", [])
    store.add(finding("last"))
    assert not store.left_out()
    (first, *_) = store.all()
    store.withdraw([first.identity])
    store.add(first)
    assert not store.left_out()
    assert store.all()[-1].severity is not Severity.INFO
    store.revise("another", [finding("too many")])
    assert store.left_out()
