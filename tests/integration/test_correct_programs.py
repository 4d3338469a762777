"""A correct program runs to its end under distdiag and hears no alarm."""

import pytest

from tests.integration.catalogue import (
    PROGRAM_FOLDER,
    PROGRAMS,
    Program,
    program_parameters,
)
from tests.integration.conftest import CheckedRuns
from tests.integration.launch import Launcher

HELPERS = {"megatron_on_cpu", "operation_log", "routed_twice", "training_record"}


@pytest.mark.timeout(480)
@pytest.mark.parametrize(("program", "launcher"), program_parameters())
def test_a_correct_program_finishes_without_an_alarm_and_its_report_is_complete(
    program: Program, launcher: Launcher, checked_runs: CheckedRuns
) -> None:
    run = checked_runs.of(program, launcher)
    outcome = run.outcome
    # With several ranks, gloo may abort every attempt at exit: the records then show the end.
    assert outcome.exit_status == 0 or outcome.aborted_at_exit, outcome.describe()
    assert outcome.alarms == [], outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
    assert sorted(run.records) == program.records, outcome.describe()

    report = outcome.report
    assert report is not None, outcome.describe()
    assert report["complete"] is True, outcome.describe()
    assert report["schema_version"] == 1
    assert report["run"]["outcome"] == "finished", outcome.describe()
    assert report["run"]["world_size"] == program.nproc
    assert [rank["rank"] for rank in report["run"]["ranks"]] == list(range(program.nproc))
    assert report["silent_ranks"] == []
    assert report["checked"], "a report that checked nothing proves nothing"
    # A probe that has switched itself off would be silent too.
    assert "DIA003" not in {finding["code"] for finding in report["findings"]}, outcome.describe()


def test_every_program_in_the_folder_is_in_the_catalogue() -> None:
    scripts = {path.stem for path in PROGRAM_FOLDER.glob("*.py")} - HELPERS
    assert scripts == {program.name for program in PROGRAMS}


def test_labels_of_the_catalogue_are_unique() -> None:
    labels = [program.label for program in PROGRAMS]
    assert sorted(set(labels)) == sorted(labels)
