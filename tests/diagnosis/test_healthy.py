import pytest

from tests.diagnosis.healthy import HEALTHY
from tests.diagnosis.running import diagnosed


@pytest.mark.parametrize("artifacts", HEALTHY.values(), ids=HEALTHY.keys())
def test_a_healthy_run_has_no_cause(artifacts, tmp_path):
    diagnosis = diagnosed(tmp_path, {"artifacts": artifacts, "symptoms": []})

    assert diagnosis.root_causes == ()
    assert diagnosis.possible == ()
    assert diagnosis.status == "inconclusive"
    assert diagnosis.summary == "nothing wrong was found in these artifacts"
    assert not diagnosis.left_out


@pytest.mark.parametrize("artifacts", HEALTHY.values(), ids=HEALTHY.keys())
def test_what_a_user_suspects_makes_no_cause(artifacts, tmp_path):
    symptoms = ["the loss might diverge or become NaN", "does not learn", "same token"]

    diagnosis = diagnosed(tmp_path, {"artifacts": artifacts, "symptoms": symptoms})

    assert diagnosis.root_causes == ()


def test_there_are_enough_kinds():
    assert len(HEALTHY) >= 12
