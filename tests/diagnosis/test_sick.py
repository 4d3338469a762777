import pytest

from tests.diagnosis.running import causes, diagnosed
from tests.diagnosis.sick import Sick
from tests.diagnosis.sick_code import SICK_CODE
from tests.diagnosis.sick_runs import SICK_RUNS

SICK = SICK_CODE | SICK_RUNS


@pytest.mark.parametrize("sick", SICK.values(), ids=SICK.keys())
def test_the_fault_is_the_cause_and_nothing_else_is(sick: Sick, tmp_path):
    diagnosis = diagnosed(tmp_path, sick.context)

    found = causes(diagnosis)
    assert found.keys() - set(sick.beside) == {sick.issue}
    assert found[sick.issue] >= sick.at_least
    cause = next(each for each in diagnosis.root_causes if each.id == sick.issue)
    for quote in sick.quotes:
        assert any(quote in each.quote or quote in str(each.value) for each in cause.evidence)
    assert diagnosis.status == "diagnosed"
    assert not diagnosis.left_out


def test_there_are_enough_kinds():
    assert len(SICK) >= 25
    assert len({sick.issue for sick in SICK.values()}) >= 25
