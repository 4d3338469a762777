"""A script behaves under distdiag as it does under `python`, from its arguments to its end."""

import re
import textwrap
from pathlib import Path

import pytest

from tests.integration.catalogue import PROGRAM_FOLDER
from tests.integration.launch import Launch, Outcome

SCRIPTS = PROGRAM_FOLDER / "like_python"
ANEW = Launch(launcher="torchrun")
OWN_OPTIONS = ["data.csv", "--report", "x", "--run-dir=here", "--select", "3", "-m", "tiny", "--"]


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", text).strip()


def assert_alike(checked: Outcome, plain: Outcome) -> None:
    """Compare what a user sees; the tool may add lines of its own to stderr, never frames."""
    assert checked.stdout == plain.stdout, checked.describe()
    assert checked.exit_status == plain.exit_status, checked.describe()
    assert without_addresses(plain.stderr) in without_addresses(checked.stderr), checked.describe()
    assert not re.search(r'File ".*(distdiag/|runpy)', checked.stderr), checked.describe()
    assert checked.leftovers == (), checked.describe()


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("script", "args"),
    [
        ("arguments", ["one", "two"]),
        ("arguments", OWN_OPTIONS),
        ("arguments", ["--help"]),
        ("arguments", ["--select", "not-a-number"]),
        ("main_module", []),
        pytest.param("spawns_ranks", [], marks=pytest.mark.slow),
    ],
)
def test_script_sees_the_start_that_python_gives_it(script: str, args: list[str]) -> None:
    path = SCRIPTS / f"{script}.py"
    assert_alike(ANEW.checked(path, args, nproc=0), ANEW.plain(path, args, nproc=0))


@pytest.mark.timeout(240)
def test_script_reads_its_input_and_finds_its_environment_unchanged() -> None:
    path = SCRIPTS / "reads_stdin.py"
    launch = Launch(launcher="torchrun", stdin="some words\nhere")
    assert_alike(launch.checked(path, nproc=0), launch.plain(path, nproc=0))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "ending",
    [
        "leave_by_return",
        "leave_by_status",
        "leave_by_message",
        "leave_by_exception",
        "leave_by_chained_exception",
        "leave_with_thread",
        pytest.param("leave_by_true", marks=pytest.mark.slow),
        pytest.param("leave_by_none", marks=pytest.mark.slow),
        pytest.param("leave_by_interrupt", marks=pytest.mark.slow),
        pytest.param("leave_by_own_hook", marks=pytest.mark.slow),
        pytest.param("leave_by_os_exit", marks=pytest.mark.slow),
        pytest.param("leave_by_signal", marks=pytest.mark.slow),
        pytest.param("leave_with_failed_thread", marks=pytest.mark.slow),
        pytest.param("leave_by_failing_handler", marks=pytest.mark.slow),
    ],
)
def test_script_ends_as_under_python(ending: str) -> None:
    path = SCRIPTS / "endings.py"
    assert_alike(ANEW.checked(path, [ending], nproc=0), ANEW.plain(path, [ending], nproc=0))


@pytest.mark.timeout(240)
def test_syntax_error_is_shown_as_python_shows_it(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text('"""Lacks a bracket."""\n\nprint("never printed"\n')
    assert_alike(ANEW.checked(path, nproc=0), ANEW.plain(path, nproc=0))


@pytest.mark.timeout(240)
def test_script_found_by_a_relative_path_sees_that_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sibling.py").write_text("VALUE = 7\n")
    (folder / "train.py").write_text(
        textwrap.dedent("""
            import sys
            import sibling
            print(sibling.VALUE, sys.argv, sys.path[0], __file__)
        """)
    )
    monkeypatch.chdir(tmp_path)
    path = Path("project/train.py")
    assert_alike(ANEW.checked(path, nproc=0), ANEW.plain(path, nproc=0))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("ending", "status"), [("leave_by_status", 3), ("leave_by_os_exit", 4)])
def test_launcher_learns_the_status_of_the_script(ending: str, status: int) -> None:
    outcome = ANEW.checked(SCRIPTS / "endings.py", [ending])
    assert outcome.exit_status == 1, outcome.describe()
    assert re.search(rf"exitcode\s*: {status}\b", outcome.stderr), outcome.describe()
    assert outcome.leftovers == (), outcome.describe()
