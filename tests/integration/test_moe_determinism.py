"""``distdiag moe-determinism`` on real runs: the same again, and what is not."""

import json
from pathlib import Path

import pytest

from distdiag.findings.finding import Grade
from distdiag.reports import read_report
from tests import forked

SCRIPT = Path(__file__).parent / "programs" / "routed_twice.py"

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def compared(tmp_path):
    def compared(how, *options):
        folder = tmp_path / "run"
        command = ["-m", "distdiag.cli", "moe-determinism", "--steps", "2"]
        command += ["--run-dir", str(folder), *options, str(SCRIPT), "--how", how]
        done = forked.run(command, timeout=500)
        path = folder / "report.json"
        return done, read_report(path) if path.exists() else None

    return compared


def test_a_run_that_is_the_same_again_is_reported_so_with_the_number_of_choices(compared, tmp_path):
    done, report = compared("steady")
    assert done.returncode == 0, done.stderr
    assert "4 choices of experts for 128 tokens were compared, all are the same" in done.stderr
    assert (report.findings, report.checked) == ((), ("MOE014",))
    assert report.run.active_modes == ("moe-determinism",)
    tables = json.loads((tmp_path / "run" / "routing.json").read_bytes())
    assert sum(each["num_tokens"] for each in tables["margins"]) == 128
    assert [row["num_flipped"] for row in tables["choices"]] == [0] * 4


def test_noise_that_nobody_seeds_is_named_and_is_no_rounding(compared):
    done, report = compared("noise", "--nproc-per-node", "1", "--seed", "3")
    assert done.returncode == 1, done.stderr
    (found,) = report.findings
    assert (found.code, found.step, found.subjects) == ("MOE014", 0, ("mixture.router",))
    assert "mixture.router (Router) draws random numbers" in found.message
    assert "no rounding" in found.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("tie", ("output of pooled (Pooled), whose input is the same", "of the size of rounding")),
        ("data", ("the data of the model", "no rounding")),
        ("weights", ("differs first is the weights", "no rounding")),
    ],
)
def test_what_differs_first_is_named(compared, how, words):
    done, report = compared(how)
    assert done.returncode == 1, done.stderr
    (found,) = report.findings
    assert all(word in found.message for word in words), found.message


@pytest.mark.slow
def test_rounding_that_changes_no_route_is_reported_and_is_no_finding(compared):
    done, report = compared("order")
    assert done.returncode == 0, done.stderr
    assert report.findings == ()
    assert "all are the same, but what differs first is the output of pooled" in done.stderr


@pytest.mark.slow
def test_noise_that_the_options_of_a_router_ask_for_is_a_note_and_not_comparable(compared):
    done, report = compared("jitter")
    assert done.returncode == 2, done.stderr
    assert "--seed S gives both the same" in done.stderr
    assert [found.grade for found in report.findings] == [Grade.NOTE]


@pytest.mark.slow
def test_a_seed_makes_weights_the_same_that_nobody_seeds(compared):
    done, report = compared("unseeded", "--seed", "7")
    assert done.returncode == 0, done.stderr
    assert report.findings == ()


@pytest.mark.slow
def test_a_model_without_routers_cannot_be_compared(compared):
    done, report = compared("dense")
    assert (done.returncode, report) == (2, None)
    assert "no router was seen" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [(("--steps", "0"), "--steps"), (("--seed", "x"), "--seed"), (("--report", "x"), "unknown")],
)
def test_wrong_usage_is_one_clear_line(compared, options, said):
    done, report = compared("steady", *options)
    assert (done.returncode, report) == (2, None)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
