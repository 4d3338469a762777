"""Shares one checked run of each correct program among the tests that look at it."""

from pathlib import Path

import pytest

from tests.integration.catalogue import Program
from tests.integration.launch import Launch, Launcher
from tests.integration.records import Recorded, read_records


class CheckedRuns:
    """Runs each program behind the tool once, when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs: dict[tuple[str, Launcher], Recorded] = {}

    def of(self, program: Program, launcher: Launcher) -> Recorded:
        """Return the checked run of a program."""
        key = (program.label, launcher)
        if key not in self._runs:
            out = self._folder / "-".join(key)
            args = [*program.watch, *program.args, "--out", str(out)]
            outcome = Launch(launcher=launcher).checked(program.script, args, nproc=program.nproc)
            self._runs[key] = Recorded(outcome, read_records(out))
        return self._runs[key]


@pytest.fixture(scope="session")
def checked_runs(tmp_path_factory: pytest.TempPathFactory) -> CheckedRuns:
    return CheckedRuns(tmp_path_factory.mktemp("checked"))
