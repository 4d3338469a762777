"""``distdiag lint`` as a person meets it: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SICK = "import torch.distributed as dist\nif rank == 0:\n    dist.barrier()\n"
DOUBTFUL = "import torch.distributed as dist\nif x.item():\n    dist.barrier()\n"


@pytest.fixture
def lint(tmp_path):
    """Return a function that runs the command in a folder with a few programs."""
    (tmp_path / "sick.py").write_text(SICK)
    (tmp_path / "doubtful.py").write_text(DOUBTFUL)
    (tmp_path / "healthy.py").write_text("import torch.distributed as dist\ndist.barrier()\n")
    (tmp_path / "broken.py").write_text("rank = (\n")

    def run(*arguments, piped=None):
        return subprocess.run(
            [sys.executable, "-m", "distdiag.cli", "lint", *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            input=piped,
            capture_output=True,
            encoding="utf-8",
            timeout=100,
        )

    return run


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("healthy.py",), 0),
        (("doubtful.py",), 0),
        (("sick.py",), 1),
        (("sick.py", "broken.py"), 1),
        (("sick.py", "--ignore", "COL009"), 0),
        (("sick.py", "--select", "BAR"), 0),
        (("broken.py",), 2),
        (("gone.py",), 2),
        ((), 2),
        (("sick.py", "--select", "XYZ"), 2),
        (("sick.py", "--format", "pdf"), 2),
    ],
)
def test_the_status_says_what_was_found(lint, arguments, status):
    assert lint(*arguments).returncode == status


def test_findings_go_to_stdout_and_damaged_files_to_stderr(lint):
    done = lint(".")
    assert done.stdout.splitlines()[0].startswith("doubtful.py:3:5: COL013 [info] ")
    assert done.stdout.splitlines()[1].startswith("sick.py:3:5: COL009 dist.barrier is not called")
    assert done.stderr == "distdiag: broken.py:1:8: not valid Python: '(' was never closed\n"


def test_a_file_that_is_no_python_is_an_error_in_a_pull_request(lint):
    done = lint("broken.py", "--format", "github")
    assert done.stdout.startswith("::error file=broken.py,title=not linted::broken.py:1:8: not ")


def test_a_pipe_is_read(lint):
    done = lint("-", piped=SICK)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("-:3:5: COL009 dist.barrier is not called by every rank")
    broken = lint("-", "healthy.py", "--json", piped="\ufeffrank = (\n")
    assert broken.returncode == 2
    assert list(json.loads(broken.stdout)["not_checked"]) == ["-"]


@pytest.mark.parametrize("name", ["json", "sarif"])
def test_documents_are_one_json_value(lint, name):
    assert json.loads(lint("sick.py", "--format", name).stdout)


def test_the_command_loads_no_torch(tmp_path):
    (tmp_path / "sick.py").write_text(SICK)
    program = (
        "import sys\nfrom distdiag.lint.linting import lint_files\n"
        "from distdiag.config.selection import Selection\nfrom pathlib import Path\n"
        "assert lint_files([Path('sick.py')], Selection()).findings\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
        timeout=100,
    )
