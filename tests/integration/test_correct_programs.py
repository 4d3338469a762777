"""A correct program runs to its end under distdiag, hears no alarm, and computes the same.

The same are losses, weights and generator states to the last bit, and the operations and functions
of torch that modes of the program see, in their order.
"""

from pathlib import Path

import pytest

from tests.integration.catalogue import (
    PROGRAM_FOLDER,
    PROGRAMS,
    Program,
    program_parameters,
)
from tests.integration.launch import Launch, Launcher, Outcome
from tests.integration.records import read_records

HELPERS = {"megatron_on_cpu", "operation_log", "routed_twice", "training_record"}
# One of each way to train and to share files; with --all every program is compared.
COMPARED = {
    "async_overlap",
    "ddp",
    "ddp_compile",
    "fsdp2",
    "hf_trainer",
    "locked_cache",
    "own_modes",
    "pipeline",
    "subgroups",
    "tensor_parallel",
}


@pytest.mark.timeout(800)
@pytest.mark.parametrize(("program", "launcher"), program_parameters())
def test_a_correct_program_hears_no_alarm_and_computes_the_same(
    program: Program, launcher: Launcher, tmp_path: Path
) -> None:
    launch = Launch(launcher=launcher)
    out = tmp_path / "checked"
    args = [*program.watch, *program.args, "--out", str(out)]
    outcome = launch.checked(program.script, args, nproc=program.nproc)
    records = read_records(out)
    assert sorted(records) == program.records, outcome.describe()
    assert_nothing_is_wrong(program, outcome)
    if launcher == "forked" and program.name not in COMPARED:
        return
    out = tmp_path / "plain"
    args = [*program.watch, *program.args, "--out", str(out)]
    plain = launch.plain(program.script, args, nproc=program.nproc)
    assert read_records(out) == records, plain.describe()


def assert_nothing_is_wrong(program: Program, outcome: Outcome) -> None:
    # With several ranks, gloo may abort every attempt at exit: the records then show the end.
    assert outcome.exit_status == 0 or outcome.aborted_at_exit, outcome.describe()
    assert outcome.alarms == [], outcome.describe()
    assert outcome.leftovers == (), outcome.describe()

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
