"""Tests of ``distdiag parity`` on real runs: right ones agree, wrong ones are explained."""

from pathlib import Path

import pytest

from distdiag.findings.finding import Severity
from distdiag.reports import read_report
from tests import forked

SCRIPT = Path(__file__).parent / "programs" / "language_model.py"

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def compared(tmp_path):
    def compared(*arguments, options=("--steps", "3")):
        command = ["-m", "distdiag.cli", "parity", *options]
        command += ["--run-dir", str(tmp_path / "run"), str(SCRIPT), *arguments]
        done = forked.run(command, timeout=800)
        path = tmp_path / "run" / "report.json"
        return done, read_report(path) if path.exists() else None

    return compared


def alarms(report):
    return [f for f in report.findings if f.severity is not Severity.INFO and f.code[:3] == "PAR"]


def test_a_right_run_agrees_with_one_rank(compared):
    done, report = compared()
    assert done.returncode == 0, done.stderr + done.stdout
    assert alarms(report) == []
    assert {"PAR007", "PAR010", "PAR011", "PAR012"} <= set(report.checked)
    assert report.run.active_modes == ("parity",)
    assert len(list(Path(report.run.command[-2]).rglob("report.json"))) <= 1


def test_unequal_token_counts_are_explained_by_the_weights_of_the_ranks(compared):
    done, report = compared("--ragged")
    assert done.returncode == 1
    found = next(each for each in alarms(report) if each.code == "PAR010")
    assert found.step == 0
    weights = next(e.values for e in found.evidence if "weight of coordinate 0" in e.values)
    assert weights["weight of coordinate 0"] == pytest.approx(0.5, abs=0.01)
    assert weights["due weight of coordinate 0"] != pytest.approx(0.5, abs=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "subject", "words"),
    [
        (("--bug", "rate"), "PAR012", None, "1.01 times"),
        (("--bug", "stale"), "PAR009", "blocks.1.up", "on rank 1"),
        (("--bug", "shifted"), "PAR010", None, ""),
        (("--bug", "sampler"), "PAR007", None, "the same samples"),
        (("--wrapper", "hand", "--bug", "summed"), "PAR011", None, "times the number of ranks (2)"),
        (
            ("--wrapper", "hand", "--bug", "unreduced"),
            "PAR011",
            "blocks.1.up.weight",
            "does not enter",
        ),
        (("--bug", "scaled"), "PAR011", "blocks.1.down.weight", "1.001"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_run_is_named_and_explained(compared, arguments, code, subject, words):
    done, report = compared(*arguments)
    assert done.returncode == 1, done.stderr
    found = next(each for each in alarms(report) if each.code == code)
    assert words in found.message
    assert subject is None or found.subjects[0] == subject


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--wrapper", "fsdp2"),
        ("--wrapper", "hand"),
        ("--own-batches",),
        ("--mixed",),
        ("--wrapper", "fsdp2", "--mixed"),
        ("--compressed",),
    ],
    ids=lambda value: " ".join(value),
)
def test_other_right_runs_agree(compared, arguments):
    done, report = compared(*arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    assert alarms(report) == []


@pytest.mark.slow
def test_a_loss_of_the_batch_as_a_whole_is_a_warning_that_can_be_accepted(compared):
    done, report = compared("--balanced", options=("--steps", "1"))
    assert done.returncode == 1, done.stderr + done.stdout
    (found,) = alarms(report)
    assert (found.code, found.severity) == ("PAR017", Severity.WARNING)
    assert "because it depends on which samples are in one batch" in found.message


@pytest.mark.slow
def test_dropout_is_not_comparable_and_the_way_round_is_reported(compared):
    done, report = compared("--dropout", "0.1")
    assert (done.returncode, report) == (2, None)
    assert "not comparable" in done.stderr and "--dropout off" in done.stderr


@pytest.mark.slow
def test_with_dropout_off_it_is(compared):
    done, report = compared("--dropout", "0.1", options=("--steps", "3", "--dropout", "off"))
    assert done.returncode == 0, done.stderr + done.stdout
    assert alarms(report) == []


@pytest.mark.slow
def test_each_run_may_read_its_own_data_with_the_same_global_batch(compared):
    template = "--batch-size {global_batch//world_size}"
    options = ("--steps", "3", "--same-global-batch", "--global-batch", "8", "--per-rank", template)
    done, report = compared(options=options)
    assert done.returncode == 0, done.stderr + done.stdout
    assert alarms(report) == []
    done, report = compared("--bug", "sampler", options=options)
    assert done.returncode == 2  # the folder holds a comparison already
    assert "is not empty" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--world-sizes", "1"), "needs two runs"),
        (("--world-sizes", "1,x"), "no list of numbers"),
        (("--world-sizes", "0,2"), "one rank at least"),
        (("--configuration", "a"), "is not NAME=N"),
        (("--pad", "x=y"), "is not NAME=VALUE"),
        (("--accept", "PAR900"), "there is no such check"),
        (("--per-rank", "-b {rank}"), "'rank' is unknown"),
    ],
)
def test_wrong_usage_is_one_clear_line(compared, options, said):
    done, report = compared(options=options)
    assert (done.returncode, report) == (2, None)
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
