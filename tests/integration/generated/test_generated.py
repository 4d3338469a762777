"""Trainings written at random: the broken ones are found, and none of their twins is accused."""

from collections import Counter

import pytest

from tests.integration.generated.run import Case, cases, run_case
from tests.integration.generated.trainings import FAULTS

PAIRS_PER_FAULT = 18
LEAST_FOUND = 0.95
LEAST_NAMED = 0.90


def all_cases(num: int) -> list[Case]:
    return list(cases(num, []))


def test_there_are_enough_programs_and_no_two_are_alike():
    written = all_cases(PAIRS_PER_FAULT)
    kinds = Counter(case.kind for case in written)
    assert min(kinds.values()) >= 400
    broken = {case.text for case in written if case.kind == "broken"}
    assert len(broken) == kinds["broken"]
    assert broken.isdisjoint(case.text for case in written if case.kind == "right")


def test_all_programs_can_be_read():
    for case in all_cases(3):
        compile(case.text, case.label, "exec")


def test_each_fault_is_written_in_each_of_its_styles():
    styles = {tuple(case.label.split("/")[:2]) for case in all_cases(5)}
    assert styles == {(fault.name, style) for fault in FAULTS for style in fault.styles}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_broken_programs_are_found_and_right_ones_are_not_accused():
    verdicts = [run_case(case) for case in all_cases(PAIRS_PER_FAULT)]
    answers = Counter((each.kind, each.answer) for each in verdicts)
    wrong = [
        f"{v.label}: {v.answer} {v.alarms}" for v in verdicts if v.answer in ("accused", "failed")
    ]
    assert wrong == []
    broken = sum(number for (kind, _), number in answers.items() if kind == "broken")
    named = answers["broken", "found"]
    assert named + answers["broken", "other words"] >= LEAST_FOUND * broken
    assert named >= LEAST_NAMED * broken
