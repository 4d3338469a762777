"""The runner of the integration tests bounds time and sees every process that is left behind."""

import textwrap
from pathlib import Path

import pytest

from tests.integration.launch import Launch, run_plain


def write_script(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return script


@pytest.mark.timeout(60)
def test_a_finished_script_leaves_its_status_and_output(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import sys
        print("out", sys.argv[1], sys.stdin.read())
        sys.exit("bad end")
        """,
    )
    outcome = Launch(launcher="torchrun", stdin="input").plain(script, ["word"], nproc=0)
    assert (outcome.exit_status, outcome.stdout) == (1, "out word input\n")
    assert outcome.stderr == "bad end\n"
    assert outcome.leftovers == ()


@pytest.mark.timeout(60)
def test_a_script_that_hangs_is_killed_and_its_stack_shown(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\nprint('begin')\ntime.sleep(600)\n")
    outcome = run_plain(script, nproc=0, timeout=3)
    assert outcome.exit_status is None
    assert outcome.stdout == "begin\n"
    assert "script.py:3" in outcome.stderr


@pytest.mark.timeout(60)
def test_a_process_in_a_session_of_its_own_counts_as_left_behind(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import subprocess
        subprocess.Popen(["sleep", "597"], start_new_session=True)
        """,
    )
    outcome = run_plain(script, nproc=0)
    assert outcome.exit_status == 0
    assert outcome.leftovers == ("sleep 597",)


@pytest.mark.timeout(60)
def test_an_abort_at_exit_is_reported_from_a_failure_of_the_script(tmp_path: Path) -> None:
    clean = "import os, sys\nsys.stderr.write('terminate called without an active exception')\n"
    failing = "print(1 / 0)\n"
    aborted = run_plain(write_script(tmp_path, clean + "os.abort()\n"), nproc=0)
    failed = run_plain(write_script(tmp_path, clean + failing), nproc=0)
    assert aborted.aborted_at_exit
    assert not failed.aborted_at_exit
