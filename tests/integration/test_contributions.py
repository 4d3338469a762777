"""What ranks give and apply, under a real launcher: wrong sums are told, right ones are not."""

from pathlib import Path

import pytest

from tests.integration.launch import run_checked

SCRIPT = Path(__file__).with_name("contributions.py")
CODES = {"SHD004", "SHD021", "SHD022", "SHD023", "SEQ012"}

pytestmark = pytest.mark.timeout(300)


def findings(way):
    outcome = run_checked(SCRIPT, [way])
    found = outcome.reported()
    assert outcome.report is not None
    assert set(outcome.report["checked"]) >= CODES, outcome.describe()
    return found


@pytest.mark.parametrize(
    ("way", "code"),
    [
        ("flag", "SHD021"),
        pytest.param("late", "SHD021", marks=pytest.mark.slow),
        pytest.param("lost", "SHD021", marks=pytest.mark.slow),
        pytest.param("stale", "SHD022", marks=pytest.mark.slow),
        pytest.param("twice", "SHD023", marks=pytest.mark.slow),
    ],
)
def test_what_is_combined_wrongly_is_reported(way, code):
    assert set(findings(way)) == {code}


@pytest.mark.parametrize(
    "way",
    [
        "ddp",
        *(
            pytest.param(way, marks=pytest.mark.slow)
            for way in (
                *("local", "diloco", "gan", "weighted", "fsdp1", "fsdp1-flat", "fsdp2", "bf16"),
                *("scaled", "unused", "skip", "sam", "scaler"),
            )
        ),
    ],
)
def test_what_is_right_is_not(way):
    assert findings(way) == {}
