"""Shares one checked run of each correct program among the tests that look at it."""

from pathlib import Path

import pytest

from tests.integration.catalogue import Program
from tests.integration.launch import run_checked
from tests.integration.records import Recorded, read_records


class CheckedRuns:
    """Runs each program behind the tool once, when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[str, Recorded] = {}

    def of(self, program: Program) -> Recorded:
        """Return the checked run of a program."""
        if program.label not in self._runs:
            out = self._folder / program.label
            args = [*program.watch, *program.args, "--out", str(out)]
            outcome = run_checked(program.script, args, nproc=program.nproc)
            self._runs[program.label] = Recorded(outcome, read_records(out))
        return self._runs[program.label]


@pytest.fixture(scope="session")
def checked_runs(tmp_path_factory: pytest.TempPathFactory) -> CheckedRuns:
    return CheckedRuns(tmp_path_factory.mktemp("checked"))
