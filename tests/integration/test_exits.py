"""How jobs end: who ended first, by what, and what only came of it."""

from pathlib import Path

import pytest

from tests.integration.launch import Launch

EXITS = Path(__file__).with_name("exits.py")

pytestmark = pytest.mark.timeout(300)


def line_of(text):
    lines = EXITS.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if text in line]
    return number


def ended(kind, launcher="forked"):
    """Run the program; return how it ended, with the one finding that its report has."""
    run = Launch(launcher=launcher).checked(EXITS, [kind])
    assert run.exit_status == 1, run.describe()
    assert run.leftovers == (), run.describe()
    assert run.report["complete"], run.describe()
    (finding,) = run.report["findings"]
    return run, finding


def test_a_job_that_was_ended_from_outside_is_reported_as_that():
    run, finding = ended("end_the_job", "torchrun")
    assert (finding["code"], finding["severity"]) == ("HNG002", "info"), run.describe()
    assert finding["ranks"] == [0, 1]
    assert finding["message"] == "ranks 0-1 were all ended from outside by SIGTERM"
    assert "memory" not in finding["fix"] + finding["why"]
    assert [each["values"]["signal"] for each in finding["evidence"]] == ["SIGTERM", "SIGTERM"]
    assert run.report["run"]["outcome"] == "killed"


@pytest.mark.parametrize(
    ("kind", "status", "line"),
    [
        ("leave", "status 3", "sys.exit(3)"),
        pytest.param("leave_quickly", "status 4", "os._exit(4)", marks=pytest.mark.slow),
        ("leave_early", "status 1 (no data)", 'sys.exit("no data")'),
    ],
)
def test_a_rank_that_leaves_with_a_failing_status_is_the_cause(kind, status, line):
    run, finding = ended(kind)
    assert (finding["code"], finding["severity"]) == ("HNG002", "error"), run.describe()
    assert finding["ranks"] == [1], run.describe()
    number = line_of(line)
    assert finding["message"].startswith(f"rank 1 exited with {status} at {EXITS}:{number}")
    assert finding["location"]["line"] == number
    assert run.report["run"]["outcome"] == "failed"


def test_what_all_ranks_raise_is_one_note():
    run, finding = ended("raise_everywhere")
    assert (finding["code"], finding["severity"]) == ("HNG001", "info"), run.describe()
    assert finding["ranks"] == [0, 1]
    assert "differs" not in finding["fix"]


@pytest.mark.slow
def test_an_exception_that_cannot_be_shown_is_reported_by_its_type():
    run, finding = ended("raise_unspeakable")
    assert (finding["code"], finding["ranks"]) == ("HNG001", [1]), run.describe()
    assert "Unspeakable: (its message cannot be shown" in finding["message"]
    assert finding["location"]["line"] == line_of("raise Unspeakable")


def test_a_rank_that_cannot_reach_the_master_is_the_cause():
    run, finding = ended("lose_the_way")
    assert (finding["code"], finding["severity"]) == ("HNG001", "error"), run.describe()
    assert finding["ranks"] == [1], run.describe()
    assert "127.0.0.1" in finding["message"] or "localhost" in finding["message"]
